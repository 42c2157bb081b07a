"""Turns the frontier's continuous durations into clocks that exist, never later than the deadline.

Theory of operation. `latest_fast[v]` is the latest finish of v that still lets all the rest run flat out. Walking in
topological order with the *actual* finishes so far, v takes its slowest option that ends by its wish (where the
continuous plan would end it) and by latest_fast[v]; if none does, its fastest. If the deadline is at least T_min then
every finish is at most latest_fast, hence the makespan at most the deadline (induction over predecessors). The error
of one operation diffuses into the next instead of adding up. Afterwards the time that is left is absorbed: with the
latest finishes of the plan as it is, operations only become slower, which on a Pareto set is cheaper.

Deadlines are shortened by a few units in the last place, so that sums of floating-point times keep the promise too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd_policies.planning.compiled import compiled, floats, ints
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray, PlanningTables

EARLY, MIDDLE, LATE = 0.0, 0.5, 1.0
"""Where in its slack an operation wishes to end."""
MAX_ABSORB_SWEEPS = 8


class KernelGraph(NamedTuple):
    """A graph, or a part cut out of one, with operations numbered in topological order.

    Neighbours of v are at pred[v]:pred[v + 1] and succ[v]:succ[v + 1]. No operation begins before `release` or ends
    after `due`.
    """

    pred: list[int]
    pred_node: list[int]
    pred_latency: list[float]
    succ: list[int]
    succ_node: list[int]
    succ_latency: list[float]
    release: list[float]
    due: list[float]


class KernelOptions(NamedTuple):
    """What operations may choose: options low[v] to high[v] when rounding, up to last[v] when time is left over.

    Hull vertices of v are hull_options[hull_low[v]] to hull_options[hull_high[v]]. Positions count through the
    options of all classes.
    """

    low: list[int]
    high: list[int]
    last: list[int]
    hull_low: list[int]
    hull_high: list[int]
    hull_options: list[int]
    times: list[float]
    costs: list[float]


@dataclass(frozen=True, slots=True)
class RoundedPlan:
    """An option for every node, counted through the options of all classes; `cost_j` sums up effective energy."""

    options: IntArray
    cost_j: float
    makespan_s: float


class Rounder:
    """Rounds plans of one pipeline; holds its graph and tables in the form that kernels take."""

    def __init__(self, graph: DependencyGraph, tables: PlanningTables) -> None:
        n = len(graph.instructions)
        spans = timeline(graph, tables.fastest_s.tolist()).spans
        starts_s = np.array([span.start_s for span in spans])
        self.order: IntArray = np.argsort(starts_s, kind="stable")
        """Nodes by the time they can begin, which is a topological order."""
        position = np.empty(n, dtype=np.int64)
        position[self.order] = np.arange(n)
        nodes = self.order.tolist()
        before = [graph.predecessors[v] for v in nodes]
        after = [graph.successors[v] for v in nodes]
        self.num_operations = n
        self.graph = KernelGraph(
            pred=ints(np.cumsum([0] + [len(p) for p in before])),
            pred_node=ints(position[[u for p in before for u, _ in p]]),
            pred_latency=floats([latency for p in before for _, latency in p]),
            succ=ints(np.cumsum([0] + [len(s) for s in after])),
            succ_node=ints(position[[v for s in after for v, _ in s]]),
            succ_latency=floats([latency for s in after for _, latency in s]),
            release=floats(np.zeros(n)),
            due=floats(np.zeros(n)),
        )
        class_of = tables.class_of[self.order]
        last = ints(tables.start[class_of + 1] - 1)
        self.options = KernelOptions(
            low=ints(tables.start[class_of]),
            high=last,
            last=last,
            hull_low=ints(tables.hull_start[class_of]),
            hull_high=ints(tables.hull_start[class_of + 1] - 1),
            hull_options=ints(tables.hull_options),
            times=floats(tables.times_s),
            costs=floats(tables.costs_j),
        )
        self._epilogues_s: FloatArray = np.array(graph.epilogues_s)[self.order]
        self._latest = floats(np.zeros(n))
        self._latest_fast = floats(np.zeros(n))
        self._finish = floats(np.zeros(n))
        self._choice = ints(np.zeros(n))

    def due_by(self, deadline_s: float) -> KernelGraph:
        """Return the graph with this deadline, less what adding up floating-point times along a path can err."""
        shortened_s = deadline_s * (1.0 - (self.num_operations + 8) * 2.0**-52)
        return self.graph._replace(due=floats(shortened_s - self._epilogues_s))

    def makespan_s(self, finish_s: Sequence[float]) -> float:
        """Return when the iteration is over if its operations end then, in this graph's order."""
        return float((np.asarray(finish_s) + self._epilogues_s).max())

    def round_plan(self, durations_s: FloatArray, deadline_s: float, *, wish: float, hull_first: bool) -> RoundedPlan:
        """Return clocks near these durations with makespan <= deadline; `hull_first` starts on hull vertices only."""
        cost_j = round_down(
            self.num_operations,
            self.due_by(deadline_s),
            self.options,
            floats(durations_s[self.order]),
            wish,
            hull_first,
            self._latest,
            self._latest_fast,
            self._finish,
            self._choice,
        )
        options = np.empty(self.num_operations, dtype=np.int64)
        options[self.order] = self._choice
        return RoundedPlan(options, cost_j, self.makespan_s(self._finish))


