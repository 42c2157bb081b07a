"""What a second of each instruction is worth in large pipelines, found by averaging flows along longest paths.

Theory of operation. The dual of planning is a flow of prices along paths (see `exact/sweep.py`). Here it is an average
(Frank and Wolfe 1956): with every instruction at its cheapest duration for the present prices, the longest paths and
those nearly as long share the next part of the flow if they exceed the deadline; otherwise the flow falls towards the
power of waiting, below which time has no use. A single longest path would touch too few instructions. The mean
durations approach the optimum, and any flow proves a bound. Long pipelines begin with the flow of a short one (see
`shortening`).

A step's own durations exceed the deadline where their mean would not, so that steps alone settle at too much flow. The
mean flow is therefore scaled by what proves most, twice, and averaging goes on with little more or less than that; only
durations of the last part count.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd_policies.planning.compiled import IS_COMPILED, floats, ints
from gpuenergyd_policies.planning.discrete.rounding import Rounder
from gpuenergyd_policies.planning.exact.averaging_kernels import (
    Averages,
    PricedGraph,
    TimedGraph,
    average_flows,
    divide_flow,
    find_finishes,
    priced_cost,
)
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray, PlanningTables
from gpuenergyd_policies.planning.shortening import LongPipeline, ShortPipeline, shortened

NUM_STEPS = 2000 if IS_COMPILED else 30
"""Flows that are averaged; plain Python takes a hundred times as long."""
DEEP_STEPS = 8000 if IS_COMPILED else NUM_STEPS
"""The same for pipelines of `DEEP` instructions and more; between, in proportion."""
DEEP = 100_000
QUICK_STEPS = NUM_STEPS // 4
"""The same for frontiers of many plans, for comparing plans, and for a first estimate of the flow."""
ROOM_RATIO = 1.3
"""The most flow that a step charges, relative to the first estimate."""
LONG = 50_000
"""Instructions from which a pipeline begins with the flow of a shorter one."""
KEPT_ROUNDS = 4
"""Microbatches per rank of shortened pipelines."""
LEAST_SHORTENING = 1.5
"""Ratio of microbatches from which a pipeline is shortened."""
LATER_STEPS = 4
"""A long pipeline averages a quarter of the steps of its short one, which count as so many steps before."""
PRICE_STEPS, PRICE_ROUNDS = QUICK_STEPS // 4, 10
"""Flows that are averaged, and prices that are tried, to find the deadline of a short pipeline."""
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
    """A flow through a graph, the mean of so many steps."""

    averages: Averages
    flow_w: float
    latency_j: float
    num_steps: int


class FlowAveraging:
    """One pipeline with one deadline, prepared for averaging."""

    def __init__(
        self, graph: DependencyGraph, tables: PlanningTables, rounder: Rounder, deadline_s: float, *, forced: bool
    ) -> None:
        self._order = rounder.order
        self._deadline_s = deadline_s
        self._least_w = 0.0 if forced else tables.idle_power_w
        self._tolerance_s = float(np.median(tables.slowest_s))
        hulls = [(table.times_s[table.hull], table.costs_j[table.hull]) for table in tables.tables]
        slopes = [np.append(-np.diff(costs) / np.diff(times), 0.0) for times, costs in hulls]
        hull_start = np.cumsum([0] + [len(times) for times, _ in hulls])
        class_of: IntArray = tables.class_of[self._order]
        self._costs_j = floats(np.concatenate([costs for _, costs in hulls]))
        priced = PricedGraph(
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
        nodes = [graph.instructions[v] for v in self._order.tolist()]
        self._pipeline = LongPipeline(
            priced,
            class_of,
            rank_of_class[class_of],
            np.array([i.microbatch_index for i in nodes], dtype=np.int64),
        )

    def prices(self, num_steps: int | None, *, begins_short: bool | None = None) -> AveragedPrices:
        """Return prices after so many steps, None for as many as the pipeline's size calls for.

        `begins_short` tells whether to begin with a shorter pipeline, None: if there are at least `LONG` instructions.
        """
        n = len(self._order)
        if num_steps is None:
            num_steps = min(DEEP_STEPS, max(NUM_STEPS, DEEP_STEPS * n // DEEP))
        graph = self._pipeline.graph
        num_kept = KEPT_ROUNDS * (int(self._pipeline.rank_of.max()) + 1)
        short = None
        if begins_short is None:
            begins_short = n >= LONG
        if begins_short and int(self._pipeline.microbatch_of.max()) + 1 >= LEAST_SHORTENING * num_kept:
            short = shortened(self._pipeline, num_kept, num_kept // 8)
        if short is None:
            found = self._averaged(graph, self._deadline_s, num_steps)
        else:
            found = self._from_short(short, num_steps)
        if found.flow_w > 0.0:
            found = self._scaled(graph, self._deadline_s, found)
        prices = np.asarray(found.averages.price)
        cost_j = self._bound_j(graph, self._deadline_s, found, 1.0)
        prices_w, durations_s = np.empty(n), np.empty(n)
        prices_w[self._order], durations_s[self._order] = prices, found.averages.duration
        is_limited = found.flow_w > _LEAST_FLOW_RATIO * self._least_w
        return AveragedPrices(durations_s, prices_w, found.flow_w, cost_j, is_limited)

    def _averaged(self, graph: PricedGraph, deadline_s: float, num_steps: int, *, with_edges: bool = False) -> _Flow:
        """Return the mean flow of all steps; a first estimate limits what a step charges."""
        most_w = self._most_w
        first_steps = max(1, num_steps // 2)
        for steps in (QUICK_STEPS, first_steps):
            most_w = max(most_w, 2 * self._least_w)
            averages = _no_averages(graph, num_edges=len(graph.pred_node) if with_edges else 0)
            flow_w, latency_j = average_flows(
                graph, averages, deadline_s, self._least_w, most_w, self._tolerance_s, (0, steps), (0.0, 0.0)
            )
            most_w = min(most_w, ROOM_RATIO * flow_w)
        found = _Flow(averages, flow_w, latency_j, first_steps)
        return self._narrowed(graph, deadline_s, found, num_steps - first_steps)

    def _narrowed(self, graph: PricedGraph, deadline_s: float, found: _Flow, num_steps: int) -> _Flow:
        """Return the mean of a flow, scaled, and of so many further steps near it; durations of the last part alone."""
        for room in NARROWER:
            if found.flow_w <= 0.0:
                break
            scaled = self._scaled(graph, deadline_s, found)
            averages = _no_averages(graph)._replace(price=scaled.averages.price, edge=scaled.averages.edge)
            limits_w = max(self._least_w, (1 - room) * scaled.flow_w), (1 + room) * scaled.flow_w
            first, last = found.num_steps, found.num_steps + max(1, num_steps // len(NARROWER))
            flow_w, latency_j = average_flows(
                graph, averages, deadline_s, *limits_w, self._tolerance_s, (first, last),
                (scaled.flow_w, scaled.latency_j),
            )  # fmt: skip
            found = _Flow(averages, flow_w, latency_j, last)
        return found

    def _scaled(self, graph: PricedGraph, deadline_s: float, found: _Flow) -> _Flow:
        """Return a flow scaled by what proves most, with the same durations."""
        least = max(SCALES[0], self._least_w / found.flow_w)
        scales = np.linspace(least, max(least, SCALES[1]), NUM_SCALES).tolist()
        scale = max([1.0, *scales], key=lambda scale: self._bound_j(graph, deadline_s, found, scale))
        price, edge = (floats(scale * np.asarray(own)) for own in (found.averages.price, found.averages.edge))
        averages = found.averages._replace(price=price, edge=edge)
        return _Flow(averages, scale * found.flow_w, scale * found.latency_j, found.num_steps)

    def _from_short(self, short: ShortPipeline, num_steps: int) -> _Flow:
        """Return the flow of the short pipeline carried over, then averaged further on the long one."""
        graph = self._pipeline.graph
        found = self._averaged(short.graph, self._short_deadline_s(short), num_steps, with_edges=True)
        if found.flow_w <= 0.0:  # time is free
            return self._averaged(graph, self._deadline_s, num_steps)
        edge_flow, short_prices = np.asarray(found.averages.edge), np.asarray(found.averages.price)
        ends = short.ends(edge_flow, short_prices)
        ends *= found.flow_w / ends.sum()
        prices = floats(ends)
        latency_j = divide_flow(graph, floats(short.divided(edge_flow, np.diff(np.asarray(graph.pred)))), prices)
        averages = _no_averages(graph)._replace(price=prices)
        carried = _Flow(averages, found.flow_w, latency_j, num_steps)
        return self._narrowed(graph, self._deadline_s, carried, num_steps // LATER_STEPS)

    def _short_deadline_s(self, short: ShortPipeline) -> float:
        """Return the deadline at which a second has the same price in the short pipeline as in the long one.

        At a given price, the long pipeline takes a steady period longer for each microbatch that was cut out.
        """
        graph = short.graph
        timed = TimedGraph(graph.pred, graph.pred_node, graph.pred_latency, graph.epilogue)
        finish_s = floats(np.zeros(len(graph.first)))

        def times_s(durations_s: FloatArray) -> tuple[float, float]:
            short_s = find_finishes(timed, floats(durations_s), finish_s)
            return short_s, short_s + short.num_dropped * short.period_s(np.asarray(finish_s))

        def at_price_s(price_w: float) -> tuple[float, float]:
            averages = _no_averages(graph)
            steps = (0, PRICE_STEPS)
            average_flows(graph, averages, 0.0, price_w, price_w, self._tolerance_s, steps, (0.0, 0.0))
            return times_s(np.asarray(averages.duration))

        fast = times_s(np.asarray(graph.times)[np.asarray(graph.first)])
        if fast[1] >= self._deadline_s:  # as in a job that permits no slowdown: no price is high enough
            return fast[0]
        slow_w, fast_w = max(self._least_w, 1e-3 * self._most_w), self._most_w
        slow = at_price_s(slow_w)
        if slow[1] <= self._deadline_s:
            return slow[0]
        for _ in range(PRICE_ROUNDS):
            middle_w = (slow_w * fast_w) ** 0.5
            middle = at_price_s(middle_w)
            if middle[1] > self._deadline_s:
                slow_w, slow = middle_w, middle
            else:
                fast_w, fast = middle_w, middle
        span_s = slow[1] - fast[1]
        share = 0.0 if span_s <= 0 else min(1.0, max(0.0, (self._deadline_s - fast[1]) / span_s))
        return fast[0] + share * (slow[0] - fast[0])

    def _bound_j(self, graph: PricedGraph, deadline_s: float, found: _Flow, scale: float) -> float:
        """Return the bound on effective energy that a flow through a graph proves when it is scaled."""
        cost_j = priced_cost(graph, self._costs_j, found.averages.price, scale, found.averages.vertex)
        return cost_j + scale * (found.latency_j - found.flow_w * deadline_s)


def _no_averages(graph: PricedGraph, num_edges: int = 0) -> Averages:
    """Return averages before the first step, with every node at its cheapest."""
    n = len(graph.first)
    return Averages(
        price=floats(np.zeros(n)),
        duration=floats(np.zeros(n)),
        vertex=ints(np.array(graph.last)),
        begin=floats(np.zeros(n)),
        finish=floats(np.zeros(n)),
        charge=floats(np.zeros(n)),
        edge=floats(np.zeros(num_edges)),
    )
