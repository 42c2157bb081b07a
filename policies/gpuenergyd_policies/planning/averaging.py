"""What a second of each instruction is worth in large pipelines, computed by averaging flows along longest paths.

Theory of operation. The dual of planning is a flow of prices along paths (see `exact/sweep.py`). Here the flow is an
average (Frank and Wolfe 1956). In each step every instruction has its cheapest duration at the present prices. If the
longest paths exceed the deadline, they and those nearly as long share the next part of the flow; otherwise the flow
falls towards the waiting power, below which time has no value. A single longest path would change too few instructions.
The mean durations approach the optimum, and any flow proves a bound.

The durations of single steps exceed the deadline where their mean would not, so that steps alone converge to too large
a flow. The mean flow is therefore rescaled twice to maximize the proven bound, and averaging continues within narrow
limits around it. Only durations from the last part are used.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd_policies.planning.compiled import IS_COMPILED, floats, ints
from gpuenergyd_policies.planning.exact.averaging_kernels import Averages, PricedGraph, average_flows, priced_cost
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray
from gpuenergyd_policies.planning.problem import PlanningProblem

NUM_STEPS = 2000 if IS_COMPILED else 30
"""Number of flows averaged; plain Python takes a hundred times as long."""
LONG, LONG_STEPS = 50_000, 3 * NUM_STEPS // 2
"""Number of instructions from which a pipeline is long, and the number of steps for long pipelines."""
QUICK_STEPS = NUM_STEPS // 4
"""Number of steps for frontiers of many plans, for comparing plans, and for a first estimate of the flow."""
ROOM_RATIO = 1.3
"""Maximum flow that a step charges, relative to the first estimate."""
SCALES = (0.8, 1.2)
"""Range of factors by which the mean flow is rescaled."""
NUM_SCALES = 17
NARROWER = (0.1, 0.03)
"""Relative deviation from the rescaled flow that steps may charge, in the two parts after the first steps."""
_LEAST_FLOW_RATIO = 1.02
"""Above this multiple of the waiting power, the deadline limits the plan."""


@dataclass(frozen=True, slots=True)
class AveragedPrices:
    """Prices and durations of each node for a deadline, and the lower bound on effective energy that they prove."""

    durations_s: FloatArray
    prices_w: FloatArray
    price_w: float
    """Price of one second of iteration time."""
    cost_bound_j: float
    """For plans that meet the deadline; waiting is not charged."""
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
        # On the critical stage every instruction runs at its fastest; a second then costs what the steepest saves.
        self._most_w = sum(float(steepest_w[rank_of_class == rank].max()) for rank in set(rank_of_class.tolist()))

    def prices(self, num_steps: int | None) -> AveragedPrices:
        """Return prices after this number of steps; None chooses it by the pipeline's size."""
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

        Half of the steps stay near the rescaled mean of earlier steps; durations come from the last part alone.
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
        """Return a flow rescaled to maximize the proven bound, with the same durations."""
        least = max(SCALES[0], self._least_w / found.flow_w)
        scales = np.linspace(least, max(least, SCALES[1]), NUM_SCALES).tolist()
        scale = max([1.0, *scales], key=lambda scale: self._bound_j(found, scale))
        averages = found.averages._replace(price=floats(scale * np.asarray(found.averages.price)))
        return _Flow(averages, scale * found.flow_w, scale * found.latency_j)

    def _bound_j(self, found: _Flow, scale: float) -> float:
        """Return the bound on effective energy proven by a rescaled flow."""
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
