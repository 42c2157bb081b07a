"""Plans where setting a clock stalls training: what they save, net of the stalls, against fixed numbers of segments.

    python benchmarks/runs/call_price.py [--stalls-ms 0 1 3 10] [--scales 1.0 0.3] [--seed 0] [--json]

A pipeline of four stages in virtual time, whose driver stops the work of a GPU at each set call. The policy
bubble-aware learns the price. It is compared with itself, restricted to plans with 1, 2, 4, 8 or 12
segments, and with the best such plan from exact knowledge of the price, the latency and all times and energies. Savings
and slowdowns are those of the virtual GPUs, calls included.
"""

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report.printing import print_figures
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_policies.bubble_aware.candidates import Candidates
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.learning.calls import CallCost
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.perfect_knowledge import WAITING_CLOCKS_MHZ, Informed, true_profile
from tests.support.unkind_training import TargetLatencies, UnkindDriver, UnkindTraining

WEIGHTS = (1.0, 0.93, 1.0, 1.1)
NUM_MICROBATCHES = 8
NUM_ITERATIONS = 160
NUM_LAST = 40
"""Iterations at the end of a training that are measured."""
NUM_ITERATIONS_INFORMED = 40
TIME_NOISE_RATIO = 0.003
LATENCY_S = 0.006
ASSUMED_LATENCY_S = 0.03
FIXED_SEGMENTS = (1, 2, 4, 8, 12)
MAX_SLOWDOWN_RATIO = 0.01
TOLERATED_POINTS = 0.005
"""Saving that the plan may miss of the best fixed number of segments."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of one training."""

    scale: float
    stall_ms: float
    saving_ratio: float
    slowdown_ratio: float
    calls_per_iteration: float
    iterations_to_the_plan: int | None
    fixed_saving_ratio: dict[int, float]
    """By number of segments, of the policy restricted to it; only where the slowdown is permitted."""
    exact_saving_ratio: dict[int, float]
    """The same from exact knowledge."""

    @property
    def best_fixed_ratio(self) -> float:
        """Largest net saving of a fixed number of segments; zero if none keeps the time."""
        return max([0.0, *self.fixed_saving_ratio.values()])

    @property
    def best_exact_ratio(self) -> float:
        """The same from exact knowledge."""
        return max([0.0, *self.exact_saving_ratio.values()])

    @property
    def is_met(self) -> bool:
        """Whether the plan keeps the time and saves as much as the best fixed one, less the tolerance."""
        is_on_time = self.slowdown_ratio <= MAX_SLOWDOWN_RATIO
        return is_on_time and self.saving_ratio >= self.best_fixed_ratio - TOLERATED_POINTS


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stalls-ms", type=float, nargs="+", default=[0.0, 1.0, 3.0, 10.0])
    parser.add_argument("--scales", type=float, nargs="+", default=[1.0, 0.3], help="factors on all times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cells = []
    for scale in options.scales:
        for stall_ms in options.stalls_ms:
            cells.append(run(scale, stall_ms, options.seed))
            print(cells[-1], file=sys.stderr, flush=True)
    figures = summary(cells) | {"seed": options.seed}
    print_figures(figures, is_json=options.json, left_out="cells")
    return 0 if figures["num_met"] == figures["num_cells"] else 1


def summary(cells: list[Cell]) -> dict[str, Any]:
    """Return the figures of all cells."""
    return {
        "num_cells": len(cells),
        "num_met": sum(cell.is_met for cell in cells),
        "slowdown_max_ratio": max(cell.slowdown_ratio for cell in cells),
        "saving_minus_best_fixed_min_ratio": min(cell.saving_ratio - cell.best_fixed_ratio for cell in cells),
        "saving_minus_best_exact_min_ratio": min(cell.saving_ratio - cell.best_exact_ratio for cell in cells),
        "cells": [
            asdict(cell) | {"best_fixed_ratio": cell.best_fixed_ratio, "best_exact_ratio": cell.best_exact_ratio}
            for cell in cells
        ],
    }


def training(scale: float, stall_s: float, policy: ClockPolicy, seed: int, *, is_noisy: bool = True) -> UnkindTraining:
    """Return a training under a policy; a policy that knows everything is given one without noise."""
    return UnkindTraining(
        one_forward_one_backward(len(WEIGHTS), NUM_MICROBATCHES),
        a100_stages(WEIGHTS, scale=scale),
        policy,
        noise_ratio=TIME_NOISE_RATIO if is_noisy else 0.0,
        switch_latency_s=LATENCY_S,
        assumed_latency_s=ASSUMED_LATENCY_S if is_noisy else None,
        communication_latency_s=0.001 * scale,
        step_overhead_s=0.02 * scale,
        seed=seed,
        driver=UnkindDriver(TargetLatencies(LATENCY_S, LATENCY_S, 0.0), stall_s=stall_s),
    )


def run(scale: float, stall_ms: float, seed: int) -> Cell:
    """Train under the policy and under the plans with fixed numbers of segments."""
    learned = training(scale, stall_ms / 1000, BubbleAware(), seed)
    learned.run(NUM_ITERATIONS)
    first = next((k for k, (_, _, plan) in enumerate(learned.history) if (plan or "").startswith("tuned")), None)
    num_calls = learned.num_calls
    learned.run(NUM_LAST)
    saving, slowdown = _net(learned, NUM_LAST)
    calls = (learned.num_calls - num_calls) / NUM_LAST
    fixed: dict[int, float] = {}
    exact: dict[int, float] = {}
    for segments in FIXED_SEGMENTS:
        own = [_restricted(scale, stall_ms / 1000, segments, seed)]
        informed = [_exact(scale, stall_ms / 1000, segments, mhz, seed) for mhz in WAITING_CLOCKS_MHZ]
        for found, of in ((own, fixed), (informed, exact)):
            on_time = [saving for saving, slowdown in found if slowdown <= MAX_SLOWDOWN_RATIO]
            if on_time:
                of[segments] = max(on_time)
    return Cell(scale, stall_ms, saving, slowdown, calls, first, fixed, exact)


def _restricted(scale: float, stall_s: float, segments: int, seed: int) -> tuple[float, float]:
    made = training(scale, stall_s, BubbleAware(), seed)
    best = Candidates.best
    with patch.object(Candidates, "best", lambda self, _: best(self, (segments,))):
        made.run(NUM_ITERATIONS + NUM_LAST)
    return _net(made, NUM_LAST)


def _exact(scale: float, stall_s: float, segments: int, waiting_mhz: int, seed: int) -> tuple[float, float]:
    made = training(scale, stall_s, BubbleAware(), seed, is_noisy=False)
    made.policy = Informed(
        true_profile(made, lambda _: 1.0, waiting_mhz), calls=CallCost(stall_s, 0.0), max_segments=(segments,)
    )
    made.run(NUM_ITERATIONS_INFORMED)
    return _net(made, NUM_LAST // 4)


def _net(made: UnkindTraining, num_last: int) -> tuple[float, float]:
    """Return saving and slowdown of the last iterations against those at full speed before the first plan."""
    full_speed = [(time_s, energy_j) for time_s, energy_j, _ in made.history[2:8]]
    last = made.history[-num_last:]
    time_s, energy_j = mean(t for t, _, _ in last), mean(e for _, e, _ in last)
    saving = 1 - energy_j / mean(e for _, e in full_speed)
    return float(saving), float(time_s / mean(t for t, _ in full_speed) - 1)


if __name__ == "__main__":
    sys.exit(main())
