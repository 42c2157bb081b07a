"""Runs of an unmodified program, with and without `gpuenergyd run`.

Only the run that joins needs a new interpreter, whose imports are hooked.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpuenergyd_trainers.autostart.launching import launch_environment
from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.support.processes import finished
from tests.trainers.forked_programs import run_forked

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
    """Run a program joined and without joining; `OUT` names a folder of its own for each run.

    Any message of this project on standard error but one, that it has joined, is a failure.
    """
    script = folder / "train.py"
    script.write_text(program, encoding="utf-8")
    with_us, without_us = folder / "joined", folder / "without"
    with_us.mkdir()
    without_us.mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GPUENERGYD_")}
    environ = {**kept, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables, "OUT": str(with_us)}
    with FakeDaemon(folder) as daemon:
        gpu_uuids = ",".join(f"GPU-{rank}" for rank in range(max(1, num_joining)))
        hooked = launch_environment(
            {**environ, "GPUENERGYD_SOCKET": daemon.socket_path, "GPUENERGYD_GPU_UUID": gpu_uuids}
        )
        done = finished([sys.executable, *launcher, str(script)], env=hooked, cwd=with_us, timeout=RUN_LIMIT_S)
        assert done.returncode == 0, done.stderr
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S) for _ in range(num_joining)]
        reports = [daemon.reports.get_nowait() for _ in range(daemon.reports.qsize())]
    without = run_forked(without_us, script, num_ranks=num_joining, **variables, OUT=str(without_us))
    messages = [line for line in done.stderr.splitlines() if "gpuenergyd" in line]
    assert len(messages) == bool(num_joining), done.stderr
    assert all(" joined the daemon at " in line for line in messages), done.stderr
    return Joined(done.stdout, "".join(without), registrations, reports)


def check_one_process_joined(folder: Path, program: str, *, num_losses: int) -> None:
    """Assert that a plain loop that prints its losses joins as one process, with losses equal bit for bit."""
    joined = run_unchanged(folder, program)

    assert joined.output == joined.output_without
    assert len(joined.output.split()) == num_losses
    assert [(r["job_name"], r["gpu_uuid"], r["schedule_name"]) for r in joined.registrations] == [
        ("train", "GPU-0", "loop")
    ]
    assert joined.reports
