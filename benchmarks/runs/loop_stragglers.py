"""Stragglers of plain data-parallel training in real processes: one rank of DDP becomes slower, again and again.

    python benchmarks/runs/loop_stragglers.py [--episodes 10] [--ratio 1.2] [--steps 30] [--json]

Two ranks over gloo on simulated A100s (tests/support/phase_training.py), joined by `gpuenergyd run` without a mark in
the program and without a permitted slowdown. After the ranks have their plans, one of them takes longer in as many
steps, then as long as before, by turns. The other one follows from the step on in which its forward runs at a lower
clock than before the episode, and has left in the first one at that clock again. Energies are exact ones of the other
rank's GPU: steps in which it waits against those in which it follows. Times are real: run it on a quiet host.
"""

import argparse
import json
import math
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_sim.driver.world_kinds import WorldKind
from gpuenergyd_trainers.autostart.launching import launch_environment
from tests.support.daemon_process import DaemonProcess
from tests.support.phase_ranks import NUM_RANKS, gpu_uuids, launcher_environment, run_ranks

FIRST_STEP = 130
"""Before it the plans of the ranks settle."""
SLOW_RANK, OTHER_RANK = 1, 0
MOST_STEPS_TO_FOLLOW, MOST_STEPS_TO_LEAVE = 6, 4
PRODUCT_RULES = {name: getattr(JobRules(), name) for name in ("warmup_iterations", "baseline_iterations")}
"""Lengths that daemons of tests shorten, as the product has them by default."""
_POLL_S = 1.0
_LIMIT_S = 900.0


@dataclass(frozen=True, slots=True)
class Episode:
    """What the other rank did in one episode; None where it never followed, or never left."""

    steps_to_follow: int | None
    """Steps in which it only waited, as in the other benchmarks of stragglers."""
    steps_to_leave: int | None
    """Steps in which it was still slow after the episode."""
    saving_ratio: float | None
    """Energy of a following step below that of a waiting one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--ratio", type=float, default=1.2, help="factor on the time of the slower rank's phases")
    parser.add_argument("--steps", type=int, default=30, help="steps of an episode, and between two")
    parser.add_argument("--world", choices=list(WorldKind), default=WorldKind.KIND)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.episodes < 1 or options.steps < 2:
        parser.error(f"--episodes {options.episodes}, --steps {options.steps}: must be at least 1 and 2")
    num_steps = FIRST_STEP + 2 * options.steps * options.episodes
    ranks, reported = train(num_steps, options.steps, options.ratio, WorldKind(options.world))
    firsts = range(FIRST_STEP, num_steps, 2 * options.steps)
    found = [episode(ranks[OTHER_RANK], first, options.steps) for first in firsts]
    figures = summary(found, reported)
    print(json.dumps(figures, indent=None if options.json else 2))
    return 0 if figures["num_followed_in_time"] == figures["num_left_in_time"] == len(found) and reported else 1


def summary(found: Sequence[Episode], reported: float | None) -> dict[str, Any]:
    """Return the figures of all episodes; `reported` is the saving that the daemon reports."""
    followed = [own.steps_to_follow for own in found if own.steps_to_follow is not None]
    left = [own.steps_to_leave for own in found if own.steps_to_leave is not None]
    savings = [own.saving_ratio for own in found if own.saving_ratio is not None]
    return {
        "num_episodes": len(found),
        "steps_to_follow": [own.steps_to_follow for own in found],
        "steps_to_leave": [own.steps_to_leave for own in found],
        "num_followed_in_time": sum(steps <= MOST_STEPS_TO_FOLLOW for steps in followed),
        "num_left_in_time": sum(steps <= MOST_STEPS_TO_LEAVE for steps in left),
        "saving_ratio": median(savings) if savings else None,
        "saving_reported_ratio": reported,
    }


def episode(rank: dict[str, Any], first: int, num_steps: int) -> Episode:
    """Return what a rank did in the episode that begins with a step."""
    energies_j = rank["energies_j"]
    clocks = [math.inf if mhz is None else mhz for mhz in rank["clocks_mhz"]]  # without a lock: full speed
    usual_mhz = median(clocks[first - num_steps // 2 : first])
    is_lower = [mhz < usual_mhz for mhz in clocks]
    end = first + num_steps
    follows = next((step for step in range(first, end) if is_lower[step]), None)
    if follows is None:
        return Episode(None, None, None)
    leaves = next((step for step in range(end, min(end + num_steps, len(clocks))) if not is_lower[step]), None)
    steps_j = [energies_j[step] - energies_j[step - 1] for step in range(first, end)]
    waiting, following = steps_j[1 : follows - first], steps_j[follows - first + 1 :]
    saving = 1 - median(following) / median(waiting) if waiting and following else None
    return Episode(follows - first, None if leaves is None else leaves - end, saving)


def train(num_steps: int, steps: int, ratio: float, kind: WorldKind) -> tuple[list[dict[str, Any]], float | None]:
    """Train once; return what each rank measured, and the saving that the daemon last said."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        daemon = DaemonProcess(folder / "daemon", num_gpus=NUM_RANKS, kind=kind, overrides=PRODUCT_RULES)
        daemon.start()
        is_over, reported = threading.Event(), list[float]()
        watching = threading.Thread(target=_watch, args=(daemon, is_over, reported))
        watching.start()
        try:
            environ = {
                **launcher_environment(folder),
                "GPUENERGYD_GPU_UUID": gpu_uuids(daemon.world_path),
                "GPUENERGYD_SOCKET": str(daemon.socket_path),
                "GPUENERGYD_JOB": "ddp",
            }
            slow = ["--slow-rank", f"{SLOW_RANK}", "--slow-from", f"{FIRST_STEP}", "--slow-for", f"{steps}"]
            arguments = ["--iterations", f"{num_steps}", *slow, "--slow-ratio", f"{ratio}"]
            ranks = run_ranks(
                "ddp", folder, daemon.world_path, arguments, launch_environment(environ), limit_s=_LIMIT_S
            )
        finally:
            is_over.set()
            watching.join()
            daemon.stop()
        return ranks, reported[-1] if reported else None


def _watch(daemon: DaemonProcess, is_over: threading.Event, reported: list[float]) -> None:
    """Keep what the daemon says that following has saved."""
    while not is_over.wait(_POLL_S):
        try:
            jobs = daemon.status()["jobs"]
        except GpuEnergyError:
            continue
        reported.extend(job["extrinsic_saving_ratio"] for job in jobs if job.get("extrinsic_saving_ratio") is not None)


if __name__ == "__main__":
    sys.exit(main())
