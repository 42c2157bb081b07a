"""Compiled kernels of flat plans: local search for clocks whose power wave has the least energy in a frequency band.

The wave of a plan is a sum of rectangles, one per instruction. Its Fourier coefficients are therefore sums of
exponentials of start and end times, without sampling. A move changes only a few of them.
"""

import math
from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled
from gpuenergyd_policies.planning.pseudo_random import RANDOM_MODULUS, next_random

_MOVED_RATIO = 1e-12
"""Starts and ends that move by less than this share of the period are treated as unchanged."""


class FlatGraph(NamedTuple):
    """Nodes in a topological order; predecessors of v are pred_node[pred[v]:pred[v + 1]], with latencies.

    The nodes of rank r in program order are `rank_nodes[rank_first[r]:rank_first[r + 1]]`.
    """

    pred: list[int]
    pred_node: list[int]
    pred_latency: list[float]
    epilogue: list[float]
    rank_first: list[int]
    rank_nodes: list[int]


class FlatOptions(NamedTuple):
    """Options of node v at start[v]:start[v + 1]; each is slower than the one before and needs less power.

    Powers and costs are those beyond waiting.
    """

    start: list[int]
    times: list[float]
    powers: list[float]
    costs: list[float]


class Band(NamedTuple):
    """Harmonics of the iteration in the band: `weights[k]` is the weight of harmonic first + k."""

    first: int
    weights: list[float]


class FlatLimits(NamedTuple):
    """Limits of a plan: period and latest end in seconds, and maximum energy beyond waiting."""

    period: float
    deadline: float
    cost: float


class FlatState(NamedTuple):
    """A plan being searched: options, starts and ends by node, sums of its harmonics; and a copy to restore."""

    choice: list[int]
    begin: list[float]
    end: list[float]
    real: list[float]
    imaginary: list[float]
    kept_begin: list[float]
    kept_end: list[float]
    kept_real: list[float]
    kept_imaginary: list[float]
    kept_choice: list[int]
    best: list[int]


@compiled
def place(graph: FlatGraph, options: FlatOptions, state: FlatState, first: int) -> float:
    """Compute starts and ends of nodes from `first` on, each as early as possible; return the end of the last node."""
    pred, pred_node, pred_latency, epilogue, _, _ = graph
    times, start = options.times, options.start
    begin, end, choice = state.begin, state.end, state.choice
    last = 0.0
    for v in range(len(pred) - 1):
        if v >= first:
            at = 0.0
            for k in range(pred[v], pred[v + 1]):
                ready = end[pred_node[k]] + pred_latency[k]
                at = max(at, ready)
            begin[v] = at
            end[v] = at + times[start[v] + choice[v]]
        last = max(last, end[v] + epilogue[v])
    return last


@compiled
def add_rectangle(band: Band, state: FlatState, power: float, begin: float, end: float, period: float) -> None:
    """Add a rectangle of power to the sums of all harmonics."""
    first, weights = band
    real, imaginary = state.real, state.imaginary
    for side in range(2):
        angle = 2.0 * math.pi * (begin if side == 0 else end) / period
        step_real, step_imaginary = math.cos(angle), math.sin(angle)
        now_real, now_imaginary = math.cos(first * angle), math.sin(first * angle)
        own = power if side == 0 else -power
        for k in range(len(weights)):
            real[k] += own * now_real
            imaginary[k] += own * now_imaginary
            now_real, now_imaginary = (
                now_real * step_real - now_imaginary * step_imaginary,
                now_real * step_imaginary + now_imaginary * step_real,
            )


@compiled
def swing(band: Band, state: FlatState) -> float:
    """Return the energy of the wave within the band from the sums of its harmonics."""
    total = 0.0
    for k in range(len(band.weights)):
        total += band.weights[k] * (state.real[k] ** 2 + state.imaginary[k] ** 2)
    return total


@compiled
def find_harmonics(options: FlatOptions, band: Band, state: FlatState, period: float) -> float:
    """Recompute the sums of all harmonics; return the energy of the wave within the band."""
    for k in range(len(band.weights)):
        state.real[k] = 0.0
        state.imaginary[k] = 0.0
    for v in range(len(state.choice)):
        power = options.powers[options.start[v] + state.choice[v]]
        add_rectangle(band, state, power, state.begin[v], state.end[v], period)
    return swing(band, state)


