"""Compiled kernels of refinement: cut a window out of a plan, sweep and round it again, and polish it by hill climbing.

Pseudo-random choices come from a fixed sequence: the same input gives the same plan, compiled or not.
"""

from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled
from gpuenergyd_policies.planning.discrete.rounding_kernels import GraphArrays, OptionArrays, Rounding, round_down
from gpuenergyd_policies.planning.exact.sweep_kernels import (
    NetworkArrays,
    SweepRequest,
    SweepSnapshots,
    SweepState,
    sweep_down,
)

BY_TIME, BY_MICROBATCH = 0, 1
CLIMB_MOVES = 40
LATER_SPANS = (0.01, 0.0)
"""How much later than due, as a share of the window's length, the swept durations are that get rounded."""
BEHIND_FREE, AHEAD_OF_FREE, IN_WINDOW = 1, 2, 3
"""Marks of operations that depend on a free one, that a free one depends on, and both."""


class Windows(NamedTuple):
    """Windows to refine one after the other: from begin to end, in time order or in microbatches."""

    kinds: list[int]
    begins: list[int]
    ends: list[int]


class PipelineArrays(NamedTuple):
    """The whole pipeline with its deadline: graph, options, and hull vertices of the flow network by operation.

    Chains of a single vertex, one per option, begin at `single_vertex`.
    """

    graph: GraphArrays
    options: OptionArrays
    first_vertex: list[int]
    last_vertex: list[int]
    single_vertex: int
    microbatches: list[int]
    tick_s: float
    jitter_ticks: int


class PlanState(NamedTuple):
    """The plan under refinement, by operation: its option, earliest and latest finish, whether free, and its marks."""

    choice: list[int]
    earliest: list[float]
    latest: list[float]
    is_free: list[int]
    marks: list[int]


class Window(NamedTuple):
    """Working memory for a window: its own graph, options and network, and the best choice found for it."""

    nodes: list[int]
    position: list[int]
    graph: GraphArrays
    options: OptionArrays
    network: NetworkArrays
    durations: list[float]
    best: list[int]
    trial: Rounding


@compiled
def refine_windows(  # noqa: C901  one window after the other, each with a few short loops
    n: int,
    seed: int,
    windows: Windows,
    pipeline: PipelineArrays,
    plan: PlanState,
    window: Window,
    sweep: tuple[SweepRequest, SweepState, SweepSnapshots],
) -> float:
    """Refine one window after the other in place; return the plan's cost."""
    costs = pipeline.options.costs
    random = seed
    outdated = n  # the first operation whose earliest finish may be outdated; n: nothing is known
    for number in range(len(windows.kinds)):
        first, last = windows.begins[number], windows.ends[number]
        if windows.kinds[number] == BY_TIME:
            if outdated > first:
                begin_stretches(n, pipeline, plan)
                outdated = 0
            m = mark_stretch(outdated, first, min(n, last), pipeline, plan, window)
            outdated = first
        else:
            outdated = n
            for v in range(n):
                plan.is_free[v] = 1 if first <= pipeline.microbatches[v] < last else 0
            m = mark_window(n, pipeline, plan, window)
        if m == 0:
            continue
        begin, end = copy_graph(m, pipeline, plan, window)
        num_edges = copy_network(m, end, pipeline, window)
        before = 0.0
        for i in range(m):
            window.best[i] = plan.choice[window.nodes[i]]
            before += costs[window.best[i]]
        best = _round_again(m, num_edges, begin, end, pipeline, window, sweep, before)
        best, random = climb(m, window, random, best)
        if best <= before:
            for i in range(m):
                plan.choice[window.nodes[i]] = window.best[i]
        if outdated < n:
            for i in range(m):
                plan.is_free[window.nodes[i]] = plan.marks[window.nodes[i]] = 0
    _find_earliest_finishes(n, pipeline, plan)
    cost = 0.0
    for v in range(n):
        cost += costs[plan.choice[v]]
    return cost


@compiled
def _find_earliest_finishes(n: int, pipeline: PipelineArrays, plan: PlanState) -> None:
    pred, pred_node, pred_latency, _, _, _, _, _ = pipeline.graph
    times, choice, earliest = pipeline.options.times, plan.choice, plan.earliest
    for v in range(n):
        begin = 0.0
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, earliest[pred_node[k]] + pred_latency[k])
        earliest[v] = begin + times[choice[v]]


