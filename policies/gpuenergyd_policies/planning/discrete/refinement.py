"""Improves a plan of real clocks piece by piece: free a window of it, plan that again exactly, round, keep if cheaper.

Theory of operation. Rounding loses most where a hull has wide gaps: the continuous plan mixes two clocks inside one
instruction, a real one has to spread them over microbatches, and only the rest of the plan says where there is room.
So we take a window (a stretch of time, or some microbatches) with everything that lies on paths between its parts. What
came before gives each of its operations a release, what comes after a due time; both are exact because the window
is convex. The sweep solves the window's relaxation, several roundings of it are tried, and a hill climb (make one
operation faster, let others absorb) polishes the best. The plan outside stays, so the whole never gets dearer or late.

Pseudo-random choices come from a fixed sequence: the same input gives the same plan, compiled or not.
"""

from typing import NamedTuple

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd_policies.planning.compiled import compiled, floats, ints
from gpuenergyd_policies.planning.discrete.rounding import KernelGraph, KernelOptions, RoundedPlan, Rounder, round_down
from gpuenergyd_policies.planning.exact.network import JITTER_TICKS, FlowNetwork
from gpuenergyd_policies.planning.exact.sweep import KernelNetwork, SweepSnapshots, SweepWork, sweep_down, sweep_work
from gpuenergyd_policies.planning.exact.tables import PlanningTables

BY_TIME, BY_MICROBATCH = 0, 1
LIGHT_PASSES = ((BY_MICROBATCH, 64), (BY_TIME, 96))
FULL_PASSES = 2 * ((BY_MICROBATCH, 256), (BY_MICROBATCH, 128), (BY_MICROBATCH, 64), (BY_TIME, 96))
"""Windows of a pass cover the pipeline, half overlapping, each with about that many free operations."""
CLIMB_MOVES = 40
LATER_SPANS = (0.01, 0.0)
"""How much later than due, in parts of the window's length, the durations may be optimal that are rounded."""
SEED = 1
NO_PRICE = 0
"""Snapshots at T* are of no interest here: a price of 0 takes it at once."""


class Part(NamedTuple):
    """Room for a window's own graph, options and network, filled by `_cut_out`."""

    nodes: list[int]
    position: list[int]
    is_free: list[int]
    state: list[int]
    earliest: list[float]
    latest: list[float]
    choice: list[int]
    best: list[int]
    trial: list[int]
    current: list[int]
    durations: list[float]
    work_a: list[float]
    work_b: list[float]
    work_c: list[float]
    deadlines: list[int]


class Levels(NamedTuple):
    """Levels of the network by operation, and where the one-level chains of single options begin."""

    first: list[int]
    last: list[int]
    single: int
    tick_s: float


