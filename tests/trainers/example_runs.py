"""Runs of an unmodified example against a daemon, with its losses and the daemon's records."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN_LIMIT_S = 400.0
NUM_STEPS = 12


def run_example(
    folder: Path, name: str, *, launcher: Sequence[str] = (), num_ranks: int = 1
) -> tuple[list[float], list[dict[str, Any]], int]:
    """Return each step's loss, the ranks' registrations, and the number of reports."""
    with FakeDaemon(folder) as daemon:
        variables = {
            "GPUENERGYD_SOCKET": daemon.socket_path,
            "GPUENERGYD_GPU_UUID": ",".join(f"GPU-{rank}" for rank in range(num_ranks)),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        losses = run_program(name, folder, variables, launcher=launcher)
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S) for _ in range(num_ranks)]
        num_reports = daemon.reports.qsize()
    return losses, registrations, num_reports


def run_program(
    name: str,
    folder: Path,
    variables: Mapping[str, str],
    *,
    launcher: Sequence[str] = (),
    num_steps: int = NUM_STEPS,
) -> list[float]:
    """Run an example with these variables in its environment; return each step's loss."""
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / f"{name}.py"), "--steps", str(num_steps)],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)", done.stdout, re.MULTILINE)]


def check_example(
    folder: Path, name: str, *, schedule_name: str = "loop", launcher: Sequence[str] = (), num_ranks: int = 1
) -> None:
    """Assert that an example learns, and that each rank joins with its own GPU and reports."""
    losses, registrations, num_reports = run_example(folder, name, launcher=launcher, num_ranks=num_ranks)

    assert len(losses) == NUM_STEPS
    assert losses[-1] < losses[0]
    assert {registration["gpu_uuid"] for registration in registrations} == {f"GPU-{rank}" for rank in range(num_ranks)}
    assert {registration["schedule_name"] for registration in registrations} == {schedule_name}
    assert num_reports > 0