@compiled
def begin_stretches(n: int, pipeline: PipelineArrays, plan: PlanState) -> None:
    """Compute the latest finishes of all operations, and mark none: stretches of time follow, from early to late."""
    _, _, _, succ, succ_node, succ_latency, _, due = pipeline.graph
    times, choice, latest = pipeline.options.times, plan.choice, plan.latest
    for v in range(n - 1, -1, -1):
        plan.is_free[v] = plan.marks[v] = 0
        slow = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - times[choice[w]] - succ_latency[k])
        latest[v] = slow


@compiled
def mark_stretch(outdated: int, begin: int, end: int, pipeline: PipelineArrays, plan: PlanState, window: Window) -> int:
    """List a stretch of operations in time order, which holds all on paths between them; return how many they are.

    Earliest finishes are recomputed from the first outdated one on, latest ones in the stretch: earlier stretches have
    not changed those after it. So a pass takes time in proportion to the pipeline, however many stretches it has.
    """
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, _, due = pipeline.graph
    times, choice, earliest, latest = pipeline.options.times, plan.choice, plan.earliest, plan.latest
    for v in range(outdated, end):
        start = 0.0
        for k in range(pred[v], pred[v + 1]):
            start = max(start, earliest[pred_node[k]] + pred_latency[k])
        earliest[v] = start + times[choice[v]]
    for v in range(end - 1, begin - 1, -1):
        slow = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - times[choice[w]] - succ_latency[k])
        latest[v] = slow
    for v in range(begin, end):
        plan.is_free[v], plan.marks[v] = 1, IN_WINDOW
        window.nodes[v - begin] = v
        window.position[v] = v - begin
    return max(0, end - begin)


@compiled
def mark_window(n: int, pipeline: PipelineArrays, plan: PlanState, window: Window) -> int:
    """List the free operations and all on paths between them; return how many they are.

    Computes earliest and latest finishes of all operations on the way.
    """
    pred, pred_node, _, succ, succ_node, succ_latency, _, due = pipeline.graph
    times, choice, latest, is_free, marks = pipeline.options.times, plan.choice, plan.latest, plan.is_free, plan.marks
    nodes, position = window.nodes, window.position
    _find_earliest_finishes(n, pipeline, plan)
    for v in range(n):
        mark = BEHIND_FREE * is_free[v]
        for k in range(pred[v], pred[v + 1]):
            mark |= marks[pred_node[k]] & BEHIND_FREE
        marks[v] = mark
    for v in range(n - 1, -1, -1):
        slow = due[v]
        mark = AHEAD_OF_FREE * is_free[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - times[choice[w]] - succ_latency[k])
            mark |= marks[w] & AHEAD_OF_FREE
        marks[v] |= mark
        latest[v] = slow
    m = 0
    for v in range(n):
        if marks[v] == IN_WINDOW:
            nodes[m] = v
            position[v] = m
            m += 1
    return m


@compiled
def copy_graph(m: int, pipeline: PipelineArrays, plan: PlanState, window: Window) -> tuple[float, float]:
    """Copy the window's graph and options; return when it begins and when it is due.

    Operations outside become releases and due times. Operations that are not free keep their option, except that
    absorbing may slow them down.
    """
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, _, due = pipeline.graph
    options, graph, choices = pipeline.options, window.graph, window.options
    nodes, position, marks = window.nodes, window.position, plan.marks
    num_pred = num_succ = 0
    first_release = 1e300
    last_due = 0.0
    for i in range(m):
        v = nodes[i]
        graph.pred[i] = num_pred
        release = 0.0
        for k in range(pred[v], pred[v + 1]):
            u = pred_node[k]
            if marks[u] == IN_WINDOW:
                graph.pred_node[num_pred] = position[u]
                graph.pred_latency[num_pred] = pred_latency[k]
                num_pred += 1
            else:
                release = max(release, plan.earliest[u] + pred_latency[k])
        graph.release[i] = release
        graph.succ[i] = num_succ
        limit = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            if marks[w] == IN_WINDOW:
                graph.succ_node[num_succ] = position[w]
                graph.succ_latency[num_succ] = succ_latency[k]
                num_succ += 1
            else:
                limit = min(limit, plan.latest[w] - options.times[plan.choice[w]] - succ_latency[k])
        graph.due[i] = limit
        first_release = min(first_release, release)
        last_due = max(last_due, limit)
        is_free = plan.is_free[v] == 1
        chosen = plan.choice[v]
        choices.low[i] = options.low[v] if is_free else chosen
        choices.high[i] = options.last[v] if is_free else chosen
        choices.last[i] = options.last[v]
        choices.hull_low[i] = options.hull_low[v]
        choices.hull_high[i] = options.hull_high[v]
        window.network.first[i] = pipeline.first_vertex[v] if is_free else pipeline.single_vertex + chosen
        window.network.last[i] = pipeline.last_vertex[v] if is_free else pipeline.single_vertex + chosen
    graph.pred[m] = num_pred
    graph.succ[m] = num_succ
    return first_release, last_due


