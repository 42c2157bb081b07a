"""Choice of an instruction order: its task, its result, and a lower bound on its energy (LP relaxation)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import DependencyGraph, Schedule, dependency_graph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.errors import ScheduleError, TargetError
from gpuenergyd_policies.planning.frontier import Effort, SolvedPlan, min_iteration_time_s, solve

LEAST_GAIN_RATIO = 2e-6
"""Relative gain below which two orders are treated as equal."""
SEARCH_TOLERANCE = 2e-3
"""Tolerance for dropping hull points while orders are compared."""


@dataclass(frozen=True, slots=True)
class OrderTask:
    """Input of the choice of an order: microbatches, profile, deadline, latency and memory limits."""

    num_microbatches: int
    profile: PipelineProfile
    deadline_s: float
    limits: Sequence[int]
    """Number of microbatches that each rank may hold."""
    forced: bool = False
    """Whether the time until the deadline passes anyway, because of a straggler."""
    communication_latency_s: Callable[[int, int], float] | float = 0.0
    keeps_exchange: bool = False
    """Whether forwards and backwards must keep 1F1B's sequence, so that only weight gradients may move."""
    keeps_whole: bool = False
    """Whether backwards must stay full and each rank hold at least 1F1B's microbatches, as for extra in-flight ones."""

    def graph(self, schedule: Schedule) -> DependencyGraph:
        """Return the dependency graph of an order; raise ScheduleError if it deadlocks."""
        return dependency_graph(schedule, communication_latency_s=self.communication_latency_s)

    def solved(
        self, schedule: Schedule, profile: PipelineProfile | None = None, *, effort: Effort = Effort.FULL
    ) -> "OrderPlan":
        """Return an order with its clocks, for this task's profile or another one.

        Raises:
            TargetError: the order cannot meet the deadline.
        """
        graph, profile = self.graph(schedule), profile or self.profile
        solved = solve(graph, profile, deadline_s=self.deadline_s, forced=self.forced, effort=effort)
        return OrderPlan(schedule, graph, solved, profile)

    def charged_j(self, plan: "OrderPlan") -> float:
        """Return the energy by which orders are compared, without waits that happen anyway."""
        waiting_w = self.profile.blocking_power_w * len(self.limits) if self.forced else 0.0
        return plan.solved.energy_j - waiting_w * plan.solved.iteration_time_s


@dataclass(frozen=True, slots=True)
class OrderPlan:
    """An order with its solved clocks, and the bound over any order if computed."""

    schedule: Schedule
    graph: DependencyGraph
    solved: SolvedPlan
    profile: PipelineProfile
    """Profile with the classes of the schedule's chunks."""
    any_order_j: float | None = None
    near: "tuple[OrderPlan, ...]" = ()
    """Other orders that meet the deadline with nearly the same energy."""


@dataclass(frozen=True, slots=True)
class RelaxedOrder:
    """Least energy in the relaxation of an order's clocks; infinite if the order misses the deadline."""

    energy_j: float
    min_time_s: float = float("inf")
    """Iteration time at the fastest clocks; infinite for orders that deadlock."""

    def is_better(self, other: "RelaxedOrder") -> bool:
        """Return whether this order needs less energy, or is faster if neither meets the deadline."""
        if other.energy_j < float("inf"):
            return self.energy_j < other.energy_j * (1 - LEAST_GAIN_RATIO)
        return self.energy_j < float("inf") or self.min_time_s < other.min_time_s * (1 - LEAST_GAIN_RATIO)


def relaxed(task: OrderTask, schedule: Schedule) -> RelaxedOrder:
    """Return an order's relaxed energy."""
    try:
        graph = task.graph(schedule)
    except ScheduleError:
        return RelaxedOrder(float("inf"))
    try:
        solved = solve(
            graph,
            task.profile,
            deadline_s=task.deadline_s,
            forced=task.forced,
            thin_tolerance=SEARCH_TOLERANCE,
            effort=Effort.QUICK,
        )
    except TargetError:
        return RelaxedOrder(float("inf"), min_iteration_time_s(graph, task.profile))
    left_s = task.deadline_s - solved.iteration_time_s if task.forced else 0.0
    energy_j = solved.lower_bound_j + task.profile.blocking_power_w * graph.num_ranks * left_s
    return RelaxedOrder(energy_j, solved.min_time_s)
