"""A running 1F1B job that changes its order of instructions by itself, on simulated GPUs, and goes back when it must.

    python benchmarks/runs/reorder.py [--iterations 200] [--expensive-from 150] [--duration-scale 1] [--json]

Real torch training of the demo's GPT on four gloo processes and four simulated A100s in the unkind world, under a real
daemon, with no slowdown allowed. Three runs with equal data:

- `allowed`: attached with `allow_reorder=True`. The job measures full speed, plans clocks in 1F1B, tries
  split backwards and changes its order by itself. From iteration `--expensive-from` on, input and weight gradients take
  half as long again; it must be back in 1F1B within three iterations.
- `advised`: attached without permission. Nothing but clocks may change; the advice must be within two percentage points
  of what the first run then saves.
- `alone`: without GPUs and daemon, whose losses the others must equal bit for bit.

Saving and slowdown compare the medians of settled iterations with those at full speed in 1F1B, measured with the
simulated GPUs' own counters and the host's clock. Each rank's memory is the bytes that autograd keeps for backwards; a
simulated GPU has room for two microbatches more than stages, plus the margin that plans leave free.

Other load on the machine makes iterations slower, and a job may then go back to 1F1B, or never leave it: repeat it on a
quiet machine. An iteration takes 1.3 to 1.7 s. Needs the checkout.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store import open_history
from gpuenergyd.store.records import ORDER_ADVICE
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.training.gpt_pipeline import GptRank
from gpuenergyd_trainers.torch_pipelining import attach
from tests.support.daemon_process import running_daemon
from tests.support.simulated_memory import SimulatedMemory
from tests.trainers.executed import TracedStage, share_trace
from tests.trainers.pipeline_processes import run_ranks

NUM_RANKS, NUM_MICROBATCHES = 4, 8
SEED = 5
RUN_LIMIT_S = 3_600.0
EXPENSIVE_FACTOR = 1.5
SPARE_MICROBATCHES = 2
NEEDED_SAVING_RATIO, MOST_SLOWDOWN_RATIO, MOST_ADVICE_ERROR_RATIO, MOST_ITERATIONS_BACK = 0.20, 0.01, 0.02, 3
UNLIMITED_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class Case:
    """One training."""

    num_iterations: int
    duration_scale: float
    allow_reorder: bool = False
    expensive_from: int | None = None
    capacities_bytes: tuple[int, ...] = (UNLIMITED_BYTES,) * NUM_RANKS


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration as seen by rank 0, from its start to the next one's; split if any rank's backwards are."""

    plan_epoch: int
    is_split: bool
    time_s: float
    energy_j: float


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--advised-iterations", type=int, default=100)
    parser.add_argument("--expensive-from", type=int, default=150)
    parser.add_argument("--duration-scale", type=float, default=1.0, help="scale instruction durations")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="reorder-") as name:
        folder = Path(name)
        case = Case(options.iterations, options.duration_scale)
        alone = run_alone(case, folder / "alone")
        # 1F1B holds as many microbatches on a rank as there are stages from it on.
        sizes = [rank["peak_bytes"] / (NUM_RANKS - r) for r, rank in enumerate(alone)]
        room = NUM_RANKS + SPARE_MICROBATCHES
        capacities = tuple(round(room * size / (1 - TUNING.memory_margin_ratio)) for size in sizes)
        case = replace(case, capacities_bytes=capacities)
        allowed = run_attached(
            replace(case, allow_reorder=True, expensive_from=options.expensive_from), folder / "allowed"
        )
        advised = run_attached(replace(case, num_iterations=options.advised_iterations), folder / "advised")
    result = evaluated(allowed, advised, alone, capacities, options.expensive_from)
    if options.json:
        print(json.dumps(result))
    else:
        print(json.dumps(result, indent=2))
    return 0 if result["holds"] else 1


