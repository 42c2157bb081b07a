"""Main programs of the units: they execute the worker or fetcher, or report an invalid setting in one line."""

import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpuenergyd.daemon.carbon import fetcher_unit
from gpuenergyd.daemon.processes import worker_unit
from gpuenergyd.daemon.processes.launch import worker_command
from gpuenergyd.daemon.settings import Processes, Settings, load_settings
from gpuenergyd.errors import UsageError


class Replaced(Exception):  # noqa: N818  what execv does to a process is no error
    """Raised instead of replacing this process by another program."""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return a list that receives the executed command line; settings come from the environment only."""
    command: list[str] = []

    def execv(path: str, arguments: Sequence[str]) -> None:
        assert path == arguments[0]
        command.extend(arguments)
        raise Replaced

    monkeypatch.setattr("os.execv", execv)
    monkeypatch.setattr("gpuenergyd.daemon.settings.SYSTEM_CONFIG_PATH", tmp_path / "none.toml")
    for key in Settings.model_fields:
        monkeypatch.delenv(f"GPUENERGYD_{key.upper()}", raising=False)
    monkeypatch.setenv("GPUENERGYD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("GPUENERGYD_STATE_DIR", str(tmp_path / "state"))
    return command


def test_the_worker_unit_executes_the_worker_with_the_settings(
    program: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["worker_unit", "--daemon-user", "gpuenergyd"])

    with pytest.raises(Replaced):
        worker_unit.main()

    assert program == [*worker_command(load_settings()), "--daemon-user", "gpuenergyd"]


def test_the_worker_unit_reports_an_invalid_setting(
    program: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GPUENERGYD_MODE", "fast")

    with pytest.raises(SystemExit) as ended:
        worker_unit.main()

    assert ended.value.code == UsageError.exit_code
    assert " gpuenergyd-worker: GPUENERGYD_MODE = 'fast': " in capsys.readouterr().err
    assert program == []


def test_the_fetcher_unit_executes_the_fetcher_with_its_configuration_on_standard_input(
    program: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUENERGYD_CARBON_ZONE", "GB")
    with (tmp_path / "stdin").open("w") as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        with pytest.raises(Replaced):
            fetcher_unit.main()
        reported = json.loads(os.read(stdin.fileno(), 2**16))

    assert program == [sys.executable, "-I", "-m", "gpuenergyd.carbon.fetcher"]
    assert reported["zone"] == "GB"
    assert reported["out_path"] == str(load_settings(processes=Processes.UNITS).carbon_file_path)


def test_the_fetcher_unit_exits_normally_without_a_carbon_zone(
    program: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert fetcher_unit.main() == 0

    assert "nothing to fetch: carbon_zone is not set" in caplog.text
    assert program == []


def test_the_fetcher_unit_reports_an_invalid_setting(
    program: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GPUENERGYD_CARBON_BUDGET_RATIO", "-3")

    assert fetcher_unit.main() == UsageError.exit_code
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "GPUENERGYD_CARBON_BUDGET_RATIO = '-3'" in caplog.text
    assert program == []