@compiled
def round_down(
    n: int,
    graph: KernelGraph,
    options: KernelOptions,
    durations: list[float],
    wish: float,
    on_hull: bool,  # noqa: FBT001  kernels take everything by position
    latest: list[float],
    latest_fast: list[float],
    finish: list[float],
    choice: list[int],
) -> float:
    """Round durations to options into `choice` with their ends in `finish`, absorb what is left, return the cost."""
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, release, due = graph
    low, high, last, hull_low, hull_high, hull_options, times, costs = options
    # latest finishes: with the continuous durations, and with everything flat out
    for v in range(n - 1, -1, -1):
        slow = fast = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - durations[w] - succ_latency[k])
            fast = min(fast, latest_fast[w] - times[low[w]] - succ_latency[k])
        latest[v] = slow
        latest_fast[v] = fast
    if wish < 1.0:
        # earliest finishes with the continuous durations, then the point between
        for v in range(n):
            begin = release[v]
            for k in range(pred[v], pred[v + 1]):
                begin = max(begin, finish[pred_node[k]] + pred_latency[k])
            finish[v] = begin + durations[v]
        for v in range(n):
            latest[v] = finish[v] + wish * (latest[v] - finish[v])
    for v in range(n):
        begin = release[v]
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, finish[pred_node[k]] + pred_latency[k])
        limit = min(latest[v], latest_fast[v])
        best, top = low[v], high[v]
        if on_hull and best < top:
            left, right = hull_low[v], hull_high[v]
            while left < right:
                middle = (left + right + 1) >> 1
                if begin + times[hull_options[middle]] <= limit:
                    left = middle
                else:
                    right = middle - 1
            best = hull_options[left]
        else:
            while best < top:
                middle = (best + top + 1) >> 1
                if begin + times[middle] <= limit:
                    best = middle
                else:
                    top = middle - 1
        choice[v] = best
        finish[v] = begin + times[best]
    for _ in range(MAX_ABSORB_SWEEPS):
        for v in range(n - 1, -1, -1):
            slow = due[v]
            for k in range(succ[v], succ[v + 1]):
                w = succ_node[k]
                slow = min(slow, latest[w] - times[choice[w]] - succ_latency[k])
            latest[v] = slow
        changed = False
        for v in range(n):
            begin = release[v]
            for k in range(pred[v], pred[v + 1]):
                begin = max(begin, finish[pred_node[k]] + pred_latency[k])
            best = choice[v]
            while best < last[v] and begin + times[best + 1] <= latest[v]:
                best += 1
                changed = True
            choice[v] = best
            finish[v] = begin + times[best]
        if not changed:
            break
    cost = 0.0
    for v in range(n):
        cost += costs[choice[v]]
    return cost
