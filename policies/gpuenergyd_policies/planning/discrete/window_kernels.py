"""Compiled kernels of refinement: sweep and round a window of a plan again, and improve it by hill climbing.

A window is a range of operations in time order (see `rounding_kernels`). Those of some microbatches are free; the
others keep their option, except that absorbing may slow them down. In a window's network, operations before the window
become edges from the source, and those after it edges to the sink.
"""

from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled
from gpuenergyd_policies.planning.discrete.rounding_kernels import (
    GraphArrays,
    OfferedOptions,
    OptionArrays,
    Rounding,
    absorb,
    round_down,
)
from gpuenergyd_policies.planning.exact.sweep_kernels import (
    NetworkArrays,
    SweepRequest,
    SweepSnapshots,
    SweepState,
    sweep_down,
)
from gpuenergyd_policies.planning.pseudo_random import RANDOM_MODULUS, next_random

CLIMB_MOVES = 50
LATER_SPANS = (0.01, 0.0)
"""Extra time beyond the due time, as a share of the window's length, for the sweeps whose durations get rounded."""


class PipelineArrays(NamedTuple):
    """The whole pipeline with its deadline: graph, options, and hull vertices of the flow network by operation.

    Single-vertex chains, one per option, begin at `single_vertex`.
    """

    graph: GraphArrays
    options: OptionArrays
    offered: tuple[OfferedOptions, OfferedOptions]
    first_vertex: list[int]
    last_vertex: list[int]
    single_vertex: int
    microbatches: list[int]
    deadline: float
    tick_s: float
    jitter_ticks: int


class Windows(NamedTuple):
    """Windows to refine one after the other: operations `first` to `last`, free for a range of microbatches."""

    first: list[int]
    last: list[int]
    free_from: list[int]
    free_to: list[int]


class Window(NamedTuple):
    """Working memory for a window: its options, its network, and swept durations by operation of the pipeline."""

    options: OptionArrays
    network: NetworkArrays
    request: SweepRequest
    state: SweepState
    snapshots: SweepSnapshots
    durations: list[float]


@compiled
def refine_windows(
    windows: Windows, seed: int, pipeline: PipelineArrays, best: list[int], trial: Rounding, window: Window
) -> float:
    """Refine the choice `best` in place, window by window; the trial's finishes become those of the result.

    Returns the cost.
    """
    n, costs = len(best), pipeline.options.costs
    random = seed
    settled, reach = n, n  # finishes are known before `settled`, latest finishes from `reach` on
    for number in range(len(windows.first)):
        first, last = windows.first[number], windows.last[number]
        if first < settled or last < reach:
            _find_latest_finishes(pipeline, best, trial, window)
            settled = 0
        _find_finishes(settled, first, pipeline, best, trial)
        settled, reach = first, last
        before = free_window(first, last, windows.free_from[number], windows.free_to[number], pipeline, best, window)
        found = _round_again(first, last, pipeline, best, trial, window, before)
        random = climb(first, last, pipeline.graph, window.options, best, trial, random, found)
    _find_finishes(0, n, pipeline, best, trial)
    cost = 0.0
    for v in range(n):
        cost += costs[best[v]]
    return cost


@compiled
def free_window(
    first: int, last: int, free_from: int, free_to: int, pipeline: PipelineArrays, best: list[int], window: Window
) -> float:
    """Offer all options to the free operations of a window, and return the window's cost."""
    options, cost = pipeline.options, 0.0
    for v in range(first, last):
        is_free = free_from <= pipeline.microbatches[v] < free_to
        window.options.low[v] = options.low[v] if is_free else best[v]
        window.options.high[v] = options.high[v] if is_free else best[v]
        cost += options.costs[best[v]]
    return cost


@compiled
def _find_finishes(first: int, last: int, pipeline: PipelineArrays, best: list[int], trial: Rounding) -> None:
    pred, pred_node, pred_latency, _, _, _, _ = pipeline.graph
    times, finish = pipeline.options.times, trial.finish
    for v in range(first, last):
        begin = 0.0
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, finish[pred_node[k]] + pred_latency[k])
        finish[v] = begin + times[best[v]]


@compiled
def _find_latest_finishes(pipeline: PipelineArrays, best: list[int], trial: Rounding, window: Window) -> None:
    """Compute the latest finishes of all operations, and fix their options and durations."""
    _, _, _, succ, succ_node, succ_latency, due = pipeline.graph
    times, latest = pipeline.options.times, trial.latest
    for v in range(len(best) - 1, -1, -1):
        slow = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            slow = min(slow, latest[w] - times[best[w]] - succ_latency[k])
        latest[v] = trial.latest_fast[v] = slow
        trial.choice[v] = window.options.low[v] = best[v]
        window.durations[v] = times[best[v]]


