"""Compiled kernels of the frontier sweep: shortest distances and augmentation on the residual network.

All quantities are integers: time in ticks, flow and prices in microwatts. Node 2i is the start of operation i, node
2i + 1 its end; operations n and n + 1 are source and sink. The residual network of a flow has these arcs:

    arc                       exists if                length                        capacity
    operation, forward        always                   slack against its vertex      up to the next faster slope
    operation, backward       flow above its slope     0                             flow - slope
    operation, backward       at its slope             to the next slower vertex     to the next slower slope
    dependency, forward       always                   slack                         unlimited
    dependency, backward      it carries flow          0                             its flow
"""

import heapq
from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled

FAR = 2**62
OPERATION_ARC = -1
"""Parent of a node that was reached along its own operation's arc; other parents are edge indices."""


class NetworkArrays(NamedTuple):
    """A flow network; edges are sorted by tail, and those leaving v are succ[v]:succ[v + 1].

    Hull vertices of v are first[v] (fastest) to last[v], with their `ticks` and the `slope` to the next slower one.
    """

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


class Search(NamedTuple):
    """Working memory of one search for distances from the source: by node, its distance and its parent's arc.

    `stack` holds nodes to visit at the current distance, `touched` all nodes that have a distance.
    """

    dist: list[int]
    parent: list[int]
    stack: list[int]
    touched: list[int]


class SweepState(NamedTuple):
    """State of a sweep: potentials of nodes, hull vertex and flow of operations, flow of edges."""

    search: Search
    potential: list[int]
    vertex: list[int]
    flow: list[int]
    edge_flow: list[int]


class SweepRequest(NamedTuple):
    """Deadlines for snapshots, latest first, and the price of waiting, at which the sweep reaches T* (least energy).

    With `stop_early` the sweep ends after the last deadline.
    """

    deadlines: list[int]
    idle_price: int
    stop_early: bool


class SweepSnapshots(NamedTuple):
    """Output of a sweep: one row per deadline and one for T*, the time of least energy."""

    durations: list[int]
    op_flow: list[int]
    edge_flow: list[int]
    value: list[int]


@compiled
def sweep_down(  # noqa: C901, PLR0912, PLR0915  one algorithm; see the note on the search below
    n: int, num_edges: int, network: NetworkArrays, state: SweepState, request: SweepRequest, out: SweepSnapshots
) -> tuple[list[int], list[int], int, int]:
    """Sweep a network of n operations; return times and prices of breakpoints, T*, and the number of augmentations."""
    _, last, ticks, slope, tail, head, latency, succ, pred, pred_edges, _ = network
    search, potential, vertex, flow, edge_flow = state
    dist, parent, stack, touched = search
    deadlines, idle_price, stop_early = request
    num_deadlines = len(deadlines)
    num_nodes = len(dist)
    source, sink = 2 * n + 1, 2 * n + 2
    time = _start_slowest(n, num_edges, network, state)
    value = 0
    least_energy_time = -1
    next_deadline = 0
    finished = False
    augmentations = 0
    breakpoint_ticks = [time]
    breakpoint_prices = [value]
    heap = [0]
    while True:
        # Dijkstra's algorithm from the source until the sink is settled. Nodes at the current distance wait on a stack,
        # others on the heap as distance * number of nodes + node. The relaxation of an arc is repeated four times in
        # the code, because a function would cost 15 to 20 %: numba counts references to each array passed.
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
            at = potential[node]
            if node & 1 == 0:
                # start of v: forward over the operation, back over edges with flow
                to = node + 1
                other = dist[to]
                if other > d:
                    reach = d + potential[to] - at - ticks[vertex[v]]
                    if reach < other:
                        if other == FAR:
                            touched[num_touched] = to
                            num_touched += 1
                        dist[to] = reach
                        parent[to] = OPERATION_ARC
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
                        reach = d + potential[to] - at - latency[e]
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
                to = node - 1
                other = dist[to]
                if node != source and other > d:
                    here = vertex[v]
                    reach = FAR
                    if flow[v] > slope[here]:
                        reach = d
                    elif here < last[v]:
                        reach = d + ticks[here + 1] - (at - potential[to])
                    if reach < other:
                        if other == FAR:
                            touched[num_touched] = to
                            num_touched += 1
                        dist[to] = reach
                        parent[to] = OPERATION_ARC
                        if reach == d:
                            stack[num_stack] = to
                            num_stack += 1
                        else:
                            heapq.heappush(heap, reach * num_nodes + to)
        step = 0 if finished else dist[sink]
        while True:
            row = -1
            shift = 0
            if least_energy_time < 0 and (value >= idle_price or finished):
                row = num_deadlines
                least_energy_time = time
            elif next_deadline < num_deadlines and (finished or deadlines[next_deadline] > time - step):
                row = next_deadline
                shift = max(0, time - deadlines[row])
                next_deadline += 1
            if row < 0:
                break
            _take_snapshot(n, num_edges, network, state, out, row, shift, value)
        if finished:
            if breakpoint_ticks[-1] != time:
                breakpoint_ticks.append(time)
                breakpoint_prices.append(value)
            break
        # Potentials fall by min(distance, step). Only differences matter, so raise those of nodes nearer than the sink.
        for k in range(num_touched):
            node = touched[k]
            if dist[node] < step:
                potential[node] += step - dist[node]
            dist[node] = FAR
        time -= step
        if stop_early and next_deadline == num_deadlines and least_energy_time >= 0:
            break
        # Stop at T* with exactly the flow of that price; its bound holds for any makespan.
        push = _augment(source, sink, network, state, idle_price - value if value < idle_price else FAR)
        if push == FAR:
            finished = True
            continue
        value += push
        augmentations += 1
        if breakpoint_ticks[-1] == time:
            breakpoint_prices[-1] = value
        else:
            breakpoint_ticks.append(time)
            breakpoint_prices.append(value)
    return breakpoint_ticks, breakpoint_prices, least_energy_time, augmentations


