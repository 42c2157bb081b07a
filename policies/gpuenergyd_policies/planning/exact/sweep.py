"""Walks the whole time-energy frontier of a pipeline, from its slowest to its fastest point, breakpoint by breakpoint.

Theory of operation. For a fixed iteration time T the cheapest durations solve a convex-cost project-crashing problem
whose dual is a flow from source to sink: operation i carries x_i, the price in watts at which it would buy time, and
the value F of the flow is what one second less of iteration time costs (Fulkerson 1961; Phillips and Dessouky 1977).
We start with everything slowest and no flow, and repeat:

1. Shortest distances from the source over the residual network. Arc lengths are slacks, so the distance D of the sink
   says how far T can fall while this very flow stays optimal: a linear piece of the frontier, slope -F.
2. Move all potentials by min(distance, D). T falls by D, all slacks stay non-negative, arcs with flow stay tight.
3. Push as much as fits along the now tight shortest path: the price of time rises to the next breakpoint.

A path of unlimited capacity consists of operations at their fastest option: no further, T is T_min. Steps are as
long as they can be, so the frontier is exact and there are no time quanta. Everything is an integer.
"""

import heapq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gpuenergyd_policies.planning.compiled import compiled, ints
from gpuenergyd_policies.planning.exact.network import MICROWATTS, FlowNetwork
from gpuenergyd_policies.planning.exact.tables import FloatArray

FAR = 2**62
OP_ARC = -1
"""Parent of a node that was reached along its own operation's arc; others hold the edge's number."""


class KernelNetwork(NamedTuple):
    """A flow network as kernels take it; edges sorted by tail, those of v at succ[v]:succ[v + 1]."""

    first: list[int]
    last: list[int]
    ticks: list[int]
    slope: list[int]
    tail: list[int]
    head: list[int]
    latency: list[int]
    succ: list[int]
    pred: list[int]
    pred_edges: list[int]
    order: list[int]


class SweepWork(NamedTuple):
    """Room for a sweep's state: potentials, distances and search lists by node, levels and flows."""

    pi: list[int]
    dist: list[int]
    parent: list[int]
    stack: list[int]
    touched: list[int]
    level: list[int]
    flow: list[int]
    edge_flow: list[int]


class SweepSnapshots(NamedTuple):
    """Where a sweep writes its snapshots, row after row."""

    durations: list[int]
    op_flow: list[int]
    edge_flow: list[int]
    value: list[int]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep saw. Snapshots are in the order of the requested deadlines, the one at T* last.

    `durations_s`, `prices_w` have one column per operation, `edge_prices_w` one per edge of the network.
    Breakpoints run from slow to fast; the price is the one that holds below that time.
    """

    durations_s: FloatArray
    prices_w: FloatArray
    edge_prices_w: FloatArray
    snapshot_prices_w: FloatArray
    breakpoint_times_s: FloatArray
    breakpoint_prices_w: FloatArray
    min_energy_time_s: float
    num_augmentations: int

    def without(self, num_rows: int) -> "Sweep":
        """Return the same sweep less its first snapshots."""
        return replace(
            self,
            durations_s=self.durations_s[num_rows:],
            prices_w=self.prices_w[num_rows:],
            edge_prices_w=self.edge_prices_w[num_rows:],
            snapshot_prices_w=self.snapshot_prices_w[num_rows:],
        )


def sweep_frontier(
    network: FlowNetwork, deadlines_s: FloatArray, *, min_time_s: float, idle_power_w: float, stop_early: bool
) -> Sweep:
    """Return the frontier's breakpoints and the optimal flow and durations at each deadline.

    Deadlines below T_min get the snapshot at T_min. With `stop_early` the sweep ends after the last of them.
    """
    n, m = network.num_operations, len(network.edge_tail)
    tick_s = network.tick_s
    # Rounding and jitter move T_min by a few microseconds at most: shift all deadlines with it.
    shift = _longest_path(network) - round(min_time_s / tick_s)
    wanted = np.rint(deadlines_s / tick_s).astype(np.int64) + shift
    by_time = np.argsort(-wanted, kind="stable")
    k = len(wanted) + 1
    out = SweepSnapshots(
        durations=ints(np.zeros(k * n)),
        op_flow=ints(np.zeros(k * n)),
        edge_flow=ints(np.zeros(k * m)),
        value=ints(np.zeros(k)),
    )
    breakpoint_ticks, breakpoint_prices, least_energy_ticks, augmentations = sweep_down(
        n,
        m,
        kernel_network(network),
        sweep_work(n, m),
        ints(wanted[by_time]),
        k - 1,
        round(idle_power_w * MICROWATTS),
        stop_early,
        out,
    )
    rows = np.empty(k, dtype=np.int64)
    rows[by_time] = np.arange(k - 1)
    rows[k - 1] = k - 1
    return Sweep(
        durations_s=np.asarray(out.durations).reshape(k, n)[rows] * tick_s,
        prices_w=np.asarray(out.op_flow).reshape(k, n)[rows] / MICROWATTS,
        edge_prices_w=np.asarray(out.edge_flow).reshape(k, m)[rows] / MICROWATTS,
        snapshot_prices_w=np.asarray(out.value)[rows] / MICROWATTS,
        breakpoint_times_s=np.asarray(breakpoint_ticks, dtype=np.float64) * tick_s - shift * tick_s,
        breakpoint_prices_w=np.asarray(breakpoint_prices, dtype=np.int64) / MICROWATTS,
        min_energy_time_s=(least_energy_ticks - shift) * tick_s,
        num_augmentations=augmentations,
    )


def _longest_path(network: FlowNetwork) -> int:
    """Return the network's own T_min in ticks."""
    n = network.num_operations
    finish = [0] * (n + 2)
    ticks = network.level_ticks[network.first_level].tolist()
    tails, edge_ticks = network.edge_tail.tolist(), network.edge_ticks.tolist()
    edges, start = network.predecessor_edges.tolist(), network.predecessors_start.tolist()
    for v in [*network.order.tolist(), n + 1]:
        begin = 0
        for e in edges[start[v] : start[v + 1]]:
            begin = max(begin, finish[tails[e]] + edge_ticks[e])
        finish[v] = begin + (ticks[v] if v < n else 0)
    return finish[n + 1]