@compiled
def cut_network(  # noqa: C901  edges within, to the sink, from the source, and their order
    first: int, last: int, pipeline: PipelineArrays, trial: Rounding, window: Window
) -> tuple[int, float]:
    """Build the flow network of a window, whose paths must end by the pipeline's deadline.

    Returns the number of its edges, and the window's length in time.
    """
    pred, pred_node, pred_latency, succ, succ_node, succ_latency, due = pipeline.graph
    low, high, network = window.options.low, window.options.high, window.network
    m, deadline, tick_s = last - first, pipeline.deadline, pipeline.tick_s
    first_release, last_due = deadline, 0.0
    num_edges = 0
    for i in range(m):
        v = first + i
        is_free = low[v] < high[v]
        network.first[i] = pipeline.first_vertex[v] if is_free else pipeline.single_vertex + low[v]
        network.last[i] = pipeline.last_vertex[v] if is_free else pipeline.single_vertex + low[v]
        network.succ[i] = num_edges
        limit = due[v]
        for k in range(succ[v], succ[v + 1]):
            w = succ_node[k]
            if w < last:
                network.tail[num_edges] = i
                network.head[num_edges] = w - first
                network.latency[num_edges] = int(succ_latency[k] / tick_s) + (v * 7 + w * 13) % pipeline.jitter_ticks
                num_edges += 1
            else:
                limit = min(limit, trial.latest[w] - window.durations[w] - succ_latency[k])
        network.tail[num_edges] = i
        network.head[num_edges] = m + 1
        network.latency[num_edges] = int((deadline - limit) / tick_s)
        num_edges += 1
        last_due = max(last_due, limit)
    network.succ[m] = num_edges
    for i in range(m):
        v = first + i
        release = 0.0
        for k in range(pred[v], pred[v + 1]):
            if pred_node[k] < first:
                release = max(release, trial.finish[pred_node[k]] + pred_latency[k])
        network.tail[num_edges] = m
        network.head[num_edges] = i
        network.latency[num_edges] = int(release / tick_s)
        num_edges += 1
        first_release = min(first_release, release)
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
    return num_edges, last_due - first_release


@compiled
def _round_again(
    first: int, last: int, pipeline: PipelineArrays, best: list[int], trial: Rounding, window: Window, cost: float
) -> float:
    """Sweep a window and round its durations in several ways; keep the best choice that is cheaper than `cost`."""
    m = last - first
    num_edges, length = cut_network(first, last, pipeline, trial, window)
    for row in range(len(LATER_SPANS)):
        window.request.deadlines[row] = int((pipeline.deadline + LATER_SPANS[row] * length) / pipeline.tick_s)
    sweep_down(m, num_edges, window.network, window.state, window.request, window.snapshots)
    for row in range(len(LATER_SPANS)):
        for i in range(m):
            window.durations[first + i] = window.snapshots.durations[row * m + i] * pipeline.tick_s
        for offered in pipeline.offered:
            for share in range(3):
                rounded = round_down(
                    first, last, pipeline.graph, window.options, offered, window.durations, 0.5 * share, trial
                )
                if rounded < cost:
                    cost = rounded
                    for v in range(first, last):
                        best[v] = trial.choice[v]
    return cost


@compiled
def climb(
    first: int,
    last: int,
    graph: GraphArrays,
    options: OptionArrays,
    best: list[int],
    trial: Rounding,
    random: int,
    cost: float,
) -> int:
    """Improve a window with this cost: make one operation faster, let others slow down, keep if not more expensive.

    Others use the slack at random in two sweeps, then as far as possible in two more. Returns the state of the
    pseudo-random sequence.
    """
    low, costs, choice = options.low, options.costs, trial.choice
    for _ in range(CLIMB_MOVES):
        random = next_random(random)
        moved = first + random % (last - first)
        if best[moved] <= low[moved]:
            continue
        for v in range(first, last):
            choice[v] = best[v]
        random = next_random(random)
        choice[moved] = max(low[moved], best[moved] - 1 - random % 3)
        random = next_random(random)
        odds = RANDOM_MODULUS - random // 2
        for sweep in range(4):
            is_random = sweep < 2
            fixed, limit = (moved, odds) if is_random else (-1, RANDOM_MODULUS)
            is_changed, random = absorb(first, last, graph, options, trial, fixed, limit, random)
            if not is_random and not is_changed:
                break
        total = 0.0
        for v in range(first, last):
            total += costs[choice[v]]
        if total <= cost:
            cost = total
            for v in range(first, last):
                best[v] = choice[v]
    return random
