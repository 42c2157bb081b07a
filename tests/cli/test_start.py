"""A command imports only what it uses: the packages of other commands would take longer to import than it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpuenergyd.cli.app import all_commands, command_line
from gpuenergyd.cli.main import run
from tests.support.daemon_process import ROOT
from tests.support.sample_history import write_sample_history
from tests.support.sample_status import sample_status

PACKAGES = {
    *("aiohttp", "alembic", "apscheduler", "asyncio", "cryptography", "jinja2", "msgspec", "numba"),
    *("numpy", "pydantic", "pydantic_settings", "requests", "rich", "scipy", "sqlalchemy", "torch", "typer"),
}
MODELS = "gpuenergyd.core.policy_api.policy"
PLAN = ["plan", str(ROOT / "examples" / "pipeline.csv"), "--microbatches", "8"]
HELP_OF_EACH = """
import os, sys
from gpuenergyd.cli.main import run
run(["--help"])  # imports typer
for name in sys.argv[1:]:
    if os.fork() == 0:
        run(["help", name])
        print(name, *sys.modules, file=sys.stderr, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
"""Prints the modules that the help of each command imports; it takes longer to import typer for each of them."""
ANSWERS = "from gpuenergyd.client.connection import DaemonClient\nDaemonClient.get = lambda *_: {status}"


def imports(*arguments: str, before: str = "") -> set[str]:
    """Return which packages that take long to import a command imports, and whether the models of policies."""
    program = f"import sys\n{before}\nfrom gpuenergyd.cli.main import run\nrun(sys.argv[1:])\n"
    program += "print('\\n', *sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return (PACKAGES | {MODELS}) & {*done.stderr.splitlines()[-1].split()}


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--help"], ["help", "run"]], ids=" ".join)
def test_run_and_the_version_need_the_standard_library_only(arguments: list[str]) -> None:
    assert imports(*arguments) == set()


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]], ids=" ".join)
def test_the_list_of_commands_imports_no_command(arguments: list[str]) -> None:
    assert imports(*arguments) == {"typer"}


def test_the_help_of_a_command_imports_what_typer_needs() -> None:
    names = sorted({*all_commands()} - {"plan", "explain"})
    done = subprocess.run([sys.executable, "-c", HELP_OF_EACH, *names], capture_output=True, text=True, check=True)

    modules = [line.split() for line in done.stderr.splitlines()]
    assert [name for name, *_ in modules] == names
    needed = {"typer", "pydantic", "asyncio", MODELS}
    assert {name: too_many for name, *found in modules if (too_many := PACKAGES & {*found} - needed)} == {}


@pytest.mark.parametrize(("arguments", "expected"), [([], {"rich", "typer"}), (["--json"], {"typer"})])
def test_the_status_imports_neither_models_of_pipelines_nor_a_parser(arguments: list[str], expected: set[str]) -> None:
    answers = ANSWERS.format(status=sample_status())

    assert imports("status", *arguments, before=answers) == expected


def test_without_a_daemon_the_status_imports_typer_only(tmp_path: Path) -> None:
    assert imports("status", "--socket", str(tmp_path / "none.sock")) == {"typer"}


def test_a_restore_imports_typer_only() -> None:
    assert imports("restore", "--journal", "/nonexistent/journal.json") == {"typer"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--json"], {"typer"}),
        (["--group-by", "day", "--format", "csv"], {"typer"}),
        (["--group-by", "day"], {"rich", "typer"}),
        ([], {"rich", "typer"}),
    ],
)
def test_a_report_of_an_sqlite_history_imports_no_database_package(
    arguments: list[str], expected: set[str], tmp_path: Path
) -> None:
    database = str(write_sample_history(tmp_path / "history.sqlite3"))

    assert imports("report", "--database", database, *arguments) - {MODELS} == expected


@pytest.mark.parametrize(("arguments", "expected"), [([], {"rich"}), (["--json"], set())])
def test_a_small_plan_imports_neither_numba_nor_scipy(arguments: list[str], expected: set[str]) -> None:
    always = {"numpy", "typer", MODELS}

    assert imports(*PLAN, *arguments) == expected | always


def test_the_list_of_commands_has_their_own_summaries() -> None:
    commands = command_line().commands

    for name, entry in all_commands().items():
        assert commands[name].get_short_help_str(200) == entry.summary
        assert commands[name].name == name


@pytest.mark.parametrize(
    ("words", "same"),
    [("", "--help"), ("plan", "plan --help"), ("fleet", "fleet -h"), ("fleet show", "fleet show --help"),
     ("run", "run -h"), ("help", "--help"), ("--help", "-h")],
)  # fmt: skip
def test_help_of_a_command_is_what_its_option_shows(words: str, same: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["help", *words.split()]) == 0
    text = capsys.readouterr().out
    assert run(same.split()) == 0

    assert text == capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "beginning", "end"),
    [
        ("plam", "no command 'plam' of 'gpuenergyd'; valid are: demo, run, prove, ", ", install, uninstall"),
        ("job stop", "no command 'stop' of 'gpuenergyd job'; valid are: ", ""),
        ("plan file", "no command 'file' of 'gpuenergyd plan'; it has no subcommands", ""),
    ],
)
def test_help_of_an_unknown_command_names_the_known_ones(
    words: str, beginning: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["help", *words.split()]) == 2
    captured = capsys.readouterr()

    assert captured.out == ""
    assert captured.err.startswith(f"gpuenergyd: {beginning}")
    assert captured.err.endswith(f"{end}\n")
    assert len(captured.err.splitlines()) == 1