def kernel_network(network: FlowNetwork) -> KernelNetwork:
    """Return a network in the form that kernels take."""
    return KernelNetwork(
        first=ints(network.first_level),
        last=ints(network.last_level),
        ticks=ints(network.level_ticks),
        slope=ints(network.level_slope_uw),
        tail=ints(network.edge_tail),
        head=ints(network.edge_head),
        latency=ints(network.edge_ticks),
        succ=ints(network.successors_start),
        pred=ints(network.predecessors_start),
        pred_edges=ints(network.predecessor_edges),
        order=ints(network.order),
    )


def sweep_work(num_operations: int, num_edges: int) -> SweepWork:
    """Return room for a sweep over a network of at most this size."""
    nodes = 2 * num_operations + 3
    return SweepWork(
        pi=ints(np.zeros(nodes)),
        dist=ints(np.zeros(nodes)),
        parent=ints(np.zeros(nodes)),
        stack=ints(np.zeros(nodes)),
        touched=ints(np.zeros(nodes)),
        level=ints(np.zeros(num_operations)),
        flow=ints(np.zeros(num_operations)),
        edge_flow=ints(np.zeros(num_edges)),
    )


@compiled
def sweep_down(
    n: int,
    num_edges: int,
    network: KernelNetwork,
    work: SweepWork,
    deadlines: list[int],
    num_deadlines: int,
    idle_price: int,
    stop_early: bool,  # noqa: FBT001  kernels take everything by position
    out: SweepSnapshots,
) -> tuple[list[int], list[int], int, int]:
    """Sweep a network of n operations; return times and prices of the breakpoints, T*, and how many paths it took.

    `deadlines` fall; `out` has a row for each, and one more for T*.
    """
    first, last, ticks, slope, tail, head, latency, succ, pred, pred_edges, order = network
    pi, dist, parent, stack, touched, level, flow, edge_flow = work
    out_durations, out_op_flow, out_edge_flow, out_value = out
    num_nodes = 2 * n + 3
    source, sink = 2 * n + 1, 2 * n + 2
    for node in range(num_nodes):
        pi[node] = 0
        dist[node] = FAR
    for v in range(n):
        flow[v] = 0
    for e in range(num_edges):
        edge_flow[e] = 0
    for v in range(n):
        level[v] = last[v]
    for position in range(n):
        v = order[position]
        begin = 0
        for k in range(pred[v], pred[v + 1]):
            e = pred_edges[k]
            begin = max(begin, pi[2 * tail[e] + 1] + latency[e])
        pi[2 * v] = begin
        pi[2 * v + 1] = begin + ticks[last[v]]
    for k in range(pred[n + 1], pred[n + 2]):
        e = pred_edges[k]
        pi[sink] = max(pi[sink], pi[2 * tail[e] + 1] + latency[e])
    time = pi[sink]  # the source stays at 0, so this is also T
    value = 0
    least_energy_time = -1
    next_deadline = 0
    finished = False
    augmentations = 0
    breakpoint_ticks = [time]
    breakpoint_prices = [value]
    heap = [0]
    while True:
        heap.clear()
        dist[source] = 0
        touched[0] = stack[0] = source
        num_touched = num_stack = 1
        while not finished:
            if num_stack > 0:
                num_stack -= 1
                node = stack[num_stack]
                d = dist[node]
            else:
                key = heapq.heappop(heap)
                node = key % num_nodes
                d = key // num_nodes
                if d > dist[node]:
                    continue
            if node == sink:
                break
            v = node >> 1
            at = pi[node]
            if node & 1 == 0:
                # begin of v: forward over the operation, back over edges with flow
                to = node + 1
                other = dist[to]
                if other > d:
                    reach = d + pi[to] - at - ticks[level[v]]
                    if reach < other:
                        if other == FAR:
                            touched[num_touched] = to
                            num_touched += 1
                        dist[to] = reach
                        parent[to] = OP_ARC
                        if reach == d:
                            stack[num_stack] = to
                            num_stack += 1
                        else:
                            heapq.heappush(heap, reach * num_nodes + to)
                for k in range(pred[v], pred[v + 1]):
                    e = pred_edges[k]
                    if edge_flow[e] > 0:
                        to = 2 * tail[e] + 1
                        other = dist[to]
                        if other > d:
                            if other == FAR:
                                touched[num_touched] = to
                                num_touched += 1
                            dist[to] = d
                            parent[to] = e
                            stack[num_stack] = to
                            num_stack += 1
            else:
                # end of v: forward over edges, back over the operation
                for e in range(succ[v], succ[v + 1]):
                    to = 2 * head[e]
                    other = dist[to]
                    if other > d:
                        reach = d + pi[to] - at - latency[e]
                        if reach < other:
                            if other == FAR:
                                touched[num_touched] = to
                                num_touched += 1
                            dist[to] = reach
                            parent[to] = e
                            if reach == d:
                                stack[num_stack] = to
                                num_stack += 1
                            else:
                                heapq.heappush(heap, reach * num_nodes + to)
                if v < n:
                    to = node - 1
                    other = dist[to]
                    if other > d:
                        here = level[v]
                        reach = FAR
                        if flow[v] > slope[here]:
                            reach = d
                        elif here < last[v]:
                            reach = d + ticks[here + 1] - (at - pi[to])
                        if reach < other:
                            if other == FAR:
                                touched[num_touched] = to
                                num_touched += 1
                            dist[to] = reach
                            parent[to] = OP_ARC
                            if reach == d:
                                stack[num_stack] = to
                                num_stack += 1
                            else:
                                heapq.heappush(heap, reach * num_nodes + to)
        step = 0 if finished else dist[sink]
        while True:
            slot = -1
            theta = 0
            if least_energy_time < 0 and (value >= idle_price or finished):
                slot = num_deadlines
                least_energy_time = time
            elif next_deadline < num_deadlines and (finished or deadlines[next_deadline] > time - step):
                slot = next_deadline
                theta = max(0, time - deadlines[slot])
                next_deadline += 1
            if slot < 0:
                break
            base = slot * n
            for v in range(n):
                span = pi[2 * v + 1] - min(dist[2 * v + 1], theta) - pi[2 * v] + min(dist[2 * v], theta)
                out_durations[base + v] = max(ticks[first[v]], min(span, ticks[last[v]]))
                out_op_flow[base + v] = flow[v]
            base = slot * num_edges
            for e in range(num_edges):
                out_edge_flow[base + e] = edge_flow[e]
            out_value[slot] = value
        if finished:
            if breakpoint_ticks[-1] != time:
                breakpoint_ticks.append(time)
                breakpoint_prices.append(value)
            break
        # potentials fall by min(dist, step); as only differences count, let the nodes nearer than the sink rise
        for k in range(num_touched):
            node = touched[k]
            if dist[node] < step:
                pi[node] += step - dist[node]
            dist[node] = FAR
        time -= step
        if stop_early and next_deadline == num_deadlines and least_energy_time >= 0:
            break
        # the bottleneck of the path, walked from the sink back to the source
        push = FAR
        node = sink
        while node != source:
            e = parent[node]
            v = node >> 1
            if e >= 0:
                if node & 1 == 0:
                    node = 2 * tail[e] + 1
                else:
                    push = min(push, edge_flow[e])
                    node = 2 * head[e]
            else:
                here = level[v]
                if node & 1 == 1:
                    if here > first[v]:
                        push = min(push, slope[here - 1] - flow[v])
                    node -= 1
                else:
                    room = flow[v] - slope[here]
                    if room == 0:
                        room = slope[here] - slope[here + 1]
                    push = min(push, room)
                    node += 1
        if push == FAR:
            finished = True
            continue
        if value < idle_price < value + push:
            push = idle_price - value  # stop at T* with exactly this flow: its bound holds whatever the makespan
        node = sink
        while node != source:
            e = parent[node]
            v = node >> 1
            if e >= 0:
                if node & 1 == 0:
                    edge_flow[e] += push
                    node = 2 * tail[e] + 1
                else:
                    edge_flow[e] -= push
                    node = 2 * head[e]
            elif node & 1 == 1:
                flow[v] += push
                if level[v] > first[v] and flow[v] == slope[level[v] - 1]:
                    level[v] -= 1
                node -= 1
            else:
                if flow[v] == slope[level[v]]:
                    level[v] += 1
                flow[v] -= push
                node += 1
        value += push
        augmentations += 1
        if breakpoint_ticks[-1] == time:
            breakpoint_prices[-1] = value
        else:
            breakpoint_ticks.append(time)
            breakpoint_prices.append(value)
    return breakpoint_ticks, breakpoint_prices, least_energy_time, augmentations
