"""The least energy of one order with clocks that may be mixed at will."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph, Schedule, dependency_graph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.errors import ScheduleError
from gpuenergyd_policies.planning.averaging import QUICK_STEPS
from gpuenergyd_policies.planning.large import TOO_LARGE, LargePipeline
from gpuenergyd_policies.planning.problem import make_problem

LEAST_GAIN_RATIO = 2e-6
"""Relative gain below which another order counts as equal."""
SEARCH_TOLERANCE = 2e-3
"""Tolerance for leaving out points of hulls while orders are compared."""


@dataclass(frozen=True, slots=True)
class OrderTask:
    """What an order is chosen for: microbatches, profile, deadline, latency and memory limits."""

    num_microbatches: int
    profile: PipelineProfile
    deadline_s: float
    limits: tuple[int, ...]
    """Microbatches that each rank may hold."""
    forced: bool = False
    """Whether the time until the deadline passes anyway, for a straggler."""
    communication_latency_s: Callable[[int, int], float] | float = 0.0
    keeps_exchange: bool = False
    """Whether forwards and backwards must keep 1F1B's sequence, so that only weight gradients may move."""
    keeps_whole: bool = False
    """Whether backwards must stay whole and each rank hold at least 1F1B's microbatches, so that it may hold more."""

    def graph(self, schedule: Schedule) -> DependencyGraph:
        """Return the dependency graph of an order; raise ScheduleError if it deadlocks."""
        return dependency_graph(schedule, communication_latency_s=self.communication_latency_s)


@dataclass(frozen=True, slots=True)
class RelaxedOrder:
    """An order and the least energy that the relaxation of its clocks needs; infinite if it misses the deadline."""

    schedule: Schedule
    energy_j: float
    min_time_s: float = float("inf")
    """Iteration time at the fastest clocks; infinite for orders that deadlock."""

    def is_better(self, other: "RelaxedOrder") -> bool:
        """Return whether this order needs less energy, or is faster while neither meets the deadline."""
        if other.energy_j < float("inf"):
            return self.energy_j < other.energy_j * (1 - LEAST_GAIN_RATIO)
        return self.energy_j < float("inf") or self.min_time_s < other.min_time_s * (1 - LEAST_GAIN_RATIO)


def relaxed(task: OrderTask, schedule: Schedule) -> RelaxedOrder:
    """Return an order with its relaxed energy."""
    try:
        graph = task.graph(schedule)
    except ScheduleError:
        return RelaxedOrder(schedule, float("inf"))
    if len(graph.instructions) > TOO_LARGE:
        return _averaged(task, schedule, graph)
    problem = make_problem(graph, task.profile, SEARCH_TOLERANCE)
    if problem.min_time_s > task.deadline_s:
        return RelaxedOrder(schedule, float("inf"), problem.min_time_s)
    wanted_s, row = problem.useful_s(task.deadline_s), 0
    sweep = problem.sweep(np.array([wanted_s]), stop_early=True)
    if task.forced:
        cost_j = float(problem.cost_bounds_j(sweep, np.array([0]), np.array([wanted_s]))[0])
        energy_j = cost_j + problem.tables.idle_power_w * task.deadline_s
    else:
        if problem.is_beyond_least_energy(sweep, 0):
            wanted_s, row = max(problem.min_time_s, sweep.min_energy_time_s), 1
        energy_j = problem.energy_bound_j(sweep, row, wanted_s)
    return RelaxedOrder(schedule, energy_j, problem.min_time_s)


def _averaged(task: OrderTask, schedule: Schedule, graph: DependencyGraph) -> RelaxedOrder:
    """Return the energy of mean durations of a large pipeline, whose makespan exceeds the deadline only a little."""
    pipeline = LargePipeline.of(graph, task.profile)
    if pipeline.min_time_s > task.deadline_s:
        return RelaxedOrder(schedule, float("inf"), pipeline.min_time_s)
    deadline_s = min(task.deadline_s, pipeline.slowest_time_s)
    found = pipeline.prices(deadline_s, forced=task.forced, num_steps=QUICK_STEPS)
    energy_j = found.cost_bound_j + pipeline.tables.idle_power_w * deadline_s
    return RelaxedOrder(schedule, energy_j, pipeline.min_time_s)
