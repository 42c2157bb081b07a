"""Iteration times of one graph for many durations: what `makespan_s` returns, compiled."""

from itertools import accumulate, chain

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.exact.averaging_kernels import TimedGraph, find_finishes
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray


class Makespans:
    """A graph prepared for computing its iteration time."""

    def __init__(self, graph: DependencyGraph) -> None:
        self._order: IntArray = np.array(graph.topological_order, dtype=np.int64)
        position = np.empty(len(self._order), dtype=np.int64)
        position[self._order] = np.arange(len(self._order))
        before = [graph.predecessors[v] for v in graph.topological_order]
        edges = np.array(list(chain.from_iterable(before)), dtype=np.float64).reshape(-1, 2)
        self._graph = TimedGraph(
            pred=ints([0, *accumulate(map(len, before))]),
            pred_node=ints(position[edges[:, 0].astype(np.int64)]),
            pred_latency=floats(edges[:, 1]),
            epilogue=floats(np.array(graph.epilogues_s)[self._order]),
        )
        self._finish_s = floats(np.zeros(len(self._order)))

    def of(self, durations_s: FloatArray) -> float:
        """Return the time of one iteration; `durations_s[i]` belongs to node i."""
        return float(find_finishes(self._graph, floats(durations_s[self._order]), self._finish_s))
