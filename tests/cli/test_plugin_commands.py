"""Commands of plugins: found by entry point, in the help under their task, and no danger to the other commands."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs.site.house_map import ROOT
from gpuenergyd.cli.app import COMMANDS, all_commands
from gpuenergyd.cli.main import run
from gpuenergyd.errors import UsageError
from tests.support.documents import blocks
from tests.support.installed_distribution import install_distribution, site_of
from tests.support.sample_history import write_sample_history

PAGE = ROOT / "docs" / "how-to" / "write-a-plugin.md"
site = site_of(all_commands.cache_clear)
ENTRY = "from gpuenergyd.cli.command_entry import CommandEntry\nENTRY = CommandEntry('Monitor', '{module}', 'Do it.')\n"


def install(site: Path, **commands: str) -> None:
    install_distribution(site, "plugin", "gpuenergyd.commands", commands)


def test_the_plugin_of_the_documents_prints_and_is_listed_under_its_task(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command, entry = [block.text for block in blocks(PAGE) if block.language == "python"][:2]
    (site / "power_command.py").write_text(command)
    (site / "power_plugin.py").write_text(entry)
    install(site, power="power_plugin:POWER")
    status = {"gpus": [{"index": 0, "power_w": 61.5}]}
    monkeypatch.setattr("gpuenergyd.client.connection.DaemonClient.get", lambda *_: status)

    assert run(["--help"]) == 0
    monitor = capsys.readouterr().out.partition("Monitor:\n")[2].partition("\n\n")[0]
    assert ["power", all_commands()["power"].summary] in [line.split(maxsplit=1) for line in monitor.splitlines()]
    assert run(["power", "--help"]) == 0
    assert all_commands()["power"].summary in capsys.readouterr().out
    assert run(["power"]) == 0
    assert capsys.readouterr().out == "GPU 0: 61.5 W\n"
    assert run(["power", "--json"]) == 0
    assert capsys.readouterr().out == '{"powers_w":[61.5]}\n'


def test_a_plugin_that_cannot_be_loaded_says_why_in_the_list(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, shaky="no_such_module:ENTRY", other="sys:path")

    assert run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert "shaky        Cannot be loaded: No module named 'no_such_module'" in listed
    assert "other        Cannot be loaded: sys:path is no CommandEntry" in listed
    assert run(["shaky"]) == 1
    assert capsys.readouterr().err == "gpuenergyd: this command needs 'no_such_module', which is not installed\n"


def test_a_plugin_cannot_replace_a_command(site: Path) -> None:
    (site / "usurper.py").write_text(ENTRY.format(module="usurper"))
    install(site, status="usurper:ENTRY")

    assert all_commands()["status"] == COMMANDS["status"]


def test_an_error_of_a_plugin_is_one_line(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "refusal.py").write_text(
        ENTRY.format(module="refusal")
        + f"from {UsageError.__module__} import UsageError\ndef refuse() -> int:\n    raise UsageError('not today')\n"
    )
    install(site, refuse="refusal:ENTRY")

    assert run(["refuse"]) == 2
    assert capsys.readouterr().err == "gpuenergyd: not today\n"


def test_a_proof_without_its_package_names_the_extra_in_one_line(tmp_path: Path) -> None:
    program = "import sys; sys.modules['cryptography'] = None; from gpuenergyd.cli.main import run\n"
    program += f"sys.exit(run(['prove', '--check', {str(tmp_path)!r}]))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    expected = "gpuenergyd: this command needs 'cryptography': pip install 'gpuenergyd[prove]'\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_a_command_of_this_package_does_not_search_for_plugins() -> None:
    program = (
        "import sys; from gpuenergyd.cli.main import run\n"
        "run(['status', '--socket', '/none']); sys.exit('importlib.metadata' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_a_group_of_reports_that_fails_is_one_line_and_leaves_the_html_report(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install_distribution(
        site, "plugin", "gpuenergyd.report_groups", {"moon": "no_such_module:group", "sun": "math:sqrt"}
    )
    database = str(write_sample_history(tmp_path / "history.sqlite3"))
    reason = "report group 'moon' (no_such_module:group) cannot be loaded: No module named 'no_such_module'"

    assert run(["report", "--group-by", "moon", "--database", database]) == 1
    assert capsys.readouterr().err == f"gpuenergyd: {reason}\n"
    assert run(["report", "--format", "html", "--database", database]) == 0
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"gpuenergyd: warning: {reason}"
    assert second.startswith("gpuenergyd: warning: report group 'sun': TypeError: ")
