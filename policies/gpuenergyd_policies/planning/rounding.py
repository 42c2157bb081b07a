"""Turns the frontier's continuous durations into clocks that exist, never later than the deadline.

Theory of operation. `latest_fast[v]` is the latest finish of v that still lets all the rest run flat out. Walking in
topological order with the *actual* finishes so far, v takes its slowest option that ends by its wish (where the
continuous plan would end it) and by latest_fast[v]; if none does, its fastest. If the deadline is at least T_min then
every finish is at most latest_fast, hence the makespan at most the deadline (induction over predecessors). The error
of one operation diffuses into the next instead of adding up. Afterwards `absorb` hands out the time that is left:
with the latest finishes of the plan as it is, operations only become slower, which on a Pareto set is cheaper.

Deadlines are shortened by a few units in the last place, so that sums of floating-point times keep the promise too.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline import DependencyGraph
from gpuenergyd_policies.planning.compiled import compiled, floats, ints
from gpuenergyd_policies.planning.tables import FloatArray, IntArray, PlanningTables

EARLY, MIDDLE, LATE = 0.0, 0.5, 1.0
"""Where in its slack an operation wishes to end."""
MAX_ABSORB_SWEEPS = 8


@dataclass(frozen=True, slots=True)
class RoundedPlan:
    """An option for every node, as positions in its class's Pareto set; `cost_j` is the sum of effective energy."""

    choice: IntArray
    cost_j: float
    makespan_s: float


class Rounder:
    """Rounds plans of one pipeline; holds its graph and tables in the form that the kernels take."""

    def __init__(self, graph: DependencyGraph, tables: PlanningTables) -> None:
        n = len(graph.instructions)
        self._n = n
        self._order = ints(graph.topological_order)
        self._pred = ints(np.cumsum([0] + [len(p) for p in graph.predecessors]))
        self._pred_node = ints([u for before in graph.predecessors for u, _ in before])
        self._pred_latency = floats([latency for before in graph.predecessors for _, latency in before])
        self._succ = ints(np.cumsum([0] + [len(s) for s in graph.successors]))
        self._succ_node = ints([v for after in graph.successors for v, _ in after])
        self._succ_latency = floats([latency for after in graph.successors for _, latency in after])
        self._first = ints(tables.start[tables.class_of])
        self._last = ints(tables.start[tables.class_of + 1] - 1)
        self._hull_first = ints(tables.hull_start[tables.class_of])
        self._hull_last = ints(tables.hull_start[tables.class_of + 1] - 1)
        self._hull_options = ints(tables.hull_options)
        self._times = floats(tables.times_s)
        self._costs = floats(tables.costs_j)
        self._latest = floats(np.zeros(n))
        self._latest_fast = floats(np.zeros(n))
        self._finish = floats(np.zeros(n))
        self._choice = ints(np.zeros(n))
        self._first_array = tables.start[tables.class_of]

    def shortened(self, deadline_s: float) -> float:
        """Return the deadline less what adding up floating-point times along a path can err."""
        return deadline_s * (1.0 - (self._n + 8) * 2.0**-52)

    def round_plan(self, durations_s: FloatArray, deadline_s: float, *, wish: float, hull_first: bool) -> RoundedPlan:
        """Return clocks near these durations with makespan <= deadline; `hull_first` starts on hull vertices only."""
        cost_j, makespan_s = _round(
            self._n,
            self._order,
            self._pred,
            self._pred_node,
            self._pred_latency,
            self._succ,
            self._succ_node,
            self._succ_latency,
            self._first,
            self._last,
            self._hull_first,
            self._hull_last,
            self._hull_options,
            self._times,
            self._costs,
            floats(durations_s),
            self.shortened(deadline_s),
            wish,
            hull_first,
            self._latest,
            self._latest_fast,
            self._finish,
            self._choice,
        )
        return RoundedPlan(np.asarray(self._choice, dtype=np.int64) - self._first_array, cost_j, makespan_s)


@compiled
def _round(
    n: int,
    order: list[int],
    pred: list[int],
    pred_node: list[int],
    pred_latency: list[float],
    succ: list[int],
    succ_node: list[int],
    succ_latency: list[float],
    first: list[int],
    last: list[int],
    hull_first: list[int],
    hull_last: list[int],
    hull_options: list[int],
    times: list[float],
    costs: list[float],
    durations: list[float],
    deadline: float,
    wish: float,
    on_hull: bool,  # noqa: FBT001  kernels take everything by position
    latest: list[float],
    latest_fast: list[float],
    finish: list[float],
    choice: list[int],
) -> tuple[float, float]:
    # latest finishes: with the continuous durations, and with everything flat out
    for position in range(n - 1, -1, -1):
        v = order[position]
        slow = fast = deadline
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - durations[w] - succ_latency[k])
            fast = min(fast, latest_fast[w] - times[first[w]] - succ_latency[k])
        latest[v] = slow
        latest_fast[v] = fast
    if wish < 1.0:
        # earliest finishes with the continuous durations, then the point between
        for v in order:
            begin = 0.0
            for k in range(pred[v], pred[v + 1]):
                begin = max(begin, finish[pred_node[k]] + pred_latency[k])
            finish[v] = begin + durations[v]
        for v in range(n):
            latest[v] = finish[v] + wish * (latest[v] - finish[v])
    for v in order:
        begin = 0.0
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, finish[pred_node[k]] + pred_latency[k])
        limit = min(latest[v], latest_fast[v])
        best = first[v]
        if on_hull:
            low, high = hull_first[v], hull_last[v]
            while low < high:
                middle = (low + high + 1) >> 1
                if begin + times[hull_options[middle]] <= limit:
                    low = middle
                else:
                    high = middle - 1
            best = hull_options[low]
        else:
            high = last[v]
            while best < high:
                middle = (best + high + 1) >> 1
                if begin + times[middle] <= limit:
                    best = middle
                else:
                    high = middle - 1
        choice[v] = best
        finish[v] = begin + times[best]
    # absorb: latest finishes of the plan as it is, then slow down into what is left
    for _ in range(MAX_ABSORB_SWEEPS):
        for position in range(n - 1, -1, -1):
            v = order[position]
            slow = deadline
            for k in range(succ[v], succ[v + 1]):
                w = succ_node[k]
                slow = min(slow, latest[w] - times[choice[w]] - succ_latency[k])
            latest[v] = slow
        changed = False
        for v in order:
            begin = 0.0
            for k in range(pred[v], pred[v + 1]):
                begin = max(begin, finish[pred_node[k]] + pred_latency[k])
            best, high = choice[v], last[v]
            while best < high and begin + times[best + 1] <= latest[v]:
                best += 1
                changed = True
            choice[v] = best
            finish[v] = begin + times[best]
        if not changed:
            break
    cost = 0.0
    makespan = 0.0
    for v in range(n):
        cost += costs[choice[v]]
        makespan = max(makespan, finish[v])
    return cost, makespan
