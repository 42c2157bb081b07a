"""Log lines name the time and the program, and under systemd's journal, which has the time, the program alone."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpuenergyd.log_lines import configure_logging
from tests.support.daemon_process import running_daemon
from tests.support.waiting import wait_until

_PROGRAM = """
import logging
from gpuenergyd.log_lines import configure_logging, write_log_line
configure_logging("gpuenergyd")
logging.getLogger("gpuenergyd").info("serving")
write_log_line("gpuenergyd-worker", "restored")
"""
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z "


def _written(stream: Path, journal: str | None) -> list[str]:
    """Return what a program logs to a file, with this value of systemd's variable."""
    environ = {name: value for name, value in os.environ.items() if name != "JOURNAL_STREAM"}
    if journal is not None:
        environ["JOURNAL_STREAM"] = journal
    with stream.open("w") as file:
        subprocess.run([sys.executable, "-c", _PROGRAM], stderr=file, env=environ, check=True)
    return stream.read_text().splitlines()


@pytest.mark.parametrize("journal", [None, "1:1"], ids=["no-journal", "stderr-is-redirected"])
def test_a_line_in_a_file_has_the_time(tmp_path: Path, journal: str | None) -> None:
    lines = _written(tmp_path / "log", journal)

    patterns = (f"{_TIME}gpuenergyd: INFO: serving", f"{_TIME}gpuenergyd-worker: restored")
    assert [bool(re.fullmatch(*pair)) for pair in zip(patterns, lines, strict=True)] == [True, True], lines


def test_a_line_for_the_journal_has_no_time_of_its_own(tmp_path: Path) -> None:
    stream = tmp_path / "journal"
    stream.touch()
    status = stream.stat()

    lines = _written(stream, f"{status.st_dev}:{status.st_ino}")

    assert lines == ["gpuenergyd: INFO: serving", "gpuenergyd-worker: restored"]


def test_every_line_of_a_daemon_and_its_processes_has_time_and_program(tmp_path: Path) -> None:
    with running_daemon(tmp_path, carbon_zone="XX", carbon_source="fixed", carbon_fixed_g_per_kwh=300.0) as daemon:
        wait_until(lambda: daemon.status()["carbon"]["basis"] == "fixed", 60)
        daemon.stop()
        lines = daemon.log.splitlines()

    starts = [re.match(f"{_TIME}(gpuenergyd[a-z-]*): ", line) for line in lines]
    assert None not in starts, lines
    assert {start[1] for start in starts if start} >= {"gpuenergyd", "gpuenergyd-carbon"}


def test_a_filter_applies_to_all_loggers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class OnlyShort(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            return len(record.getMessage()) < 10

    root = logging.RootLogger(logging.WARNING)
    monkeypatch.setattr(logging, "root", root)
    configure_logging("gpuenergyd", logging.INFO, OnlyShort())
    root.info("short")
    root.info("much too long")

    assert capsys.readouterr().err.endswith(" gpuenergyd: INFO: short\n")


@pytest.mark.fault(59)
def test_no_text_in_a_message_passes_for_a_line_of_its_own(tmp_path: Path) -> None:
    forged = "2026-01-01T00:00:00.000Z gpuenergyd: INFO: saved"
    program = (
        "import logging\n"
        "from gpuenergyd.log_lines import configure_logging\n"
        "configure_logging('gpuenergyd')\n"
        f"logging.getLogger('x').info('job %s joined', 'fake\\n{forged}\\x1b[2J')\n"
    )
    with (tmp_path / "log").open("w") as file:
        subprocess.run([sys.executable, "-c", program], stderr=file, check=True)
    first, second = (tmp_path / "log").read_text().splitlines()

    assert first.endswith("gpuenergyd: INFO: job fake")
    assert second == f"  | {forged}\\x1b[2J joined"
