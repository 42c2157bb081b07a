"""Runs of an unmodified example against a daemon, with its losses and the daemon's records."""

import re
from pathlib import Path
from typing import Any

from tests.client.fake_daemon import WAIT_LIMIT_S, FakeDaemon
from tests.trainers.forked_programs import run_forked

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUM_STEPS = 12


def run_example(folder: Path, name: str, *, num_ranks: int = 1) -> tuple[list[float], list[dict[str, Any]], int]:
    """Return each step's loss, the ranks' registrations, and the number of reports."""
    with FakeDaemon(folder) as daemon:
        gpu_uuids = [f"GPU-{rank}" for rank in range(num_ranks)]
        losses = run_program(name, folder, daemon.socket_path, gpu_uuids)
        registrations = [daemon.registrations.get(timeout=WAIT_LIMIT_S) for _ in range(num_ranks)]
        num_reports = daemon.reports.qsize()
    return losses, registrations, num_reports


def run_program(
    name: str, folder: Path, socket_path: str, gpu_uuids: list[str], *, num_steps: int = NUM_STEPS
) -> list[float]:
    """Run an example with one rank per GPU; return each step's loss."""
    outputs = run_forked(
        folder,
        EXAMPLES / f"{name}.py",
        ["--steps", str(num_steps)],
        num_ranks=len(gpu_uuids),
        GPUENERGYD_SOCKET=socket_path,
        GPUENERGYD_GPU_UUID=",".join(gpu_uuids),
    )
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([0-9.]+)", "".join(outputs), re.MULTILINE)]


def check_example(folder: Path, name: str, *, num_ranks: int = 1) -> None:
    """Assert that an example learns, and that each rank joins with its own GPU and reports."""
    losses, registrations, num_reports = run_example(folder, name, num_ranks=num_ranks)

    assert len(losses) == NUM_STEPS
    assert losses[-1] < losses[0]
    assert {registration["gpu_uuid"] for registration in registrations} == {f"GPU-{rank}" for rank in range(num_ranks)}
    assert {registration["schedule_name"] for registration in registrations} == {"loop"}
    assert num_reports > 0
