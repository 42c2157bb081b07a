"""Compiled kernels of rounding: durations to options in one pass over a graph, then absorption of the remaining time.

They process a range of operations from `first` to `last` (excluded) in a topological order, so that the range contains
all paths between its operations. The plan around the range is fixed: its finish times before the range, and its
choices, durations and latest finish times after it.
"""

from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled
from gpuenergyd_policies.planning.pseudo_random import RANDOM_MODULUS, next_random

MAX_ABSORB_SWEEPS = 8


class GraphArrays(NamedTuple):
    """A graph with operations numbered in topological order; operation v must end by due[v].

    Neighbours of v are at pred[v]:pred[v + 1] and succ[v]:succ[v + 1].
    """

    pred: list[int]
    pred_node: list[int]
    pred_latency: list[float]
    succ: list[int]
    succ_node: list[int]
    succ_latency: list[float]
    due: list[float]


class OptionArrays(NamedTuple):
    """Options of operation v: low[v] to high[v] for rounding, up to last[v] for absorbing, fastest first.

    Indices refer to the concatenated options of all classes.
    """

    low: list[int]
    high: list[int]
    last: list[int]
    times: list[float]
    costs: list[float]


class OfferedOptions(NamedTuple):
    """Options from which rounding first chooses; for v, if it has a choice, options[low[v]] to options[high[v]]."""

    low: list[int]
    high: list[int]
    options: list[int]


class Rounding(NamedTuple):
    """Working memory and result of rounding, by operation: chosen option, finish, and latest finishes."""

    choice: list[int]
    finish: list[float]
    latest: list[float]
    """Latest finish if later operations take their wanted or chosen durations."""
    latest_fast: list[float]
    """Latest finish if later operations run at their fastest."""


@compiled
def round_down(  # noqa: C901, PLR0912  one walk back over the stretch, two forward
    first: int,
    last: int,
    graph: GraphArrays,
    options: OptionArrays,
    offered: OfferedOptions,
    durations: list[float],
    slack_share: float,
    plan: Rounding,
) -> float:
    """Round durations down to offered options, absorb the remaining time, and return the range's cost.

    Operations should finish at `slack_share` of their slack: 0 is the earliest finish, 1 the latest.
    """
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, due = graph
    low, high, _, times, costs = options
    choice, finish, latest, latest_fast = plan
    for v in range(last - 1, first - 1, -1):
        slow = fast = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - durations[w] - succ_latency[k])
            fast = min(fast, latest_fast[w] - times[low[w]] - succ_latency[k])
        latest[v] = slow
        latest_fast[v] = fast
    if slack_share < 1.0:
        for v in range(first, last):
            begin = 0.0
            for k in range(pred[v], pred[v + 1]):
                begin = max(begin, finish[pred_node[k]] + pred_latency[k])
            finish[v] = begin + durations[v]
            latest[v] = finish[v] + slack_share * (latest[v] - finish[v])
    for v in range(first, last):
        begin = 0.0
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, finish[pred_node[k]] + pred_latency[k])
        limit = min(latest[v], latest_fast[v])
        option = low[v]
        if option < high[v]:
            # binary search for the slowest option that ends by the limit
            left, right = offered.low[v], offered.high[v]
            while left < right:
                middle = (left + right + 1) >> 1
                if begin + times[offered.options[middle]] <= limit:
                    left = middle
                else:
                    right = middle - 1
            option = offered.options[left]
        choice[v] = option
        finish[v] = begin + times[option]
    for _ in range(MAX_ABSORB_SWEEPS):
        is_changed, _ = absorb(first, last, graph, options, plan, -1, RANDOM_MODULUS, 1)
        if not is_changed:
            break
    cost = 0.0
    for v in range(first, last):
        cost += costs[choice[v]]
    return cost


@compiled
def absorb(
    first: int, last: int, graph: GraphArrays, options: OptionArrays, plan: Rounding, fixed: int, odds: int, random: int
) -> tuple[bool, int]:
    """Slow operations down to use the slack of the current choice; return whether any changed, and the random state.

    Each operation uses its slack with probability `odds` / RANDOM_MODULUS; operation `fixed` keeps its option.
    """
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, due = graph
    _, _, last_option, times, _ = options
    choice, finish, latest, _ = plan
    for v in range(last - 1, first - 1, -1):
        slow = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - times[choice[w]] - succ_latency[k])
        latest[v] = slow
    is_changed = False
    for v in range(first, last):
        begin = 0.0
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, finish[pred_node[k]] + pred_latency[k])
        option = choice[v]
        if option < last_option[v] and begin + times[option + 1] <= latest[v] and v != fixed:
            random = next_random(random)
            if random < odds:
                while option < last_option[v] and begin + times[option + 1] <= latest[v]:
                    option += 1
                choice[v] = option
                is_changed = True
        finish[v] = begin + times[option]
    return is_changed, random
