"""Compiled kernel of rounding: durations to options in one walk over a graph, then absorption of the time left."""

from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled

MAX_ABSORB_SWEEPS = 8


class GraphArrays(NamedTuple):
    """A graph, or a window cut out of one, with operations numbered in topological order.

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


class OptionArrays(NamedTuple):
    """Options of operations: low[v] to high[v] when rounding, up to last[v] when absorbing.

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


class Rounding(NamedTuple):
    """Working memory and result of rounding, by operation: the option chosen, its finish, and latest finishes."""

    choice: list[int]
    finish: list[float]
    latest: list[float]
    latest_fast: list[float]


@compiled
def round_down(  # noqa: C901, PLR0912  one walk over the graph with two binary searches in it
    n: int,
    graph: GraphArrays,
    options: OptionArrays,
    durations: list[float],
    slack_share: float,
    on_hull: bool,  # noqa: FBT001  kernels take everything by position
    result: Rounding,
) -> float:
    """Round durations down to options, absorb the time left, and return the cost.

    Operations aim to finish at this share of their slack: 0 is the earliest finish, 1 the latest.
    """
    pred, pred_node, pred_latency, _, _, _, release, _ = graph
    low, high, _, hull_low, hull_high, hull_options, times, costs = options
    choice, finish, latest, latest_fast = result
    _find_latest_finishes(n, graph, options, durations, result)
    if slack_share < 1.0:
        # earliest finishes with the continuous durations, then the point between
        for v in range(n):
            begin = release[v]
            for k in range(pred[v], pred[v + 1]):
                begin = max(begin, finish[pred_node[k]] + pred_latency[k])
            finish[v] = begin + durations[v]
        for v in range(n):
            latest[v] = finish[v] + slack_share * (latest[v] - finish[v])
    for v in range(n):
        begin = release[v]
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, finish[pred_node[k]] + pred_latency[k])
        limit = min(latest[v], latest_fast[v])
        # binary search for the slowest option that ends by the limit
        left, right = low[v], high[v]
        if on_hull and left < right:
            left, right = hull_low[v], hull_high[v]
            while left < right:
                middle = (left + right + 1) >> 1
                if begin + times[hull_options[middle]] <= limit:
                    left = middle
                else:
                    right = middle - 1
            left = hull_options[left]
        else:
            while left < right:
                middle = (left + right + 1) >> 1
                if begin + times[middle] <= limit:
                    left = middle
                else:
                    right = middle - 1
        choice[v] = left
        finish[v] = begin + times[left]
    for _ in range(MAX_ABSORB_SWEEPS):
        if not _absorb(n, graph, options, result):
            break
    cost = 0.0
    for v in range(n):
        cost += costs[choice[v]]
    return cost


@compiled
def _find_latest_finishes(
    n: int, graph: GraphArrays, options: OptionArrays, durations: list[float], result: Rounding
) -> None:
    """Compute latest finishes: `latest` with the continuous durations, `latest_fast` with all later ones fastest."""
    _, _, _, succ, succ_node, succ_latency, _, due = graph
    low, _, _, _, _, _, times, _ = options
    _, _, latest, latest_fast = result
    for v in range(n - 1, -1, -1):
        slow = fast = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - durations[w] - succ_latency[k])
            fast = min(fast, latest_fast[w] - times[low[w]] - succ_latency[k])
        latest[v] = slow
        latest_fast[v] = fast


@compiled
def _absorb(n: int, graph: GraphArrays, options: OptionArrays, result: Rounding) -> bool:
    """Slow operations down into the slack of the current choice; return whether any changed."""
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, release, due = graph
    _, _, last, _, _, _, times, _ = options
    choice, finish, latest, _ = result
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
        option = choice[v]
        while option < last[v] and begin + times[option + 1] <= latest[v]:
            option += 1
            changed = True
        choice[v] = option
        finish[v] = begin + times[option]
    return changed
