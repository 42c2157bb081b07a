"""Rounding: turns the frontier's continuous durations into measured clocks, never exceeding the deadline.

Theory of operation: list scheduling driven by deadlines. `latest_fast[v]` is the latest finish of v with which all
later operations still meet the deadline at their fastest options. Operations are visited in topological order with the
*actual* finish times of earlier ones. v takes its slowest option that finishes by its goal (its finish in the
continuous plan) and by latest_fast[v], or its fastest option if none does. If the deadline is at least T_min, every
finish is at most latest_fast, hence the makespan at most the deadline (induction over predecessors). As in error
diffusion, the rounding error of one operation carries over to the next instead of adding up. Finally the remaining
slack is absorbed by slowing operations down, which is cheaper because options form a Pareto set.

Deadlines are shortened by a few units in the last place, so that the guarantee holds despite floating-point sums.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.timeline import earliest_starts_s
from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.discrete.rounding_kernels import (
    GraphArrays,
    OfferedOptions,
    OptionArrays,
    Rounding,
    round_down,
)
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray, PlanningTables

EARLY, MIDDLE, LATE = 0.0, 0.5, 1.0
"""Share of its slack at which an operation should finish: 0 is its earliest finish, 1 its latest."""


@dataclass(frozen=True, slots=True)
class RoundedPlan:
    """Option of every node, as an index into the options of all classes; `cost_j` is effective energy."""

    options: IntArray
    cost_j: float
    makespan_s: float


def _neighbours(rows: Sequence[Sequence[tuple[int, float]]]) -> tuple[IntArray, IntArray, FloatArray]:
    """Return the neighbours of all nodes with their latencies in seconds: those of node i are start[i]:start[i + 1]."""
    start = np.cumsum([0, *map(len, rows)])
    flat = np.fromiter(chain.from_iterable(chain.from_iterable(rows)), dtype=np.float64).reshape(-1, 2)
    return start, flat[:, 0].astype(np.int64), flat[:, 1]


class Rounder:
    """Rounds plans of one pipeline; holds its graph and tables as kernel arrays."""

    def __init__(self, graph: DependencyGraph, tables: PlanningTables) -> None:
        n = len(graph.instructions)
        starts_s = np.array(earliest_starts_s(graph, tables.fastest_s.tolist()))
        self.order: IntArray = np.argsort(starts_s, kind="stable")
        """Nodes sorted by their earliest start, which is a topological order."""
        self.microbatches: IntArray = np.array([i.microbatch_index for i in graph.instructions], dtype=np.int64)[
            self.order
        ]
        position = np.empty(n, dtype=np.int64)
        position[self.order] = np.arange(n)
        nodes = self.order.tolist()
        pred, pred_node, pred_latency_s = _neighbours([graph.predecessors[v] for v in nodes])
        succ, succ_node, succ_latency_s = _neighbours([graph.successors[v] for v in nodes])
        self.num_operations = n
        self.graph = GraphArrays(
            pred=ints(pred),
            pred_node=ints(position[pred_node]),
            pred_latency=floats(pred_latency_s),
            succ=ints(succ),
            succ_node=ints(position[succ_node]),
            succ_latency=floats(succ_latency_s),
            due=floats(np.zeros(n)),
        )
        class_of = tables.class_of[self.order]
        low, high = ints(tables.start[class_of]), ints(tables.start[class_of + 1] - 1)
        self.options = OptionArrays(low, high, high, times=floats(tables.times_s), costs=floats(tables.costs_j))
        hull_start = tables.hull_start
        self.offered = (
            OfferedOptions(low, high, ints(np.arange(len(tables.times_s)))),
            OfferedOptions(ints(hull_start[class_of]), ints(hull_start[class_of + 1] - 1), ints(tables.hull_options)),
        )
        """Options that rounding may choose: all of them, or only the hull's vertices."""
        self._epilogues_s: FloatArray = np.array(graph.epilogues_s)[self.order]
        self.trial = Rounding(
            choice=ints(np.zeros(n)),
            finish=floats(np.zeros(n)),
            latest=floats(np.zeros(n)),
            latest_fast=floats(np.zeros(n)),
        )
        """Working memory of rounding and refinement."""

    def due_by(self, deadline_s: float) -> GraphArrays:
        """Return the graph with this deadline, shortened by the rounding error of floating-point sums along a path."""
        shortened_s = deadline_s * (1.0 - (self.num_operations + 8) * 2.0**-52)
        return self.graph._replace(due=floats(shortened_s - self._epilogues_s))

    def makespan_s(self, finish_s: Sequence[float]) -> float:
        """Return the makespan with epilogues, for finish times in the rounder's order."""
        return float((np.asarray(finish_s) + self._epilogues_s).max())

    def round_plan(
        self, durations_s: FloatArray, deadline_s: float, *, slack_share: float, hull_first: bool
    ) -> RoundedPlan:
        """Return options near these durations with makespan <= deadline.

        With `hull_first`, only hull vertices are chosen at first; all options then compete for the remaining slack.
        """
        cost_j = round_down(
            0,
            self.num_operations,
            self.due_by(deadline_s),
            self.options,
            self.offered[hull_first],
            floats(durations_s[self.order]),
            slack_share,
            self.trial,
        )
        options = np.empty(self.num_operations, dtype=np.int64)
        options[self.order] = self.trial.choice
        return RoundedPlan(options, cost_j, self.makespan_s(self.trial.finish))