def evaluated(
    allowed: Mapping[str, Any],
    advised: Mapping[str, Any],
    alone: Sequence[Mapping[str, Any]],
    capacities: Sequence[int],
    expensive_from: int,
) -> dict[str, Any]:
    """Return all figures, and whether they are as they must be."""
    order, plain = allowed["order"], advised["plain"]
    advice_ratio = advised["advised_saving_ratio"]
    limits = [round((1 - TUNING.memory_margin_ratio) * capacity) for capacity in capacities]
    peaks = [rank["peak_bytes"] for rank in allowed["ranks"]]
    checks = {
        "saves_enough": order is not None and order["saving_ratio"] >= NEEDED_SAVING_RATIO,
        "is_on_time": order is not None and order["slowdown_ratio"] <= MOST_SLOWDOWN_RATIO,
        "are_losses_equal": all(
            rank["losses"] == other["losses"][: len(rank["losses"])]
            for run in (allowed, advised)
            for rank, other in zip(run["ranks"], alone, strict=True)
        ),
        "is_within_memory": all(peak <= limit for peak, limit in zip(peaks, limits, strict=True)),
        "is_back_in_time": allowed["iterations_back"] is not None
        and allowed["iterations_back"] <= MOST_ITERATIONS_BACK,
        "is_unchanged_without_permission": not any(i.is_split for i in advised["iterations"]),
        "is_advice_right": advice_ratio is not None
        and order is not None
        and abs(advice_ratio - order["saving_ratio"]) <= MOST_ADVICE_ERROR_RATIO,
    }
    return {
        "num_ranks": NUM_RANKS,
        "num_microbatches": NUM_MICROBATCHES,
        "num_iterations": len(allowed["iterations"]),
        "first_iteration_in_order": allowed["first_in_order"],
        "in_order": order,
        "in_1f1b": plain,
        "advice": advised["advice"],
        "advised_saving_ratio": advice_ratio,
        "last_advice_when_allowed": allowed["advice"],
        "plans": allowed["plans"],
        "expensive_from": expensive_from,
        "iterations_back": allowed["iterations_back"],
        "peak_bytes": peaks,
        "limit_bytes": limits,
        "num_errors": sum(rank["num_errors"] for run in (allowed, advised) for rank in run["ranks"]),
        **checks,
        "load_average": round(os.getloadavg()[0], 1),
        "holds": all(checks.values()),
    }


def run_alone(case: Case, folder: Path) -> list[dict[str, Any]]:
    """Train without GPUs and daemon."""
    folder.mkdir()
    return run_ranks(NUM_RANKS, folder, train, case, None, None, limit_s=RUN_LIMIT_S)


def run_attached(case: Case, folder: Path) -> dict[str, Any]:
    """Train one case under its own daemon; return what it measured."""
    folder.mkdir()
    with running_daemon(folder / "daemon", sample_period_s=0.1, baseline_iterations=10) as daemon:
        paths = str(daemon.world_path), str(daemon.socket_path)
        ranks = run_ranks(NUM_RANKS, folder, train, case, *paths, limit_s=RUN_LIMIT_S)
        database_path = daemon.database_path
    with open_history(database_path) as history:
        (job,) = history.job_summaries()
        plans = history.plans(job.job_id)
        purposes = {row.plan_epoch: row.plan.purpose for row in plans}
        advice = [event for event in history.control_events(job.job_id) if event.action == ORDER_ADVICE]
    # An order may leave the backwards of some ranks whole.
    splits = [any(of_ranks) for of_ranks in zip(*(rank["splits"] for rank in ranks), strict=True)]
    iterations = [
        replace(own, is_split=is_split) for own, is_split in zip(ranks[0]["iterations"], splits, strict=False)
    ]
    until = case.expensive_from or len(iterations)
    baseline, order, plain = (
        settled(iterations[:until], purposes, purpose, is_split=is_split)
        for purpose, is_split in ((PlanPurpose.BASELINE, False), (PlanPurpose.TUNED, True), (PlanPurpose.TUNED, False))
    )
    back = None
    if case.expensive_from is not None and any(i.is_split for i in iterations[case.expensive_from - 1 :]):
        after = [i.is_split for i in iterations[case.expensive_from :]]
        back = after.index(False) if False in after else None
    first = next((k for k, i in enumerate(iterations) if i.is_split), None)
    return {
        "ranks": ranks,
        "iterations": iterations,
        "first_in_order": first,
        "order": compared(baseline, order),
        "plain": compared(baseline, plain),
        "advice": advice[-1].reason if advice else None,
        "advised_saving_ratio": float(advice[0].after) if advice else None,
        "iterations_back": back,
        "plans": [f"{row.apply_at_iteration}: {row.plan.plan_id}, {row.plan.reason}" for row in plans],
    }