@compiled
def flatten(  # noqa: C901, PLR0912, PLR0915  one move after the other
    graph: FlatGraph,
    options: FlatOptions,
    band: Band,
    limits: FlatLimits,
    state: FlatState,
    num_moves: int,
    heat: float,
    random: int,
) -> float:
    """Search for the options with the least swing within the limits, from those in `state`; return that swing.

    A move changes some neighbouring instructions of a rank by some options. Half of the moves also change others in the
    opposite direction, which keeps time and energy about equal. Simulated annealing: worse plans are kept with a
    probability that falls to zero, starting from `heat` relative to the swing. The best options are in `state.best`.
    """
    start, _, powers, costs = options
    choice, begin, end = state.choice, state.begin, state.end
    n, num_ranks = len(choice), len(graph.rank_first) - 1
    place(graph, options, state, 0)
    present = find_harmonics(options, band, state, limits.period)
    cost = 0.0
    for v in range(n):
        cost += costs[start[v] + choice[v]]
        state.best[v] = choice[v]
        state.kept_choice[v] = choice[v]
        state.kept_begin[v] = begin[v]
        state.kept_end[v] = end[v]
    least = present
    moved_s = _MOVED_RATIO * limits.period
    for move in range(num_moves):
        first, changed_cost = n, 0.0
        random = next_random(random)
        num_parts = 1 + random % 2
        random = next_random(random)
        size = 1 if random % 3 else 1 + random // 3 % 10
        random = next_random(random)
        step = size if random % 2 else -size
        number = 0
        for _ in range(num_parts):
            step = -step
            random = next_random(random)
            r = random % num_ranks
            length = graph.rank_first[r + 1] - graph.rank_first[r]
            if length == 0:
                continue
            random = next_random(random)
            at = graph.rank_first[r] + random % length
            random = next_random(random)
            stride = 1 + random % 2
            random = next_random(random)
            count = 1 if random % 2 else 1 << random // 2 % 10 // 3
            for k in range(at, min(graph.rank_first[r + 1], at + count * stride), stride):
                v = graph.rank_nodes[k]
                option = min(max(choice[v] + step, 0), start[v + 1] - start[v] - 1)
                if option != choice[v]:
                    changed_cost += costs[start[v] + option] - costs[start[v] + choice[v]]
                    choice[v] = option
                    first = min(first, v)
                    number += 1
        if number == 0:
            continue
        is_kept = cost + changed_cost <= limits.cost
        if is_kept:
            is_kept = place(graph, options, state, first) <= limits.deadline
        if is_kept:
            for k in range(len(band.weights)):
                state.kept_real[k] = state.real[k]
                state.kept_imaginary[k] = state.imaginary[k]
            for v in range(first, n):
                if (
                    choice[v] != state.kept_choice[v]
                    or abs(begin[v] - state.kept_begin[v]) > moved_s
                    or abs(end[v] - state.kept_end[v]) > moved_s
                ):
                    before = powers[start[v] + state.kept_choice[v]]
                    add_rectangle(band, state, -before, state.kept_begin[v], state.kept_end[v], limits.period)
                    add_rectangle(band, state, powers[start[v] + choice[v]], begin[v], end[v], limits.period)
            found = swing(band, state)
            random = next_random(random)
            chance = random / RANDOM_MODULUS
            warmth = heat * present * (1.0 - move / num_moves)
            is_kept = found <= present or (warmth > 0.0 and chance < math.exp((present - found) / warmth))
            if is_kept:
                present = found
                cost += changed_cost
            else:
                for k in range(len(band.weights)):
                    state.real[k] = state.kept_real[k]
                    state.imaginary[k] = state.kept_imaginary[k]
        if is_kept:
            for v in range(first, n):
                state.kept_choice[v] = choice[v]
                state.kept_begin[v] = begin[v]
                state.kept_end[v] = end[v]
            if present < least:
                least = present
                for v in range(n):
                    state.best[v] = choice[v]
        else:
            for v in range(first, n):
                choice[v] = state.kept_choice[v]
                begin[v] = state.kept_begin[v]
                end[v] = state.kept_end[v]
    return least
