"""Manual pages, completions and `--version` match the installed program."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.manual.command_tree import described_commands
from docs.site.manual.manual_pages import manual_pages
from docs.site.manual.settings_text import default_text, described_settings
from gpuenergyd import __version__
from gpuenergyd.cli.app import all_commands
from gpuenergyd.cli.main import run
from gpuenergyd.daemon.settings import Settings
from tests.support.processes import finished
from tests.support.thorough import thorough

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(sys.executable).with_name("gpuenergyd")
_COMPLETE = {
    "bash": """
        source "$1"
        COMP_WORDS=(gpuenergyd "$2"); COMP_CWORD=1
        _gpuenergyd_completion gpuenergyd
        printf '%s\\n' "${COMPREPLY[@]}"
    """,
    "zsh": """
        _arguments() { printf '%s\\n' "$@" }; _describe() { printf '%s\\n' "${(@P)2}" "${(@P)3}"; printf '%s\\n' "$@" }
        compdef() { : }
        source "$1"
        words=(gpuenergyd "$2"); CURRENT=2
        _gpuenergyd_completion
    """,
    "fish": 'source "$argv[1]"; complete --do-complete "gpuenergyd $argv[2]"',
}
"""How each shell completes a word without a person at the keyboard: the script, then the word."""


def test_every_command_has_a_manual_page_that_names_all_its_options() -> None:
    pages = manual_pages()

    for command in described_commands():
        page = pages["-".join(command.name.split()[:2]) + ".1"].replace("\\-", "-")
        assert all(option.usage.split()[0].rstrip(",") in page for option in (*command.arguments, *command.options))
        assert all(example in page for example in command.examples)
    assert {name for name in pages if name.endswith(".1")} == {
        "gpuenergyd.1",
        *(f"gpuenergyd-{name}.1" for name in all_commands()),
    }


def test_no_page_of_a_removed_command_is_shipped() -> None:
    assert {path.name for path in (ROOT / "docs" / "man").rglob("*.*")} == set(manual_pages())


def test_the_manual_page_lists_every_setting() -> None:
    page = manual_pages()["gpuenergyd.toml.5"]

    assert [key for key in Settings.model_fields if f"\\fB{key} = " not in page] == []


def test_every_setting_is_explained() -> None:
    assert [setting.keys for setting in described_settings() if not any(setting.explanation)] == []


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not here")
def test_manual_pages_are_valid_roff(tmp_path: Path) -> None:
    for name, text in manual_pages().items():
        (tmp_path / name).write_text(text, encoding="utf-8")

    lint = subprocess.run(
        ["mandoc", "-Tlint", "-Wwarning", *sorted(tmp_path.iterdir())], capture_output=True, text=True, check=False
    )

    assert [line for line in lint.stdout.splitlines() if "missing date" not in line] == []


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not here")
def test_man_shows_a_page_without_a_warning(tmp_path: Path) -> None:
    page = tmp_path / "gpuenergyd-plan.1"
    page.write_text(manual_pages()[page.name], encoding="utf-8")

    shown = finished(["man", "--warnings", "-l", page], env={**os.environ, "MANWIDTH": "80"})
    if not shown.stdout.strip():
        pytest.skip(f"man does not format pages here: {shown.stderr.strip()}")

    assert shown.returncode == 0
    assert "warning" not in shown.stderr
    assert "--microbatches M" in shown.stdout


@pytest.mark.parametrize("shell", ["bash", *thorough("zsh", "fish")])
def test_shells_complete_commands(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not here")
    environ = {**os.environ, "PATH": f"{PROGRAM.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    script = tmp_path / "completion"
    asked = {**environ, "_GPUENERGYD_COMPLETE": f"source_{shell}"}
    script.write_bytes(subprocess.run([PROGRAM], env=asked, capture_output=True, check=True).stdout)
    arguments = [str(script), "pol"] if shell == "fish" else ["completion", str(script), "pol"]

    done = subprocess.run(
        [shell, "-c", _COMPLETE[shell], *arguments], env=environ, capture_output=True, text=True, check=False
    )

    assert "policies" in done.stdout, done.stderr
    assert "restore" not in done.stdout


def test_the_version_names_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"gpuenergyd {__version__}"
    assert lines[1].startswith("Python 3.")
    assert any(line.startswith("daemon: ") and "aiohttp " in line for line in lines)


def test_missing_dependencies_are_listed_without_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpuenergyd.cli.versions._DEPENDENCIES", {"trainers": ("no-such-package",)})

    assert run(["--version"]) == 0
    assert "trainers: not installed (no-such-package)" in capsys.readouterr().out


def test_help_lists_every_command_under_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0

    tasks = {name: entry.task for name, entry in all_commands().items()}
    section, found = "", {}
    for line in capsys.readouterr().out.splitlines():
        if not line:
            section = ""
        elif line.endswith(":") and not line.startswith(" "):
            section = line[:-1]
        elif section in tasks.values() and line.startswith("  "):
            found[line.split()[0]] = section
    assert found == tasks


def test_defaults_are_shown_as_they_are_written_in_the_file() -> None:
    assert default_text("levers") == '["clocks", "power-limits", "power-profiles"]'
    assert default_text("policy") == '"bubble-aware"'
    assert default_text("mode") is None