def settled(
    iterations: Sequence[Iteration], purposes: Mapping[int, PlanPurpose], purpose: PlanPurpose, *, is_split: bool
) -> list[Iteration]:
    """Return the iterations under the newest plan of a purpose, or of all full-speed ones, without a plan's first."""
    following = [
        now
        for before, now in pairwise(iterations[1:])
        if now.plan_epoch == before.plan_epoch
        and purposes.get(now.plan_epoch, PlanPurpose.BASELINE) is purpose
        and now.is_split == is_split
    ]
    if purpose is PlanPurpose.BASELINE or not following:
        return following
    epochs = [i.plan_epoch for i in following]
    return [i for i in following if epochs.count(i.plan_epoch) >= 4 or i.plan_epoch == epochs[-1]]


def compared(baseline: Sequence[Iteration], tuned: Sequence[Iteration]) -> dict[str, Any] | None:
    """Return saving and slowdown between medians; None without iterations on either side."""
    if not baseline or not tuned:
        return None
    return {
        "saving_ratio": round(1 - median(i.energy_j for i in tuned) / median(i.energy_j for i in baseline), 4),
        "slowdown_ratio": round(median(i.time_s for i in tuned) / median(i.time_s for i in baseline) - 1, 4),
        "num_iterations": len(tuned),
        "num_baseline_iterations": len(baseline),
    }


# --- one rank ---


def train(rank: int, case: Case, world_path: str | None, socket_path: str | None) -> dict[str, Any]:
    """Train one rank; return its losses, its memory and, on rank 0, time and energy of each iteration."""
    training = GptRank("1f1b", rank, NUM_RANKS, NUM_MICROBATCHES, seed=SEED, stage_class=TracedStage)
    trace = share_trace(training.stages)
    memory = SimulatedMemory(training.stages[0], capacity_bytes=case.capacities_bytes[rank])
    handle = host = None
    gpu_uuids: list[str] = []
    if world_path is not None:
        host = SimulatedHost.open(Path(world_path))
        gpu_uuids = [identity.gpu_uuid for identity in host.identities()]
        training.simulate_on(host, gpu_uuids[rank], duration_scale=case.duration_scale)
        handle = attach(
            training.schedule, job="gpt-reorder", run_key="reorder", gpu_uuid=gpu_uuids[rank], socket_path=socket_path,
            timer=training.timer, memory=memory, allow_reorder=case.allow_reorder,
        )  # fmt: skip
    dist.barrier()
    losses: list[list[str]] = []
    iterations: list[Iteration] = []
    splits: list[bool] = []
    last: tuple[float, float] | None = None
    for index in range(case.num_iterations):
        if index == case.expensive_from:
            for works in training.works:
                works |= {kind: _longer(works[kind]) for kind in ("I", "W")}
        trace.clear()
        began = time.monotonic(), sum(host.exact_energy_j(uuid) for uuid in gpu_uuids) if host and rank == 0 else 0.0
        if last is not None and iterations:
            iterations[-1] = replace(iterations[-1], time_s=began[0] - last[0], energy_j=began[1] - last[1])
        last = began
        losses.append([float(loss.detach()).hex() for loss in training.step(index)])
        epoch = handle.plan_epoch if handle is not None else 0
        splits.append(any(kind == "W" for kind, *_ in trace))
        iterations.append(Iteration(epoch, splits[-1], 0.0, 0.0))
    if handle is not None:
        handle.detach()
    return {
        "losses": losses,
        "peak_bytes": memory.peak_bytes,
        "iterations": iterations[:-1] if rank == 0 else [],
        "splits": splits,
        "num_errors": handle.num_errors if handle is not None else 0,
    }


def _longer(work: Any) -> Any:
    times = {name: EXPENSIVE_FACTOR * getattr(work, name) for name in ("memory_time_s", "compute_time_s")}
    return replace(work, **times)


if __name__ == "__main__":
    sys.exit(main())
