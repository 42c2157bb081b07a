"""Slurm's prolog and epilog restore GPUs from the journal if no daemon runs, and report failures."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_process import ROOT, DaemonProcess, training
from tests.support.processes import child_pids
from tests.support.stopping import stop_while_lowered
from tests.support.waiting import LIMIT_S, wait_until

SLURM = ROOT / "deploy" / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sh"))


def prefix_of(folder: Path, daemon: DaemonProcess | None = None) -> Path:
    """Create an installation prefix with the commands of this environment."""
    bin_folder = folder / "prefix" / "bin"
    bin_folder.mkdir(parents=True)
    socket_path = daemon.socket_path if daemon is not None else folder / "nobody.sock"
    for name, command in (("python", ""), ("gpuenergyd", "-m gpuenergyd.cli.main")):
        program = bin_folder / name
        program.write_text(
            f'#!/bin/sh\nGPUENERGYD_SOCKET={socket_path} exec {sys.executable} {command} "$@"\n', encoding="utf-8"
        )
        program.chmod(0o755)
    return bin_folder.parent


def run(script: str, prefix: Path, journal: Path) -> int:
    environment = {**os.environ, "GPUENERGYD_PREFIX": str(prefix), "GPUENERGYD_JOURNAL": str(journal)}
    return subprocess.run([SLURM / script], env=environment, check=False, capture_output=True).returncode


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_scripts_are_valid_bash_and_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)

    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/bin/bash\n")


def test_on_a_node_without_gpuenergyd_both_do_nothing(tmp_path: Path) -> None:
    for script in SCRIPTS:
        assert run(script.name, tmp_path / "nothing", tmp_path / "journal.json") == 0


@pytest.mark.kill
def test_the_epilog_restores_only_without_a_running_daemon(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path, 4, {"policy": "uniform", "warmup_iterations": 0, "baseline_iterations": 2}).start()
    prefix = prefix_of(tmp_path, daemon)
    try:
        with training(daemon):
            wait_until(daemon.is_lowered)
            assert run("epilog.sh", prefix, daemon.journal_path) == 0
            wait_until(daemon.is_lowered)

            # Kill all processes, the restore sentinel before the worker, so that none is left to restore.
            worker = daemon.status()["worker"]
            stop_while_lowered(daemon)
            others = [pid for pid in child_pids(daemon.pid) if pid not in worker.values()]
            for pid in (worker["sentinel_pid"], worker["pid"], *others):
                os.kill(pid, signal.SIGKILL)
            os.kill(daemon.pid, signal.SIGKILL)
            assert daemon.process is not None
            daemon.process.wait(LIMIT_S)
        assert daemon.is_lowered(), "no process was left to restore the GPUs"

        assert run("epilog.sh", prefix, daemon.journal_path) == 0
        assert daemon.is_as_found()
    finally:
        daemon.stop()


def test_a_failed_restore_fails_the_epilog_but_not_the_prolog(tmp_path: Path) -> None:
    prefix = prefix_of(tmp_path)
    journal = tmp_path / "journal.json"
    journal.write_text("no journal")
    assert run("epilog.sh", prefix, journal) == 1

    journal.write_text("no journal")
    assert run("prolog.sh", prefix, journal) == 0
