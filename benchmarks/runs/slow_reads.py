"""Plans and savings where energy counters are read by slow calls, in virtual time, for counters of any period.

    python benchmarks/runs/slow_reads.py [--gpus 1 2 8] [--reads-ms 0.1 ...] [--periods-ms 1 ...] [--seed 0] [--json]

One process reads all GPUs of a host in turn, as the daemon's sampler does; the sampler is the real one. Each cell is a
training under the bubble-aware policy: a pipeline over all GPUs, or one GPU that may run 5 % slower. Savings are those
of the virtual GPUs, compared with the saving of the best plan from perfect knowledge. The interval of the daemon's own
estimate must contain the true saving.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.printing import print_figures
from gpuenergyd.core.job.outcome import find_outcome
from gpuenergyd.core.pipeline.graph import InstructionKind, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, Work
from tests.support.perfect_knowledge import least_energy_j
from tests.support.slow_sampling import SlowlyReadTraining

NUM_MICROBATCHES = 8
NUM_ITERATIONS = 110
TIME_NOISE_RATIO = 0.003
ONE_GPU_SLOWDOWN_RATIO = 0.05
DATED_SHARE, UNDATED_SHARE = 0.95, 0.85
"""Least shares of the ideal saving, where counter updates can be dated one by one and elsewhere."""
TOLERATED_MISSES_RATIO = 0.1


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one training."""

    gpus: int
    read_ms: float
    period_ms: float
    has_plan: bool
    iterations_before_the_plan: int | None
    is_dated: bool
    saving_ratio: float | None
    """True saving of the plans in force at the end."""
    ideal_saving_ratio: float
    slowdown_ratio: float | None
    interval: tuple[float, float] | None
    is_covered: bool
    outcome: str

    @property
    def is_good(self) -> bool:
        """Whether there is a plan that saves as much as the targets demand."""
        share = DATED_SHARE if self.is_dated else UNDATED_SHARE
        return self.saving_ratio is not None and self.saving_ratio >= share * self.ideal_saving_ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--reads-ms", type=float, nargs="+", default=[0.1, 0.5, 1.0, 2.0, 5.0])
    parser.add_argument("--periods-ms", type=float, nargs="+", default=[1.0, 5.0, 20.0, 100.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = []
    for gpus in options.gpus:
        for read_ms in options.reads_ms:
            for period_ms in options.periods_ms:
                cells.append(run(gpus, read_ms, period_ms, options.seed))
                print(cells[-1], file=sys.stderr, flush=True)
    figures = summary(cells) | {"seed": options.seed}
    print_figures(figures, is_json=options.json, left_out="cells")
    return 0 if is_met(figures) else 1


def summary(cells: list[Cell]) -> dict[str, Any]:
    """Return the figures of all cells."""
    measured = [cell for cell in cells if cell.interval is not None]
    return {
        "num_cells": len(cells),
        "num_with_plan": sum(cell.has_plan for cell in cells),
        "num_good": sum(cell.is_good for cell in cells),
        "num_silent": sum(not cell.has_plan and not cell.outcome for cell in cells),
        "covered_ratio": sum(cell.is_covered for cell in measured) / len(measured) if measured else None,
        "least_share_where_dated": _least_share([cell for cell in cells if cell.is_dated]),
        "least_share_elsewhere": _least_share([cell for cell in cells if not cell.is_dated]),
        "slowdown_max_ratio": max((c.slowdown_ratio for c in cells if c.slowdown_ratio is not None), default=None),
        "cells": [asdict(cell) for cell in cells],
    }


def _least_share(cells: list[Cell]) -> float | None:
    return min(((cell.saving_ratio or 0.0) / cell.ideal_saving_ratio for cell in cells), default=None)


def is_met(figures: dict[str, Any]) -> bool:
    """Return whether every cell has a plan that saves enough, and the intervals contain the truth."""
    covered = figures["covered_ratio"]
    return (
        figures["num_good"] == figures["num_cells"]
        and figures["num_silent"] == 0
        and covered is not None
        and covered >= 1 - TOLERATED_MISSES_RATIO
    )


def stages(num_gpus: int) -> dict[tuple[int, InstructionKind], Work]:
    """Return the work of a pipeline with unequal stages, 50 to 110 ms per instruction."""
    return {
        (rank, kind): A100Work(memory_s * scale, compute_s * scale, watts)
        for rank, scale in enumerate([1.0, 0.93, 1.0, 1.1, 0.97, 1.0, 0.9, 1.05][:num_gpus])
        for kind, memory_s, compute_s, watts in (
            (InstructionKind.F, 0.0120, 0.0382, 0.25),
            (InstructionKind.B, 0.0270, 0.0660, 0.27),
        )
    }


def exact_training(num_gpus: int, policy: ClockPolicy) -> VirtualTraining:
    """Return the training with counters that are exact at every boundary."""
    slowdown = ONE_GPU_SLOWDOWN_RATIO if num_gpus == 1 else 0.0
    schedule = one_forward_one_backward(num_gpus, NUM_MICROBATCHES)
    return VirtualTraining(schedule, stages(num_gpus), policy, max_slowdown_ratio=slowdown)


@cache
def ideal_energy_j(num_gpus: int) -> float:
    """Return the energy of an iteration under the plan from perfect knowledge."""
    return least_energy_j(partial(exact_training, num_gpus))


def run(num_gpus: int, read_ms: float, period_ms: float, seed: int) -> Cell:
    """Train once and compare the plan with the ideal one."""
    training = SlowlyReadTraining(
        one_forward_one_backward(num_gpus, NUM_MICROBATCHES),
        stages(num_gpus),
        BubbleAware(),
        max_slowdown_ratio=ONE_GPU_SLOWDOWN_RATIO if num_gpus == 1 else 0.0,
        noise_ratio=TIME_NOISE_RATIO,
        counter_period_s=period_ms / 1000,
        read_s=read_ms / 1000,
        seed=seed,
    )
    try:
        training.run(NUM_ITERATIONS)
        num_dated = training.num_dated
    finally:
        training.close()
    job = training.job
    tuned = {plan.plan_id for plan in job.knowledge.plans.kept if plan.purpose is PlanPurpose.TUNED}
    times_s, energies_j = zip(*((t, e) for t, e, plan in training.history[2:8] if plan not in tuned), strict=True)
    under_plan = [k for k, (_, _, plan) in enumerate(training.history) if plan in tuned]
    last = training.history[under_plan[-1]][2] if under_plan else None
    rows = [(t, e) for t, e, plan in training.history if plan == last][1:] if last is not None else []
    true_saving = float(1 - median(e for _, e in rows) / median(energies_j)) if rows else None
    saving = job.knowledge.saving()
    estimate = saving.saving_ratio if saving is not None else None
    interval = (float(estimate.low), float(estimate.high)) if estimate is not None else None
    return Cell(
        gpus=num_gpus,
        read_ms=read_ms,
        period_ms=period_ms,
        has_plan=bool(under_plan),
        iterations_before_the_plan=under_plan[0] if under_plan else None,
        is_dated=num_dated == num_gpus,
        saving_ratio=true_saving,
        ideal_saving_ratio=float(1 - ideal_energy_j(num_gpus) / median(energies_j)),
        slowdown_ratio=float(median(t for t, _ in rows) / median(times_s) - 1) if rows else None,
        interval=interval,
        is_covered=interval is not None and true_saving is not None and interval[0] <= true_saving <= interval[1],
        outcome=find_outcome(job).reason,
    )


if __name__ == "__main__":
    sys.exit(main())
