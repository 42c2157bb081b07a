"""GPT-3 175B on 8,192 GPUs under power budgets of 95 to 60 %, emulated: what water-filling gets done.

Usage: python benchmarks/runs/emulated_budgets.py [--profiles FOLDER] [--gpus a100-sxm a40] [--json]

FOLDER contains the measured stage tables of the Perseus artifact: eight stages, tensor parallel 8, so that a pipeline
has 64 GPUs. Two fleets of 128 pipelines: *one training* whose replicas end each iteration together, with 12
microbatches each, and *four trainings* of 32 pipelines with 12, 24, 48 and 96 microbatches. The budget is a share of
what all GPUs draw at full speed. The default policy divides it over the time-energy frontiers of all replicas; a speed
between two plans alternates between them. Throughput is the mean of the relative speeds, weighted by GPUs.

It is compared with what an administrator sets without frontiers, in the best way: the highest clock, and the highest
power limit, alike for all GPUs, under which all pipelines together stay within the budget on average. Under a limit,
each instruction runs at the highest clock of the table whose power is below it. The bound is water-filling over the
proven lower bounds of the frontiers. Tables are measured, pipelines are emulated. Exits with 1 if the throughput is
below one of the two, or more than 1 % below the bound.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from emulation import MICROBATCHES_OF_ALL, NUM_STAGES, PROFILES, TENSOR_PARALLEL, Case

from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import FrontierPoint
from gpuenergyd.core.policy_api.power import PowerJobView, PowerView
from gpuenergyd_policies.planning.frontier import frontier
from gpuenergyd_power.water_fill import WaterFill

RATIOS = (0.95, 0.9, 0.8, 0.7, 0.6)
NUM_PIPELINES = MICROBATCHES_OF_ALL // 12
FLEETS = {"one training": (12,), "four trainings": (12, 24, 48, 96)}
"""Microbatches of the pipelines of each training; the trainings are equally large."""
NUM_LIMITS = 400
MOST_GAP_RATIO = 0.01


@dataclass(frozen=True)
class Pipeline:
    """One pipeline with its tables; energies are of all its GPUs."""

    num_microbatches: int
    profile: PipelineProfile

    @cached_property
    def graph(self) -> DependencyGraph:
        return dependency_graph(one_forward_one_backward(NUM_STAGES, self.num_microbatches))

    @cached_property
    def points(self) -> tuple[FrontierPoint, ...]:
        found = frontier(self.graph, self.profile, until_slowest=True).points
        return tuple(
            FrontierPoint(
                p.iteration_time_s,
                TENSOR_PARALLEL * p.energy_j,
                TENSOR_PARALLEL * (p.energy_j if p.lower_bound_j is None else p.lower_bound_j),
            )
            for p in found
        )

    def run(self, choose: Callable[[InstructionProfile], ClockOption]) -> tuple[float, float]:
        """Return iteration time and mean power of all GPUs with one choice for each instruction class."""
        chosen = {key: choose(own) for key, own in self.profile.classes.items()}
        own = [chosen[i.instruction_class] for i in self.graph.instructions]
        time_s = timeline(self.graph, [option.time_s for option in own]).iteration_time_s
        waiting_s = NUM_STAGES * time_s - sum(option.time_s for option in own)
        energy_j = sum(option.energy_j for option in own) + self.profile.blocking_power_w * waiting_s
        return time_s, TENSOR_PARALLEL * energy_j / time_s

    @cached_property
    def full_speed(self) -> tuple[float, float]:
        return self.run(lambda own: own.at_max_clock)


@dataclass(frozen=True)
class Fleet:
    """Trainings of equally many pipelines."""

    pipelines: Sequence[Pipeline]
    """One of each training."""

    @property
    def copies(self) -> int:
        """Pipelines of each training."""
        return NUM_PIPELINES // len(self.pipelines)

    @property
    def full_power_w(self) -> float:
        return sum(self.copies * own.full_speed[1] for own in self.pipelines)

    def water_filled(self, budget_w: float, *, is_bound: bool) -> float | None:
        """Return the throughput of the default policy; None if the slowest plans draw more."""
        jobs = [
            PowerJobView(
                f"{number}-{copy}",
                NUM_STAGES * TENSOR_PARALLEL,
                training_id=str(number),
                can_follow=True,
                frontier=_lower_bounds(own.points) if is_bound else own.points,
                slows_for_power=True,
                full_speed_time_s=own.full_speed[0],
            )
            for number, own in enumerate(self.pipelines)
            for copy in range(self.copies)
        ]
        decision = WaterFill().divide(PowerView(budget_w, tuple(jobs), floor_speed_ratio=0.0))
        if decision.predicted_w > budget_w * (1 + 1e-6):
            return None
        return sum(min(1.0, share.speed_ratio or 0.0) for share in decision.shares) / len(jobs)

    def alike(self, budget_w: float, choices: Iterable[Callable[[InstructionProfile], ClockOption]]) -> float | None:
        """Return the throughput under the first choice within the budget; None if all are above it."""
        for choose in choices:
            found = [own.run(choose) for own in self.pipelines]
            if sum(self.copies * power_w for _, power_w in found) <= budget_w:
                pairs = zip(self.pipelines, found, strict=True)
                return sum(own.full_speed[0] / time_s for own, (time_s, _) in pairs) / len(found)
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profiles", type=Path, default=PROFILES)
    parser.add_argument("--gpus", nargs="+", default=["a100-sxm", "a40"])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for gpu in options.gpus:
        sizes = {size for own in FLEETS.values() for size in own}
        known = {size: Pipeline(size, Case(gpu, size, options.profiles).request().profile) for size in sizes}
        for name, microbatches in FLEETS.items():
            fleet = Fleet([known[m] for m in microbatches])
            for ratio in RATIOS:
                rows.append({"gpu": gpu, "fleet": name, "budget_ratio": ratio, **figures_of(fleet, ratio)})
                if not options.json:
                    print(rows[-1], flush=True)
    possible = [row for row in rows if row["throughput_ratio"] is not None]
    gaps = [1 - row["throughput_ratio"] / row["bound_ratio"] for row in possible]
    figures = {
        "num_gpus": NUM_PIPELINES * NUM_STAGES * TENSOR_PARALLEL,
        "rows": rows,
        "num_impossible": len(rows) - len(possible),
        "gap_to_bound_max_ratio": max(gaps, default=None),
    }
    print(json.dumps(figures))
    others = ("one_clock_ratio", "one_limit_ratio")
    is_best = all(row["throughput_ratio"] >= (row[other] or 0.0) for row in possible for other in others)
    return 0 if possible and is_best and max(gaps) <= MOST_GAP_RATIO else 1


def figures_of(fleet: Fleet, ratio: float) -> dict[str, Any]:
    """Return what is done within a share of full power, as throughput relative to full speed."""
    budget_w = ratio * fleet.full_power_w
    profile = fleet.pipelines[0].profile
    options = [option for own in profile.classes.values() for option in own.options]
    clocks = sorted({option.sm_clock_mhz for option in options}, reverse=True)
    most_w = max(option.energy_j / option.time_s for option in options)
    return {
        "budget_w": budget_w,
        "throughput_ratio": fleet.water_filled(budget_w, is_bound=False),
        "bound_ratio": fleet.water_filled(budget_w, is_bound=True),
        "one_clock_ratio": fleet.alike(budget_w, [_clock(mhz) for mhz in clocks]),
        "one_limit_ratio": fleet.alike(budget_w, [_limit(most_w * k / NUM_LIMITS) for k in range(NUM_LIMITS, 0, -1)]),
    }


def _clock(mhz: int) -> Callable[[InstructionProfile], ClockOption]:
    return lambda own: own.interpolated(mhz)


def _limit(limit_w: float) -> Callable[[InstructionProfile], ClockOption]:
    def choose(own: InstructionProfile) -> ClockOption:
        by_clock = sorted(own.options, key=lambda option: -option.sm_clock_mhz)
        return next((o for o in by_clock if o.energy_j / o.time_s <= limit_w), by_clock[-1])

    return choose


def _lower_bounds(points: Iterable[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    return tuple(replace(p, energy_j=p.energy_j if p.lower_bound_j is None else p.lower_bound_j) for p in points)


if __name__ == "__main__":
    sys.exit(main())
