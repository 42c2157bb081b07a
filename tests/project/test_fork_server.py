"""The processes that tests fork: exit statuses, and no survivor when a test run is killed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_process import ROOT, DaemonProcess, running_daemon
from tests.support.fork_server import SERVER
from tests.support.processes import child_pids
from tests.support.waiting import LIMIT_S, wait_until

START_TRAINING = """
import sys
from pathlib import Path
from tests.support.daemon_process import DaemonProcess
daemon = DaemonProcess(Path(sys.argv[1]))
training = daemon.trainer(iterations=1_000_000)
print(training.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.kill
def test_a_killed_test_run_leaves_no_training_running(tmp_path: Path) -> None:
    DaemonProcess(tmp_path)  # creates the simulated GPUs
    command = [sys.executable, "-c", START_TRAINING, str(tmp_path)]
    test_run = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert test_run.stdout is not None
    assert test_run.stdin is not None
    launcher = int(test_run.stdout.readline())
    wait_until(lambda: len(child_pids(launcher)) == 4)
    processes = [launcher, *child_pids(launcher)]

    test_run.kill()
    test_run.wait(LIMIT_S)

    for stream in (test_run.stdout, test_run.stdin):
        stream.close()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))


def test_a_forked_process_has_the_exit_status_of_the_program(tmp_path: Path) -> None:
    refused = SERVER.fork("tests.support.daemon_main", [json.dumps({"driver": "none"})], log=tmp_path / "log")

    assert refused.wait(LIMIT_S) == 2
    assert "--driver = 'none'" in (tmp_path / "log").read_text()


@pytest.mark.kill
def test_a_killed_daemon_reports_its_signal(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as daemon:
        process = daemon.process
        assert process is not None

        process.kill()

        assert process.wait(LIMIT_S) == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL
