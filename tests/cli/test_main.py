"""Every error is one line on stderr with the right exit code, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpuenergyd import __version__
from gpuenergyd.cli.main import run
from gpuenergyd.errors import GpuEnergyError

COMMANDS = ("demo", "serve", "status", "report", "dashboard", "plan", "explain", "policies", "restore", "doctor")


@pytest.fixture(autouse=True)
def _no_settings_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GPUENERGYD_")]:
        monkeypatch.delenv(name)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith(f"gpuenergyd {__version__}\n")


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    out = capsys.readouterr().out
    assert all(f"  {command}" in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_all_but_servers_have_a_json_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: gpuenergyd {command}" in out
    assert ("--json" in out) is (command not in {"serve", "dashboard"})


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["nope"], 2, "No such command 'nope'"),
        (["status", "--nope"], 2, "No such option: --nope"),
        (["status", "--socket", "{tmp}/none.sock"], 3, "no daemon answers on {tmp}/none.sock"),
        (["status", "--json", "--socket", "{tmp}/none.sock"], 3, "no daemon answers on {tmp}/none.sock"),
        (["report", "--database", "{tmp}/none.sqlite3"], 1, "{tmp}/none.sqlite3"),
        (["report", "--since", "yesterday"], 2, "--since 'yesterday'"),
        (["report", "--since", "2999-01-01"], 2, "is in the future"),
        (["report", "--since", "1h", "--until", "2h"], 2, "is not before --until"),
        (["report", "--format", "xml"], 2, "'table', 'json', 'csv', 'html'"),
        (["serve", "--driver", "simulated"], 2, "world_path"),
        (["serve", "--mode", "fast"], 2, "'fast'"),
        (["serve", "--max-slowdown", "-1"], 2, "max-slowdown"),
        (["serve", "--config", "{tmp}/none.toml"], 2, "{tmp}/none.toml"),
        (["demo", "--policy", "nope"], 2, "no policy 'nope'; installed: bubble-aware, envelope, full-speed, uniform"),
        (["demo", "--gpus", "1"], 2, "--gpus"),
        (["demo", "--gpu-model", "abacus", "--out", "{tmp}/r.html"], 1, "abacus"),
        (["demo", "--out", "{tmp}/none/r.html"], 2, "no folder {tmp}/none"),
        (["demo", "--keep", "{tmp}"], 2, "--keep {tmp}"),
        (["demo", "--gpus", "4", "--microbatches", "3"], 2, "--microbatches 3"),
        (["plan", "{tmp}/none.csv"], 2, "{tmp}/none.csv"),
        (["restore", "--all", "--dry-run"], 2, "--all"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_gets_one_clear_line(
    arguments: list[str], exit_code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([argument.replace("{tmp}", str(tmp_path)) for argument in arguments])

    captured = capsys.readouterr()
    assert code == exit_code, captured
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("gpuenergyd: ")
    assert expected.replace("{tmp}", str(tmp_path)) in captured.err


def test_a_damaged_history_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.sqlite3"
    path.write_bytes(b"this is no database" * 100)

    assert run(["report", "--database", str(path)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_bug_is_one_line_and_its_traceback_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_group: str) -> None:
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr("gpuenergyd.daemon.processes.plugins.installed_policies", broken)
    assert run(["policies"]) == 1
    plain = capsys.readouterr().err
    monkeypatch.setenv("GPUENERGYD_DEBUG", "1")
    assert run(["policies"]) == 1
    debugged = capsys.readouterr().err

    assert len(plain.splitlines()) == 1
    assert "ZeroDivisionError: nobody expected this" in plain
    assert "Traceback" in debugged


def test_ctrl_c_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_group: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("gpuenergyd.daemon.processes.plugins.installed_policies", interrupted)

    assert run(["policies"]) == 130
    assert capsys.readouterr().err == ""


def test_every_error_ends_with_its_own_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class RareError(GpuEnergyError):
        exit_code = 7

    def failing(_group: str) -> None:
        raise RareError("two\nlines")

    monkeypatch.setattr("gpuenergyd.daemon.processes.plugins.installed_policies", failing)

    assert run(["policies"]) == 7
    assert capsys.readouterr().err == "gpuenergyd: two lines\n"


def test_the_installed_command_is_this_one() -> None:
    command = Path(sys.executable).with_name("gpuenergyd")

    result = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)

    assert result.stdout.startswith(f"gpuenergyd {__version__}\n")


def test_a_plain_install_says_what_the_command_line_needs() -> None:
    program = "import sys; sys.modules['typer'] = None; from gpuenergyd.cli.main import run; sys.exit(run(['status']))"

    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert result.returncode == 1
    assert result.stderr == "gpuenergyd: the command line needs 'typer': pip install 'gpuenergyd[daemon]'\n"


@pytest.mark.parametrize("command", [["restore", "--journal", "/nonexistent/journal.json"], ["status"]])
def test_restore_and_status_load_nothing_heavy(command: list[str]) -> None:
    program = (
        "import sys; from gpuenergyd.cli.main import run; run(sys.argv[1:]);"
        "print(sorted({'aiohttp', 'jinja2', 'numpy', 'pydantic_settings', 'sqlalchemy', 'torch'} & set(sys.modules)))"
    )

    result = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=True)

    assert result.stdout.splitlines()[-1] == "[]"