@compiled
def _start_slowest(n: int, num_edges: int, network: NetworkArrays, state: SweepState) -> int:
    """Set all operations to their slowest vertex without flow, potentials to earliest times; return the makespan."""
    search, potential, vertex, flow, edge_flow = state
    for node in range(2 * n + 3):
        potential[node] = 0
        search.dist[node] = FAR
    for e in range(num_edges):
        edge_flow[e] = 0
    for v in range(n):
        flow[v] = 0
        vertex[v] = network.last[v]
    for position in range(n):
        v = network.order[position]
        begin = 0
        for k in range(network.pred[v], network.pred[v + 1]):
            e = network.pred_edges[k]
            begin = max(begin, potential[2 * network.tail[e] + 1] + network.latency[e])
        potential[2 * v] = begin
        potential[2 * v + 1] = begin + network.ticks[network.last[v]]
    makespan = 0
    for k in range(network.pred[n + 1], network.pred[n + 2]):
        e = network.pred_edges[k]
        makespan = max(makespan, potential[2 * network.tail[e] + 1] + network.latency[e])
    potential[2 * n + 2] = makespan  # the source stays at 0
    return makespan


@compiled
def _take_snapshot(
    n: int,
    num_edges: int,
    network: NetworkArrays,
    state: SweepState,
    out: SweepSnapshots,
    row: int,
    shift: int,
    value: int,
) -> None:
    """Write durations and flows, with this total flow, for a time `shift` ticks below the current one."""
    first, last, ticks, _, _, _, _, _, _, _, _ = network
    search, potential, _, flow, edge_flow = state
    dist = search.dist
    durations, op_flow, snapshot_edge_flow, values = out
    for v in range(n):
        begin, end = 2 * v, 2 * v + 1
        span = potential[end] - min(dist[end], shift) - potential[begin] + min(dist[begin], shift)
        durations[row * n + v] = max(ticks[first[v]], min(span, ticks[last[v]]))
        op_flow[row * n + v] = flow[v]
    for e in range(num_edges):
        snapshot_edge_flow[row * num_edges + e] = edge_flow[e]
    values[row] = value


@compiled
def _augment(  # noqa: C901, PLR0912  two walks along one path
    source: int, sink: int, network: NetworkArrays, state: SweepState, limit: int
) -> int:
    """Push as much flow as the path to the sink can carry, up to a limit, and return the amount.

    Returns FAR, without a push, if capacity is unlimited because the path consists of operations at their fastest.
    """
    first, _, _, slope, tail, head, _, _, _, _, _ = network
    search, _, vertex, flow, edge_flow = state
    parent = search.parent
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
            here = vertex[v]
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
        return FAR
    push = min(push, limit)
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
            if vertex[v] > first[v] and flow[v] == slope[vertex[v] - 1]:
                vertex[v] -= 1
            node -= 1
        else:
            if flow[v] == slope[vertex[v]]:
                vertex[v] += 1
            flow[v] -= push
            node += 1
    return push