def refine(
    rounder: Rounder,
    network: FlowNetwork,
    tables: PlanningTables,
    graph: DependencyGraph,
    plan: RoundedPlan,
    deadline_s: float,
    *,
    passes: tuple[tuple[int, int], ...] = FULL_PASSES,
) -> RoundedPlan:
    """Return a plan that is no dearer in effective energy and still meets the deadline."""
    n = rounder.num_operations
    whole = rounder.due_by(deadline_s)
    num_edges = len(network.edge_tail)
    most_edges = num_edges + 2 * n
    single = len(network.level_ticks)
    singles = np.maximum(1, np.rint(tables.times_s / network.tick_s).astype(np.int64))
    order = rounder.order
    part = Part(
        nodes=ints(np.zeros(n)),
        position=ints(np.zeros(n)),
        is_free=ints(np.zeros(n)),
        state=ints(np.zeros(n)),
        earliest=floats(np.zeros(n)),
        latest=floats(np.zeros(n)),
        choice=ints(plan.options[order]),
        best=ints(np.zeros(n)),
        trial=ints(np.zeros(n)),
        current=ints(np.zeros(n)),
        durations=floats(np.zeros(n)),
        work_a=floats(np.zeros(n)),
        work_b=floats(np.zeros(n)),
        work_c=floats(np.zeros(n)),
        deadlines=ints(np.zeros(len(LATER_SPANS))),
    )
    microbatches = np.array([i.microbatch_index for i in graph.instructions], dtype=np.int64)[order]
    windows = _windows(n, int(microbatches.max()) + 1, passes)
    rows = len(LATER_SPANS) + 1
    cost_j = _refine(
        n,
        SEED,
        NO_PRICE,
        True,
        len(windows),
        ints([kind for kind, _, _ in windows]),
        ints([begin for _, begin, _ in windows]),
        ints([end for _, _, end in windows]),
        whole,
        rounder.options,
        Levels(
            first=ints(network.first_level[order]),
            last=ints(network.last_level[order]),
            single=single,
            tick_s=network.tick_s,
        ),
        ints(microbatches),
        part,
        KernelGraph(
            pred=ints(np.zeros(n + 1)),
            pred_node=ints(np.zeros(num_edges)),
            pred_latency=floats(np.zeros(num_edges)),
            succ=ints(np.zeros(n + 1)),
            succ_node=ints(np.zeros(num_edges)),
            succ_latency=floats(np.zeros(num_edges)),
            release=floats(np.zeros(n)),
            due=floats(np.zeros(n)),
        ),
        KernelOptions(
            low=ints(np.zeros(n)),
            high=ints(np.zeros(n)),
            last=ints(np.zeros(n)),
            hull_low=ints(np.zeros(n)),
            hull_high=ints(np.zeros(n)),
            hull_options=rounder.options.hull_options,
            times=rounder.options.times,
            costs=rounder.options.costs,
        ),
        KernelNetwork(
            first=ints(np.zeros(n)),
            last=ints(np.zeros(n)),
            ticks=ints(np.concatenate([network.level_ticks, singles])),
            slope=ints(np.concatenate([network.level_slope_uw, np.zeros_like(singles)])),
            tail=ints(np.zeros(most_edges)),
            head=ints(np.zeros(most_edges)),
            latency=ints(np.zeros(most_edges)),
            succ=ints(np.zeros(n + 3)),
            pred=ints(np.zeros(n + 3)),
            pred_edges=ints(np.zeros(most_edges)),
            order=ints(np.arange(n)),
        ),
        sweep_work(n, most_edges),
        SweepSnapshots(
            durations=ints(np.zeros(rows * n)),
            op_flow=ints(np.zeros(rows * n)),
            edge_flow=ints(np.zeros(rows * most_edges)),
            value=ints(np.zeros(rows)),
        ),
    )
    makespan_s = rounder.makespan_s(part.earliest)
    if makespan_s > deadline_s:  # cannot happen; a plan that is late by a rounding error is no plan
        return plan
    options = np.empty(n, dtype=np.int64)
    options[order] = part.choice
    return RoundedPlan(options, cost_j, makespan_s)