@compiled
def copy_network(m: int, last_due: float, pipeline: PipelineArrays, window: Window) -> int:
    """Make the window's flow network from its graph, with edges from the source and to the sink; count its edges."""
    tick_s, graph, network, nodes = pipeline.tick_s, window.graph, window.network, window.nodes
    num_edges = 0
    for i in range(m):
        network.succ[i] = num_edges
        for k in range(graph.succ[i], graph.succ[i + 1]):
            j = graph.succ_node[k]
            jitter = (nodes[i] * 7 + nodes[j] * 13) % pipeline.jitter_ticks
            network.tail[num_edges] = i
            network.head[num_edges] = j
            network.latency[num_edges] = int(graph.succ_latency[k] / tick_s) + jitter
            num_edges += 1
        network.tail[num_edges] = i
        network.head[num_edges] = m + 1
        network.latency[num_edges] = int((last_due - graph.due[i]) / tick_s)
        num_edges += 1
    network.succ[m] = num_edges
    for i in range(m):
        network.tail[num_edges] = m
        network.head[num_edges] = i
        network.latency[num_edges] = int(graph.release[i] / tick_s)
        num_edges += 1
    network.succ[m + 1] = network.succ[m + 2] = num_edges
    # counting sort of the edges by head
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
    return num_edges


@compiled
def _round_again(
    m: int,
    num_edges: int,
    begin: float,
    end: float,
    pipeline: PipelineArrays,
    window: Window,
    sweep: tuple[SweepRequest, SweepState, SweepSnapshots],
    cost: float,
) -> float:
    """Sweep the window and round its durations in several ways; keep the best choice cheaper than `cost` so far."""
    request, state, snapshots = sweep
    for row in range(len(LATER_SPANS)):
        request.deadlines[row] = int((end + LATER_SPANS[row] * (end - begin)) / pipeline.tick_s)
    sweep_down(m, num_edges, window.network, state, request, snapshots)
    for row in range(len(LATER_SPANS)):
        for i in range(m):
            window.durations[i] = snapshots.durations[row * m + i] * pipeline.tick_s
        for candidate in range(6):
            slack_share, on_hull = 0.5 * (candidate % 3), candidate >= 3
            rounded = round_down(m, window.graph, window.options, window.durations, slack_share, on_hull, window.trial)
            if rounded < cost:
                cost = rounded
                for i in range(m):
                    window.best[i] = window.trial.choice[i]
    return cost


@compiled
def next_random(state: int) -> int:
    """Return the next state of a linear congruential generator."""
    return (state * 1103515245 + 12345) & 0x7FFFFFFF


@compiled
def climb(  # noqa: C901, PLR0912  one move after the other, each with a few short loops
    m: int, window: Window, random: int, cost: float
) -> tuple[float, int]:
    """Improve `window.best`, of this cost: make one operation faster, let others slow down, keep if not more expensive.

    Others use the trial's slack at random in two sweeps, then as far as possible in two more. Returns the cost and the
    state of the pseudo-random sequence.
    """
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, release, due = window.graph
    low, _, last, _, _, _, times, costs = window.options
    best = window.best
    trial, finish, latest, _ = window.trial
    for _ in range(CLIMB_MOVES):
        random = next_random(random)
        moved = (random >> 8) % m
        if best[moved] <= low[moved]:
            continue
        for i in range(m):
            trial[i] = best[i]
        random = next_random(random)
        trial[moved] = max(low[moved], best[moved] - 1 - (random >> 8) % 3)
        random = next_random(random)
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
                    random = next_random(random)
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
