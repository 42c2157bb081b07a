"""The first plan of an installation: the planner is compiled beside the baseline, and status and doctor say so."""

import json
from pathlib import Path

import pytest

from gpuenergyd.cli.main import run
from gpuenergyd_policies.planning.compiled import IS_COMPILED
from tests.support.daemon_process import DaemonProcess, running_daemon, training
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not IS_COMPILED, reason="numba is not installed or is disabled")


def with_cache_folder(path: Path) -> str:
    """Return a prologue of a daemon that is not forked from the process of the tests that has compiled everything."""
    return f"import os; os.environ['NUMBA_CACHE_DIR'] = {str(path)!r}"


def outcome(daemon: DaemonProcess) -> str:
    jobs = daemon.status()["jobs"]
    return str(jobs[0]["outcome_reason"]) if jobs else ""


@pytest.mark.thorough
def test_a_job_that_waits_for_the_compilation_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon(tmp_path, prologue=with_cache_folder(tmp_path / "empty")) as daemon, training(daemon):
        wait_until(
            lambda: outcome(daemon).startswith("compiling the planner, once, after "), 600, log=lambda: daemon.log
        )
        assert run(["status", "--socket", str(daemon.socket_path)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        daemon.wait_for_phase("trial", "tuned", timeout_s=600)
        host = daemon.status()["policy_host"]
        daemon.stop()
        log = daemon.log

    assert "no saving so far: compiling the planner, once, after " in shown
    assert (host["activity"], host["trouble"]) == (None, None)
    assert log.count("policy host: compiling the planner, once") == 1
    assert any((tmp_path / "empty").rglob("*.nbc"))


@pytest.mark.thorough
def test_a_host_without_a_cache_folder_is_named_once_in_the_log_and_by_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # permissions do not stop root; nothing can be written below a file
    with running_daemon(tmp_path, prologue=with_cache_folder(tmp_path / "file" / "below")) as daemon, training(daemon):
        wait_until(lambda: daemon.status()["policy_host"]["trouble"] is not None, 600)
        monkeypatch.setenv("GPUENERGYD_SOCKET", str(daemon.socket_path))
        run(["doctor", "--json"])
        found = [f for f in json.loads(capsys.readouterr().out)["findings"] if f["subject"] == "daemon"]
        log = daemon.log

    assert [(finding["level"], finding["detail"][:70], finding["fix"]) for finding in found] == [
        (
            "note",
            "policy host: no folder for the compiled planner is writable, so every ",
            "set NUMBA_CACHE_DIR to a folder that can be written",
        )
    ]
    assert log.count("policy host: no folder for the compiled planner is writable") == 1
    assert log.count("policy host: compiling the planner in memory") == 1