def _windows(n: int, num_microbatches: int, passes: tuple[tuple[int, int], ...]) -> list[tuple[int, int, int]]:
    """Return (kind, begin, end) of the windows of all passes; later passes of a kind are shifted."""
    windows = []
    for number, (kind, operations) in enumerate(passes):
        places = num_microbatches if kind == BY_MICROBATCH else n
        size = max(1, min(places, operations * places // n))
        shift = number * size // len(passes)
        windows += [
            (kind, max(0, begin), begin + size)
            for begin in range(-shift, places, max(1, size // 2))
            if begin + size > 0
        ]
    return windows


@compiled
def _random(state: int) -> int:
    return (state * 1103515245 + 12345) & 0x7FFFFFFF


@compiled
def _refine(
    n: int,
    random: int,
    idle_price: int,
    stop_early: bool,  # noqa: FBT001  a literal would compile the sweep a second time, as would SEED and NO_PRICE
    num_windows: int,
    kinds: list[int],
    begins: list[int],
    ends: list[int],
    whole: KernelGraph,
    options: KernelOptions,
    levels: Levels,
    microbatches: list[int],
    part: Part,
    graph: KernelGraph,
    choices: KernelOptions,
    network: KernelNetwork,
    work: SweepWork,
    snapshots: SweepSnapshots,
) -> float:
    times, costs = options.times, options.costs
    choice = part.choice
    for window in range(num_windows):
        for v in range(n):
            place = microbatches[v] if kinds[window] == 1 else v
            part.is_free[v] = 1 if begins[window] <= place < ends[window] else 0
        m, num_edges, begin, end = _cut_out(n, whole, options, levels, part, graph, choices, network)
        if m == 0:
            continue
        before = 0.0
        for i in range(m):
            part.best[i] = choice[part.nodes[i]]
            before += costs[part.best[i]]
        best = before
        for row in range(len(LATER_SPANS)):
            part.deadlines[row] = int((end + LATER_SPANS[row] * (end - begin)) / levels.tick_s)
        sweep_down(m, num_edges, network, work, part.deadlines, len(LATER_SPANS), idle_price, stop_early, snapshots)
        for row in range(len(LATER_SPANS)):
            for i in range(m):
                part.durations[i] = snapshots.durations[row * m + i] * levels.tick_s
            for candidate in range(6):
                cost = round_down(
                    m,
                    graph,
                    choices,
                    part.durations,
                    0.5 * (candidate % 3),
                    candidate >= 3,
                    part.work_a,
                    part.work_b,
                    part.work_c,
                    part.trial,
                )
                if cost < best:
                    best = cost
                    for i in range(m):
                        part.best[i] = part.trial[i]
        best, random = _climb(m, graph, choices, part, random, best)
        if best <= before:
            for i in range(m):
                choice[part.nodes[i]] = part.best[i]
    cost = 0.0
    for v in range(n):
        begin = 0.0
        for k in range(whole.pred[v], whole.pred[v + 1]):
            begin = max(begin, part.earliest[whole.pred_node[k]] + whole.pred_latency[k])
        part.earliest[v] = begin + times[choice[v]]
        cost += costs[choice[v]]
    return cost


@compiled
def _cut_out(
    n: int,
    whole: KernelGraph,
    options: KernelOptions,
    levels: Levels,
    part: Part,
    graph: KernelGraph,
    choices: KernelOptions,
    network: KernelNetwork,
) -> tuple[int, int, float, float]:
    """Fill in the window of the free operations and all that lies on paths between them, the latter fixed.

    Returns how many operations and network edges it has, when it begins and when it is due.
    """
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, _, due = whole
    times = options.times
    nodes, position, is_free, state = part.nodes, part.position, part.is_free, part.state
    earliest, latest, choice = part.earliest, part.latest, part.choice
    # state: bit 1 behind a free operation, bit 2 ahead of one; both: part of the window
    for v in range(n):
        begin = 0.0
        mark = is_free[v]
        for k in range(pred[v], pred[v + 1]):
            u = pred_node[k]
            begin = max(begin, earliest[u] + pred_latency[k])
            mark |= state[u] & 1
        state[v] = mark
        earliest[v] = begin + times[choice[v]]
    for v in range(n - 1, -1, -1):
        slow = due[v]
        mark = 2 * is_free[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - times[choice[w]] - succ_latency[k])
            mark |= state[w] & 2
        state[v] |= mark
        latest[v] = slow
    m = 0
    for v in range(n):
        if state[v] == 3:
            nodes[m] = v
            position[v] = m
            m += 1
    num_pred = num_succ = num_edges = 0
    first_release = 1e300
    last_due = 0.0
    for i in range(m):
        v = nodes[i]
        graph.pred[i] = num_pred
        release = 0.0
        for k in range(pred[v], pred[v + 1]):
            u = pred_node[k]
            if state[u] == 3:
                graph.pred_node[num_pred] = position[u]
                graph.pred_latency[num_pred] = pred_latency[k]
                num_pred += 1
            else:
                release = max(release, earliest[u] + pred_latency[k])
        graph.release[i] = release
        graph.succ[i] = num_succ
        network.succ[i] = num_edges
        limit = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            if state[w] == 3:
                graph.succ_node[num_succ] = position[w]
                graph.succ_latency[num_succ] = succ_latency[k]
                num_succ += 1
                network.tail[num_edges] = i
                network.head[num_edges] = position[w]
                network.latency[num_edges] = int(succ_latency[k] / levels.tick_s) + (v * 7 + w * 13) % JITTER_TICKS
                num_edges += 1
            else:
                limit = min(limit, latest[w] - times[choice[w]] - succ_latency[k])
        graph.due[i] = limit
        # one edge to the sink: its latency is set once the last due time is known
        network.tail[num_edges] = i
        network.head[num_edges] = m + 1
        num_edges += 1
        first_release = min(first_release, release)
        last_due = max(last_due, limit)
        low, high = choice[v], choice[v]
        network.first[i] = network.last[i] = levels.single + choice[v]
        if is_free[v]:
            low, high = options.low[v], options.last[v]
            network.first[i] = levels.first[v]
            network.last[i] = levels.last[v]
        choices.low[i] = low
        choices.high[i] = high
        choices.last[i] = options.last[v]
        choices.hull_low[i] = options.hull_low[v]
        choices.hull_high[i] = options.hull_high[v]
    graph.pred[m] = num_pred
    graph.succ[m] = num_succ
    network.succ[m] = num_edges
    for i in range(m):
        network.latency[network.succ[i + 1] - 1] = int((last_due - graph.due[i]) / levels.tick_s)
        network.tail[num_edges] = m
        network.head[num_edges] = i
        network.latency[num_edges] = int(graph.release[i] / levels.tick_s)
        num_edges += 1
    network.succ[m + 1] = network.succ[m + 2] = num_edges
    # edges by head
    for i in range(m + 3):
        network.pred[i] = 0
    for e in range(num_edges):
        network.pred[network.head[e] + 1] += 1
    for i in range(m + 2):
        network.pred[i + 1] += network.pred[i]
    for e in range(num_edges - 1, -1, -1):
        head = network.head[e] + 1
        network.pred[head] -= 1
        network.pred_edges[network.pred[head]] = e
    for i in range(m + 1):
        network.pred[i] = network.pred[i + 1]
    network.pred[m + 2] = num_edges
    return m, num_edges, first_release, last_due


@compiled
def _climb(
    m: int, graph: KernelGraph, choices: KernelOptions, part: Part, random: int, cost: float
) -> tuple[float, int]:
    """Improve `part.best`, of this cost: make one operation faster, let others take the time, keep if not dearer."""
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, release, due = graph
    low, last, times, costs = choices.low, choices.last, choices.times, choices.costs
    best, trial, finish, latest = part.best, part.trial, part.work_a, part.work_b
    for _ in range(CLIMB_MOVES):
        random = _random(random)
        moved = (random >> 8) % m
        if best[moved] <= low[moved]:
            continue
        for i in range(m):
            trial[i] = best[i]
        random = _random(random)
        trial[moved] = max(low[moved], best[moved] - 1 - (random >> 8) % 3)
        random = _random(random)
        odds = 300 + (random >> 8) % 724
        for sweep in range(4):
            for i in range(m - 1, -1, -1):
                slow = due[i]
                for k in range(succ[i], succ[i + 1]):
                    w = succ_node[k]
                    slow = min(slow, latest[w] - times[trial[w]] - succ_latency[k])
                latest[i] = slow
            changed = False
            for i in range(m):
                begin = release[i]
                for k in range(pred[i], pred[i + 1]):
                    begin = max(begin, finish[pred_node[k]] + pred_latency[k])
                option = trial[i]
                if option < last[i] and begin + times[option + 1] <= latest[i]:
                    random = _random(random)
                    if sweep >= 2 or (i != moved and (random >> 8) % 1024 < odds):
                        while option < last[i] and begin + times[option + 1] <= latest[i]:
                            option += 1
                        trial[i] = option
                        changed = True
                finish[i] = begin + times[option]
            if sweep >= 2 and not changed:
                break
        total = 0.0
        for i in range(m):
            total += costs[trial[i]]
        if total <= cost:
            cost = total
            for i in range(m):
                best[i] = trial[i]
    return cost, random
