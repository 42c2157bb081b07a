"""Compiled kernels for plans under a power cap: the earliest schedule that fits, and local search to improve it."""

from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled
from gpuenergyd_policies.planning.pseudo_random import next_random

ROUNDING = 1e-12
"""Relative difference below which times or powers are equal."""
NEVER_S = 1e300


class CappedGraph(NamedTuple):
    """Nodes by rank in program order: those of rank r are first[r]:first[r + 1].

    Successors of v are at succ[v]:succ[v + 1]; `num_pred[v]` is the number of its predecessors.
    """

    first: list[int]
    num_pred: list[int]
    succ: list[int]
    succ_node: list[int]
    succ_latency: list[float]
    epilogue: list[float]
    tail: list[float]
    """Time from the start of a node to the end of the iteration at full speed. Of nodes that start together, the one
    with the longest tail is given power first."""


class PowerOptions(NamedTuple):
    """Options of node v at start[v]:start[v + 1]; each is slower than the one before and needs less power.

    `floor[v]` is the minimum power of v's rank from v on: the largest of the lowest powers of v and all later nodes.
    `after[v]` is that value for the nodes after v.
    """

    start: list[int]
    times: list[float]
    powers: list[float]
    energies: list[float]
    floor: list[float]
    after: list[float]
    blocking: float


class Fitting(NamedTuple):
    """Working memory of `fit`, and the option chosen for each node."""

    choice: list[int]
    missing: list[int]
    ready: list[float]
    at: list[int]
    finish: list[float]
    base: list[float]


@compiled
def fit(  # noqa: C901, PLR0912, PLR0915  one event after the other
    graph: CappedGraph, options: PowerOptions, guide: list[int], cap: float, work: Fitting
) -> tuple[float, float]:
    """Start each node as early as possible, with the fastest option not faster than its guide whose power fits the cap.

    A waiting rank reserves the power for the slowest option of its next nodes, so that one option always fits. Returns
    the makespan, and the energy up to then including waits.
    """
    first, num_pred, succ, succ_node, succ_latency, epilogue, tail = graph
    start, times, powers, energies, floor, after, blocking = options
    choice, missing, ready, at, finish, base = work
    num_ranks = len(first) - 1
    total = 0.0
    for r in range(num_ranks):
        at[r] = first[r]
        finish[r] = NEVER_S
        base[r] = floor[first[r]] if first[r] < first[r + 1] else blocking
        total += base[r]
    for v in range(len(num_pred)):
        missing[v] = num_pred[v]
        ready[v] = 0.0
    makespan, energy, busy = 0.0, 0.0, 0.0
    while True:
        now = NEVER_S
        for r in range(num_ranks):
            if finish[r] < now:
                now = finish[r]
            elif finish[r] == NEVER_S and at[r] < first[r + 1] and missing[at[r]] == 0 and ready[at[r]] < now:
                now = ready[at[r]]
        if now == NEVER_S:
            break
        until = now * (1.0 + ROUNDING)
        for r in range(num_ranks):
            if finish[r] <= until:
                v = at[r]
                for k in range(succ[v], succ[v + 1]):
                    w = succ_node[k]
                    missing[w] -= 1
                    ready[w] = max(ready[w], finish[r] + succ_latency[k])
                makespan = max(makespan, finish[r] + epilogue[v])
                total += after[v] - base[r]
                base[r] = after[v]
                finish[r] = NEVER_S
                at[r] += 1
        while True:
            chosen, longest = -1, -1.0
            for r in range(num_ranks):
                v = at[r]
                can_begin = finish[r] == NEVER_S and v < first[r + 1] and missing[v] == 0 and ready[v] <= until
                if can_begin and tail[v] > longest:
                    chosen, longest = r, tail[v]
            if chosen < 0:
                break
            r, v = chosen, at[chosen]
            available = (cap - total + base[r]) * (1.0 + ROUNDING)
            option = start[v] + guide[v]
            while option < start[v + 1] - 1 and powers[option] > available:
                option += 1
            choice[v] = option - start[v]
            needed = max(powers[option], after[v])
            total += needed - base[r]
            base[r] = needed
            finish[r] = max(now, ready[v]) + times[option]
            busy += times[option]
            energy += energies[option]
    return makespan, energy + blocking * (num_ranks * makespan - busy)


@compiled
def improve(
    graph: CappedGraph,
    options: PowerOptions,
    guide: list[int],
    best: list[int],
    cap: float,
    work: Fitting,
    num_moves: int,
    random: int,
) -> tuple[float, float]:
    """Change the guide of a few nodes at random; keep changes that are faster, or cheaper in the same time.

    A move makes some neighbouring nodes of a rank (all, or every second one) one or three options faster or slower. The
    best options are left in `best`. Returns their makespan and energy.
    """
    first = graph.first
    start = options.start
    n, num_ranks = len(graph.num_pred), len(first) - 1
    makespan, energy = fit(graph, options, guide, cap, work)
    for v in range(n):
        best[v] = work.choice[v]
        guide[v] = work.choice[v]
    for _ in range(num_moves):
        random = next_random(random)
        r = random % num_ranks
        random = next_random(random)
        begin = first[r] + random % (first[r + 1] - first[r])
        random = next_random(random)
        count = 1 << random % 10 // 3
        random = next_random(random)
        step = 1 + random % 2
        random = next_random(random)
        by = 1 if random % 3 else 3
        random = next_random(random)
        if random % 2:
            by = -by
        end = min(first[r + 1], begin + count * step)
        for v in range(begin, end, step):
            guide[v] = min(max(guide[v] + by, 0), start[v + 1] - start[v] - 1)
        time, cost = fit(graph, options, guide, cap, work)
        is_faster = time < makespan * (1.0 - ROUNDING)
        if is_faster or (time <= makespan * (1.0 + ROUNDING) and cost < energy):
            makespan, energy = time, cost
            for v in range(n):
                best[v] = work.choice[v]
                guide[v] = work.choice[v]
        else:
            for v in range(begin, end):
                guide[v] = best[v]
    return makespan, energy
