"""Prolog and epilog on a real Slurm node: tags of its jobs, restore after a crash, and a drained node."""

import os
import signal
import sys
from pathlib import Path

import pytest

from gpuenergyd.store import open_history
from tests.deploy.test_slurm import SLURM, prefix_of
from tests.support.daemon_process import ROOT, DaemonProcess
from tests.support.processes import child_pids
from tests.support.slurm_node import needs_slurm, slurm_node
from tests.support.stopping import stop_while_lowered
from tests.support.waiting import LIMIT_S, wait_until


def kill_every_process_of(daemon: DaemonProcess) -> None:
    """Kill the restore sentinel before the worker, so that no process is left to restore."""
    worker = daemon.status()["worker"]
    stop_while_lowered(daemon)
    others = [pid for pid in child_pids(daemon.pid) if pid not in worker.values()]
    for pid in (worker["sentinel_pid"], worker["pid"], *others, daemon.pid):
        os.kill(pid, signal.SIGKILL)
    assert daemon.process is not None
    daemon.process.wait(LIMIT_S)


@pytest.mark.kill
def test_the_epilog_of_a_real_node_restores_after_a_crash_and_drains_the_node_if_it_cannot(tmp_path: Path) -> None:
    needs_slurm()
    settings = {"policy": "uniform", "warmup_iterations": 0, "baseline_iterations": 2}
    daemon = DaemonProcess(tmp_path / "daemon", 4, settings).start()
    environ = {
        "GPUENERGYD_PREFIX": str(prefix_of(tmp_path, daemon)),
        "GPUENERGYD_JOURNAL": str(daemon.journal_path),
        "PATH": os.environ["PATH"],
    }
    scripts = {"prolog": str(SLURM / "prolog.sh"), "epilog": str(SLURM / "epilog.sh")}
    try:
        with slurm_node(tmp_path / "slurm", **scripts, environ=environ) as node:
            program = [sys.executable, "-m", "tests.support.fake_trainer", "--iterations", "100000"]
            sockets = ["--socket", str(daemon.socket_path), "--world", str(daemon.world_path)]
            job = node.start(["--chdir", str(ROOT), *program, *sockets])
            wait_until(daemon.is_lowered, log=lambda: daemon.log + node.log)
            kill_every_process_of(daemon)
            assert daemon.is_lowered(), "no process was left to restore the GPUs"

            node.cancel_all()
            job.wait(LIMIT_S)
            wait_until(daemon.is_as_found, log=lambda: node.log)
            wait_until(lambda: node.state == "idle", log=lambda: node.log)

            damaged = ["sh", "-c", f"echo no journal >'{daemon.journal_path}'"]
            assert node.run(damaged) == 0
            wait_until(lambda: node.state.startswith("drain"), log=lambda: node.log)
            assert node.reason == "Epilog error"
    finally:
        daemon.stop()
    with open_history(daemon.database_path) as history:
        (summary,) = history.job_summaries()
    tags = dict(summary.tags)
    assert tags["slurm_job_id"] == "1"
    assert tags["slurm_cluster"] == "one"
