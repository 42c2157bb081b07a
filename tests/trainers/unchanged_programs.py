"""Runs of an unmodified program, with and without `gpuenergyd run`."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuenergyd_trainers.autostart.launching import launch_environment
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon

RUN_LIMIT_S = 400.0


@dataclass(frozen=True, slots=True)
class Joined:
    """Outputs of two runs of one program, and the daemon's records of the first."""

    output: str
    output_without: str
    registrations: list[dict[str, Any]]
    reports: list[dict[str, Any]]


def run_unchanged(
    folder: Path, program: str, *, num_joining: int = 1, launcher: Sequence[str] = (), **variables: str
) -> Joined:
    """Run a program joined, then without joining, to show that nothing of the first run remains.

    Any message of this project on standard error is a failure: joining is silent.
    """
    script = folder / "train.py"
    script.write_text(program, encoding="utf-8")
    command = [sys.executable, *launcher, str(script)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    environ = {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
    with FakeDaemon(folder) as daemon:
        gpu_uuids = ",".join(f"GPU-{rank}" for rank in range(max(1, num_joining)))
        hooked = launch_environment(
            {**environ, "GPUENERGYD_SOCKET": daemon.socket_path, "GPUENERGYD_GPU_UUID": gpu_uuids}
        )
        joined = _run(command, hooked, folder)
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S) for _ in range(num_joining)]
        reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]
    without = _run(command, environ, folder)
    assert "gpuenergyd" not in joined.stderr, joined.stderr
    return Joined(joined.stdout, without.stdout, registrations, reports)


def check_one_process_joined(folder: Path, program: str, *, num_losses: int) -> None:
    """Assert that a plain loop that prints its losses joins as one process, with losses equal bit for bit."""
    joined = run_unchanged(folder, program)

    assert joined.output == joined.output_without
    assert len(joined.output.split()) == num_losses
    assert [(r["job_name"], r["gpu_uuid"], r["schedule_name"]) for r in joined.registrations] == [
        ("train", "GPU-0", "loop")
    ]
    assert joined.reports


def _run(command: Sequence[str], environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environ, cwd=folder, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done
