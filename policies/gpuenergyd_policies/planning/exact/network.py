"""The dependency graph as an integer flow network, on which the frontier is swept without rounding errors.

Times become whole nanoseconds and prices of time whole microwatts, so flow is conserved exactly. Every dependency
edge gets a fixed extra length of 0 to 16 ns as a tie-break; with identical stages the sweep would otherwise make
hundreds of thousands of degenerate augmentations.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd_policies.planning.compiled import ints
from gpuenergyd_policies.planning.exact.sweep_kernels import NetworkArrays
from gpuenergyd_policies.planning.exact.tables import FloatArray, HullChain, PlanningTables, under_hull

MICROWATTS = 1e6
JITTER_TICKS = 17
MIN_TICKS = 1e6
"""Minimum ticks of the shortest instruction; with fewer, rounding and jitter become visible."""
MAX_KEY = 2**62
"""Limit of heap keys, time * nodes + node, which must fit into 64 bits."""


@dataclass(frozen=True, slots=True)
class FlowNetwork:
    """Integer flow network as kernel arrays, with the length of a tick and the true latency of each edge."""

    num_operations: int
    tick_s: float
    edge_latency_s: FloatArray
    arrays: NetworkArrays


def flow_network(graph: DependencyGraph, tables: PlanningTables, *, thin_tolerance: float) -> FlowNetwork:
    """Return the network of a graph; hulls are approximated to within `thin_tolerance` of the energy."""
    n = len(graph.instructions)
    edges = [(u, v, latency) for v in range(n) for u, latency in graph.predecessors[v]]
    edges += [(n, v, 0.0) for v in range(n) if not graph.predecessors[v]]
    edges += [(u, n + 1, graph.epilogues_s[u]) for u in range(n) if graph.epilogues_s[u] or not graph.successors[u]]
    edges.sort()
    tail = np.array([e[0] for e in edges], dtype=np.int64)
    head = np.array([e[1] for e in edges], dtype=np.int64)
    latency_s = np.array([e[2] for e in edges])
    tick_s = tick_length_s(
        shortest_s=float(tables.times_s.min()),
        longest_s=float(tables.slowest_s.sum()) + float(latency_s.sum()),
        num_nodes=2 * n + 3,
    )
    is_dependency = (tail < n) & (head < n)
    ticks = np.rint(latency_s / tick_s).astype(np.int64)
    ticks += np.where(is_dependency, (tail * 7 + head * 13) % JITTER_TICKS, 0)

    class_first, class_last = [], []
    all_ticks: list[int] = []
    all_slopes: list[int] = []
    for table in tables.tables:
        hull = HullChain(table.times_s[table.hull], table.costs_j[table.hull])
        chain = under_hull(hull, thin_tolerance * float(table.energies_j[table.hull].min()))
        level_ticks, slopes = integer_hull(chain.times_s, chain.costs_j, tick_s)
        class_first.append(len(all_ticks))
        all_ticks += level_ticks
        all_slopes += slopes
        class_last.append(len(all_ticks) - 1)
    by_head = np.argsort(head, kind="stable")
    arrays = NetworkArrays(
        first=ints(np.array(class_first, dtype=np.int64)[tables.class_of]),
        last=ints(np.array(class_last, dtype=np.int64)[tables.class_of]),
        ticks=ints(all_ticks),
        slope=ints(all_slopes),
        tail=ints(tail),
        head=ints(head),
        latency=ints(ticks),
        succ=ints(np.searchsorted(tail, np.arange(n + 3))),
        pred=ints(np.searchsorted(head[by_head], np.arange(n + 3))),
        pred_edges=ints(by_head),
        order=ints(graph.topological_order),
    )
    return FlowNetwork(n, tick_s, latency_s, arrays)


def tick_length_s(*, shortest_s: float, longest_s: float, num_nodes: int) -> float:
    """Return the length of a tick: 1 ns, shorter for very short instructions, longer for very long pipelines."""
    tick_s = 1e-9
    while shortest_s / tick_s < MIN_TICKS and longest_s / (tick_s / 10) * num_nodes < MAX_KEY:
        tick_s /= 10
    while longest_s / tick_s * num_nodes > MAX_KEY:
        tick_s *= 10
    return tick_s


def integer_hull(times_s: FloatArray, costs_j: FloatArray, tick_s: float) -> tuple[list[int], list[int]]:
    """Return ticks and strictly falling slopes of a convex chain, 0 for the last; equal times and slopes are merged."""
    kept: list[tuple[int, float]] = []

    def slope_uw(left: tuple[int, float], right: tuple[int, float]) -> int:
        return round((left[1] - right[1]) / ((right[0] - left[0]) * tick_s) * MICROWATTS)

    for time_s, cost_j in zip(times_s.tolist(), costs_j.tolist(), strict=True):
        point = (max(1, round(time_s / tick_s)), cost_j)
        if kept and kept[-1][0] >= point[0]:
            kept.pop()
        while len(kept) >= 2 and slope_uw(kept[-2], kept[-1]) <= slope_uw(kept[-1], point):
            kept.pop()
        kept.append(point)
    while len(kept) >= 2 and slope_uw(kept[-2], kept[-1]) <= 0:
        kept.pop()
    return [tick for tick, _ in kept], [*(slope_uw(a, b) for a, b in pairwise(kept)), 0]
