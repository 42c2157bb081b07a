"""Help of every command, and every error as one line on stderr with the right exit code, never a traceback."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.manual.command_tree import described_commands
from gpuenergyd import __version__
from gpuenergyd.cli.app import command_line
from gpuenergyd.cli.main import run
from gpuenergyd.errors import GpuEnergyError

COMMANDS = ("demo", "serve", "status", "report", "dashboard", "plan", "explain", "policies", "restore", "doctor")


@pytest.fixture(autouse=True)
def _no_settings_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GPUENERGYD_")]:
        monkeypatch.delenv(name)


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


@pytest.mark.parametrize("name", [command.name for command in described_commands()])
def test_every_command_has_short_help_with_examples_and_without_type_names(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = name.split()[1:]

    assert run([*arguments, "--help"]) == 0
    full = capsys.readouterr().out
    assert run([*arguments, "-h"]) == 0
    assert capsys.readouterr().out == full
    assert "-h, --help" in full
    assert re.findall(r"<[^>\n]+>", full) == []
    if arguments:
        examples = full.partition("\nExamples:\n")[2].splitlines()
        assert examples
        assert [line for line in examples if not line.strip().startswith(f"{name} ".rstrip())] == []


@pytest.mark.parametrize("example", [example for command in described_commands() for example in command.examples])
def test_every_example_is_accepted_by_its_command(example: str) -> None:
    command = command_line()
    words = shlex.split(example.partition(" # ")[0])[1:]
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]

    assert command.make_context("example", words).params  # raises for an unknown option or a missing argument


def test_an_option_has_the_same_name_in_all_commands() -> None:
    by_text: dict[str, set[str]] = {}
    for command in described_commands():
        for option in command.options:
            for what in ("slowdown", "Folder of the simulated GPUs", "Daemon socket", "History to read"):
                if what in option.text:
                    by_text.setdefault(what, set()).add(option.usage.split()[0].rstrip(","))

    assert by_text == {
        "slowdown": {"--max-slowdown"},
        "Folder of the simulated GPUs": {"--world"},
        "Daemon socket": {"--socket"},
        "History to read": {"--database"},
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--max-slowdown", "{ratio}", "true"],
        ["serve", "--max-slowdown", "{ratio}"],
        ["demo", "--max-slowdown", "{ratio}"],
        ["plan", "none.csv", "--max-slowdown", "{ratio}"],
        ["plan", "none.csv", "--slowdown", "{ratio}"],
        ["explain", "none.csv", "--max-slowdown", "{ratio}"],
        ["carbon", "backtest", "none.csv", "--train-until", "2025-07-01", "--max-slowdown", "{ratio}"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("ratio", ["1.5", "5", "-0.1", "nan"])
def test_a_slowdown_out_of_range_is_one_line_with_the_range(
    arguments: list[str], ratio: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run([argument.replace("{ratio}", ratio) for argument in arguments])

    assert code == 2
    assert (
        capsys.readouterr().err
        == f"gpuenergyd: --max-slowdown {ratio}: must be a ratio from 0 to 1, e.g. 0.05 for 5 %\n"
    )


@pytest.mark.parametrize(("ratio", "num_warnings"), [("0.5", 0), ("0.6", 1), ("1", 1)])
def test_a_slowdown_above_one_half_is_warned_about(
    ratio: str, num_warnings: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["plan", str(tmp_path / "none.csv"), "--max-slowdown", ratio])

    *warnings, refusal = capsys.readouterr().err.splitlines()
    assert len(warnings) == num_warnings
    assert all(line.startswith("gpuenergyd: warning: a slowdown of") for line in warnings)
    assert "none.csv" in refusal


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (["nope"], 2, "No such command 'nope'"),
        (["status", "--nope"], 2, "No such option: --nope"),
        (["status", "--socket", "{tmp}/none.sock"], 3, "no daemon answers on {tmp}/none.sock"),
        (["status", "--json", "--socket", "{tmp}/none.sock"], 3, "no daemon answers on {tmp}/none.sock"),
        (["report", "--database", "{tmp}/none.sqlite3"], 1, "{tmp}/none.sqlite3"),
        (["report", "--since", "yesterday"], 2, "--since 'yesterday'"),
        (["report", "--format", "xml"], 2, "'table', 'json', 'csv', 'html'"),
        (["serve", "--driver", "simulated"], 2, "world_path"),
        (["serve", "--mode", "fast"], 2, "'fast'"),
        (["serve", "--max-slowdown", "-1"], 2, "max-slowdown"),
        (["serve", "--config", "{tmp}/none.toml"], 2, "{tmp}/none.toml"),
        (
            ["demo", "--policy", "nope"],
            2,
            (
                "no policy 'nope'; installed: bubble-aware, cost, envelope, frequency-file, full-speed, learning,"
                " power-limit, power-profile, uniform"
            ),
        ),
        (["demo", "--gpus", "1"], 2, "--gpus"),
        (["demo", "--simulation", "x"], 2, "for '--simulation': 'x' is not one of 'kind', 'unkind'"),
        (["calibrate", "--changes", "0"], 2, "for '--changes': must be greater than or equal to 1; see"),
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


def test_a_file_that_cannot_be_used_is_named_and_no_bug(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "--check", 99 * "long"]) == 1
    assert capsys.readouterr().err == f"gpuenergyd: File name too long: {99 * 'long'}/registration.json\n"


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
    assert result.stderr == (
        "gpuenergyd: this command needs 'typer': pip install 'gpuenergyd[daemon]'; without it, only `gpuenergyd run`"
        " and `gpuenergyd --version` work\n"
    )
