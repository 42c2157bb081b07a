"""What a second of each instruction is worth in large pipelines, found by averaging flows along longest paths.

Theory of operation. The dual of planning is a flow of prices along paths (see `exact/sweep.py`). Here it is an average
(Frank and Wolfe 1956): with every instruction at its cheapest duration for the present prices, the longest paths and
those nearly as long share the next part of the flow if they exceed the deadline; otherwise the flow falls towards the
power of waiting, below which time has no use. A single longest path would touch too few instructions. The mean
durations approach the optimum, and any flow proves a bound.

A step's own durations exceed the deadline where their mean would not, so that steps alone settle at too much flow. The
mean flow is therefore scaled by what proves most, twice, and averaging goes on with little more or less than that; only
durations of the last part count.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd_policies.planning.compiled import IS_COMPILED, floats, ints
from gpuenergyd_policies.planning.exact.averaging_kernels import (
    Averages,
    PricedGraph,
    average_flows,
    priced_cost,
)
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray
from gpuenergyd_policies.planning.problem import PlanningProblem

NUM_STEPS = 2000 if IS_COMPILED else 30
"""Flows that are averaged; plain Python takes a hundred times as long."""
LONG, LONG_STEPS = 50_000, 3 * NUM_STEPS // 2
"""The same for pipelines of many instructions."""
QUICK_STEPS = NUM_STEPS // 4
"""The same for frontiers of many plans, for comparing plans, and for a first estimate of the flow."""
ROOM_RATIO = 1.3
"""The most flow that a step charges, relative to the first estimate."""
SCALES = (0.8, 1.2)
"""How much more or less flow than the mean one is tried."""
NUM_SCALES = 17
NARROWER = (0.1, 0.03)
"""How much more or less flow than the scaled one steps charge, in the two parts after a pipeline's first steps."""
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


@dataclass(slots=True)
class _Flow:
    """The mean flow through a graph after some steps."""

    averages: Averages
    flow_w: float
    latency_j: float


class FlowAveraging:
    """One pipeline with one deadline, prepared for averaging."""

    def __init__(self, problem: PlanningProblem, deadline_s: float, *, forced: bool) -> None:
        graph, tables, rounder = problem.graph, problem.tables, problem.rounder
        self._order = rounder.order
        self._deadline_s = deadline_s
        self._least_w = 0.0 if forced else tables.idle_power_w
        self._tolerance_s = float(np.median(tables.slowest_s))
        hulls = [(table.times_s[table.hull], table.costs_j[table.hull]) for table in tables.tables]
        slopes = [np.append(-np.diff(costs) / np.diff(times), 0.0) for times, costs in hulls]
        hull_start = np.cumsum([0] + [len(times) for times, _ in hulls])
        class_of: IntArray = tables.class_of[self._order]
        self._costs_j = floats(np.concatenate([costs for _, costs in hulls]))
        self._graph = PricedGraph(
            rounder.graph.pred,
            rounder.graph.pred_node,
            rounder.graph.pred_latency,
            floats(np.array(graph.epilogues_s)[self._order]),
            ints(hull_start[class_of]),
            ints(hull_start[class_of + 1] - 1),
            floats(np.concatenate([times for times, _ in hulls])),
            floats(np.concatenate(slopes)),
        )
        steepest_w = np.array([own[0] for own in slopes])
        rank_of_class = np.array([key.pp_rank for key in graph.classes])
        # On the critical stage every instruction is at its fastest: a second costs what its steepest class would save.
        self._most_w = sum(float(steepest_w[rank_of_class == rank].max()) for rank in set(rank_of_class.tolist()))

    def prices(self, num_steps: int | None) -> AveragedPrices:
        """Return prices after so many steps, None for as many as the pipeline's size calls for."""
        n = len(self._order)
        if num_steps is None:
            num_steps = NUM_STEPS if n < LONG else LONG_STEPS
        found = self._averaged(num_steps)
        if found.flow_w > 0.0:
            found = self._scaled(found)
        prices = np.asarray(found.averages.price)
        cost_j = self._bound_j(found, 1.0)
        prices_w, durations_s = np.empty(n), np.empty(n)
        prices_w[self._order], durations_s[self._order] = prices, found.averages.duration
        is_limited = found.flow_w > _LEAST_FLOW_RATIO * self._least_w
        return AveragedPrices(durations_s, prices_w, found.flow_w, cost_j, is_limited)

    def _averaged(self, num_steps: int) -> _Flow:
        """Return the mean flow of all steps; a first estimate limits what a step charges.

        Half of the steps are near the mean of those before, scaled; durations are those of the last part alone.
        """
        most_w = self._most_w
        first_steps = max(1, num_steps // 2)
        for steps in (QUICK_STEPS, first_steps):
            most_w = max(most_w, 2 * self._least_w)
            found = self._stepped(self._no_averages(), (self._least_w, most_w), (0, steps), (0.0, 0.0))
            most_w = min(most_w, ROOM_RATIO * found.flow_w)
        later_steps = max(1, (num_steps - first_steps) // len(NARROWER))
        for part, room in enumerate(NARROWER):
            if found.flow_w <= 0.0:
                break
            scaled = self._scaled(found)
            limits_w = max(self._least_w, (1 - room) * scaled.flow_w), (1 + room) * scaled.flow_w
            first = first_steps + part * later_steps
            averages = self._no_averages()._replace(price=scaled.averages.price)
            known = scaled.flow_w, scaled.latency_j
            found = self._stepped(averages, limits_w, (first, first + later_steps), known)
        return found

    def _stepped(
        self, averages: Averages, limits_w: tuple[float, float], steps: tuple[int, int], known: tuple[float, float]
    ) -> _Flow:
        """Return the mean flow after these steps; see `average_flows`."""
        flow_w, latency_j = average_flows(
            self._graph, averages, self._deadline_s, *limits_w, self._tolerance_s, steps, known
        )
        return _Flow(averages, flow_w, latency_j)

    def _scaled(self, found: _Flow) -> _Flow:
        """Return a flow scaled by what proves most, with the same durations."""
        least = max(SCALES[0], self._least_w / found.flow_w)
        scales = np.linspace(least, max(least, SCALES[1]), NUM_SCALES).tolist()
        scale = max([1.0, *scales], key=lambda scale: self._bound_j(found, scale))
        averages = found.averages._replace(price=floats(scale * np.asarray(found.averages.price)))
        return _Flow(averages, scale * found.flow_w, scale * found.latency_j)

    def _bound_j(self, found: _Flow, scale: float) -> float:
        """Return the bound on effective energy that a flow proves when it is scaled."""
        averages = found.averages
        cost_j = priced_cost(self._graph, self._costs_j, averages.price, scale, averages.vertex)
        return cost_j + scale * (found.latency_j - found.flow_w * self._deadline_s)

    def _no_averages(self) -> Averages:
        """Return averages before the first step, with every node at its cheapest."""
        n = len(self._order)
        return Averages(
            price=floats(np.zeros(n)),
            duration=floats(np.zeros(n)),
            vertex=ints(np.array(self._graph.last)),
            begin=floats(np.zeros(n)),
            finish=floats(np.zeros(n)),
            charge=floats(np.zeros(n)),
        )
