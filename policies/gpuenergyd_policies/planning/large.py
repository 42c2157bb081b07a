"""Plans for pipelines too large for the exact sweep: prices of time by averaging flows along longest paths.

Theory of operation. The dual of planning is a flow of prices along paths (see `exact/sweep.py`). The sweep finds the
best flow breakpoint by breakpoint, which takes minutes from about ten thousand instructions on. Here the flow is an
average (Frank and Wolfe 1956): with every instruction at its cheapest duration for the present prices, the longest
paths and those nearly as long share the next part of the flow if they exceed the deadline; otherwise the flow falls
towards the power of waiting, below which time has no use. A single longest path would touch too few instructions. The
mean durations approach the optimum, rounding on the whole graph meets the deadline, and windows of time are then
re-optimized exactly. Any flow gives a proven bound, so that a plan's distance from the optimum is known.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd_policies.planning.compiled import IS_COMPILED, floats, ints
from gpuenergyd_policies.planning.discrete.refinement import refine
from gpuenergyd_policies.planning.discrete.rounding import LATE, MIDDLE, RoundedPlan, Rounder
from gpuenergyd_policies.planning.discrete.window_kernels import BY_TIME
from gpuenergyd_policies.planning.exact.averaging_kernels import Averages, PricedGraph, average_flows
from gpuenergyd_policies.planning.exact.network import flow_network
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray, PlanningTables, planning_tables

TOO_LARGE = 8_000
"""Number of instructions above which the exact sweep takes longer than a job should wait for a plan."""
NUM_STEPS = 2000 if IS_COMPILED else 30
"""Flows that are averaged; plain Python takes a hundred times as long."""
DEEP_STEPS = 8000 if IS_COMPILED else NUM_STEPS
"""The same for pipelines of `DEEP` instructions and more; between, in proportion."""
DEEP = 100_000
QUICK_STEPS = NUM_STEPS // 4
"""The same for frontiers of many plans, for comparing plans, and for a first estimate of the flow."""
ROOM_RATIO = 1.3
"""The most flow that a step charges, relative to the first estimate."""
WINDOW, DEEP_WINDOW = 4096, 768
"""Instructions of windows of time in refinement; the sweep of a window takes longer with more stages."""
MANY_RANKS = 24
"""Ranks above which windows are small."""
WINDOW_TOLERANCE = 1e-3
"""Thinning tolerance of windows."""
_LEAST_FLOW_RATIO = 1.02
"""Above this multiple of the power of waiting, flow counts as limited by the deadline."""


@dataclass(frozen=True, slots=True)
class AveragedPrices:
    """Prices and durations of each node for a deadline, and the lower bound on effective energy that they prove."""

    durations_s: FloatArray
    prices_w: FloatArray
    price_w: float
    """Price of a second of iteration time."""
    cost_bound_j: float
    """For plans that meet the deadline, waiting not charged."""
    is_limited: bool
    """Whether the deadline limits the plan; otherwise it lies beyond T*, the time of least energy."""


@dataclass(frozen=True, slots=True)
class LargePipeline:
    """A large pipeline prepared for planning."""

    graph: DependencyGraph
    tables: PlanningTables
    rounder: Rounder
    min_time_s: float
    slowest_time_s: float

    @classmethod
    def of(cls, graph: DependencyGraph, profile: PipelineProfile) -> "LargePipeline":
        """Return a pipeline with its profile.

        Raises:
            ProfileError: a class of the graph was not measured.
        """
        tables = planning_tables(graph, profile)
        return cls(
            graph,
            tables,
            Rounder(graph, tables),
            makespan_s(graph, tables.fastest_s.tolist()),
            makespan_s(graph, tables.slowest_s.tolist()),
        )

    def prices(self, deadline_s: float, *, forced: bool, num_steps: int | None = None) -> AveragedPrices:
        """Return prices for a deadline; with `forced` the time until then passes anyway."""
        tables, order = self.tables, self.rounder.order
        n = len(order)
        if num_steps is None:
            num_steps = min(DEEP_STEPS, max(NUM_STEPS, DEEP_STEPS * n // DEEP))
        hulls = [(table.times_s[table.hull], table.costs_j[table.hull]) for table in tables.tables]
        slopes = [np.append(-np.diff(costs) / np.diff(times), 0.0) for times, costs in hulls]
        hull_start = np.cumsum([0] + [len(times) for times, _ in hulls])
        class_of: IntArray = tables.class_of[order]
        graph = self.rounder.graph
        priced = PricedGraph(
            graph.pred,
            graph.pred_node,
            graph.pred_latency,
            floats(np.array(self.graph.epilogues_s)[order]),
            ints(hull_start[class_of]),
            ints(hull_start[class_of + 1] - 1),
            floats(np.concatenate([times for times, _ in hulls])),
            floats(np.concatenate(slopes)),
        )
        steepest_w = np.array([own[0] for own in slopes])
        rank_of = np.array([key.pp_rank for key in self.graph.classes])
        # On the critical stage every instruction is at its fastest: a second costs what its steepest class would save.
        most_w = sum(float(steepest_w[rank_of == rank].max()) for rank in set(rank_of.tolist()))
        least_w = 0.0 if forced else tables.idle_power_w
        tolerance_s = float(np.median(tables.slowest_s))
        slowest: IntArray = hull_start[class_of + 1] - 1
        for steps in (QUICK_STEPS, num_steps):
            most_w = max(most_w, 2 * least_w)
            averages = Averages(
                price=floats(np.zeros(n)),
                duration=floats(np.zeros(n)),
                vertex=ints(slowest),
                begin=floats(np.zeros(n)),
                finish=floats(np.zeros(n)),
                charge=floats(np.zeros(n)),
            )
            flow_w, latency_j = average_flows(priced, averages, deadline_s, least_w, most_w, tolerance_s, steps)
            most_w = min(most_w, ROOM_RATIO * flow_w)
        prices_w, durations_s = np.empty(n), np.empty(n)
        prices_w[order], durations_s[order] = averages.price, averages.duration
        cost_j = latency_j - flow_w * deadline_s
        for index, (times, costs) in enumerate(hulls):
            own = prices_w[tables.class_of == index]
            vertex = np.searchsorted(-slopes[index][:-1], -own)
            cost_j += float((costs[vertex] + own * times[vertex]).sum())
        return AveragedPrices(durations_s, prices_w, flow_w, cost_j, flow_w > _LEAST_FLOW_RATIO * least_w)

    def rounded(self, durations_s: FloatArray, deadline_s: float, *, forced: bool) -> RoundedPlan:
        """Return the cheapest of four roundings whose makespan is at most the deadline."""
        idle_w = 0.0 if forced else self.tables.idle_power_w
        plans = (
            self.rounder.round_plan(durations_s, deadline_s, slack_share=slack_share, hull_first=hull_first)
            for slack_share in (LATE, MIDDLE)
            for hull_first in (False, True)
        )
        return min(plans, key=lambda plan: plan.cost_j + idle_w * plan.makespan_s)

    def refined(self, plan: RoundedPlan, deadline_s: float) -> RoundedPlan:
        """Return the plan with windows of time re-optimized one after the other; it never costs more."""
        window = WINDOW if self.graph.num_ranks <= MANY_RANKS else DEEP_WINDOW
        network = flow_network(self.graph, self.tables, thin_tolerance=WINDOW_TOLERANCE)
        return refine(self.rounder, network, self.tables, self.graph, plan, deadline_s, passes=((BY_TIME, window),))

    def least_energy_time_s(self, found: AveragedPrices) -> float:
        """Return T* from prices for a deadline beyond it."""
        return max(self.min_time_s, makespan_s(self.graph, found.durations_s.tolist()))
