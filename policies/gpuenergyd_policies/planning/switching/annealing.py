"""Compiled kernels of the segment search: an iteration with late clock reductions, and simulated annealing.

Clocks are indices into a rank's list, lowest first. The segments of rank r lie between K + 1 `bounds`, which are
indices into the rank's program order, and run at K `clocks`; a segment may be empty.
"""

import math
from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled
from gpuenergyd_policies.planning.pseudo_random import RANDOM_MODULUS, next_random

OVERTIME_PRICE_GROWTH = 100.0
"""Factor by which the price of time beyond the deadline grows from start to end."""
COOLING = 0.01
"""Final temperature, as a share of the initial one."""
MOST_STEPS = 4
"""Maximum number of positions by which a move changes a boundary or a clock."""
MAX_PENDING = 8
"""Maximum number of pending reductions per rank; a further one replaces the last."""


class Pipeline(NamedTuple):
    """A pipeline: nodes in topological order, predecessors of v at pred[v]:pred[v + 1], nodes of r from first[r].

    Node v at clock c takes times[options[v] + c] and energies[options[v] + c]. A reduction to clock c on rank r takes
    effect reduction_latency[clocks_from[r] + c] after its request; each change stalls the rank's work for stall[r].
    """

    order: list[int]
    pred: list[int]
    pred_node: list[int]
    pred_latency: list[float]
    epilogue: list[float]
    rank: list[int]
    first: list[int]
    options: list[int]
    times: list[float]
    energies: list[float]
    num_clocks: list[int]
    clocks_from: list[int]
    reduction_latency: list[float]
    stall: list[float]


class Segments(NamedTuple):
    """Segments of all ranks, one rank after the other: K + 1 bounds and K clocks each."""

    bounds: list[int]
    clocks: list[int]


class Iteration(NamedTuple):
    """Working memory for one iteration: planned clock and finish by node, clock and pending reductions by rank."""

    planned: list[int]
    finish: list[float]
    active: list[int]
    num_pending: list[int]
    pending_at: list[float]
    pending_clock: list[int]


class Annealing(NamedTuple):
    """Objective and schedule of annealing.

    `waiting_power` is charged for the whole iteration time, and `blocking_power` is credited during instructions.
    """

    blocking_power: float
    waiting_power: float
    deadline: float
    overtime_price: float
    temperature: float
    steps: int
    seed: int


@compiled
def anneal(
    pipeline: Pipeline, segments: Segments, kept: Segments, best: Segments, goal: Annealing, work: Iteration
) -> float:
    """Anneal from `segments`; write the cheapest segments that meet the deadline to `best`, and return their cost."""
    fill_clocks(pipeline, segments, work)
    random = goal.seed * 2654435761 % RANDOM_MODULUS + 1
    cost = math.inf
    overtime = 0.0
    best_cost = math.inf
    spent = math.inf
    late = 0.0
    for step in range(-1, goal.steps):
        share = max(step, 0) / goal.steps
        price = goal.overtime_price * OVERTIME_PRICE_GROWTH**share
        limit = goal.temperature * COOLING**share
        if step >= 0:
            is_moved, random = _move(pipeline, segments, random)
            if not is_moved:
                continue
        if fill_clocks(pipeline, segments, work) or step < 0:
            makespan, energy, time = run_iteration(pipeline, work)
            spent = energy - goal.blocking_power * time + goal.waiting_power * makespan
            late = max(0.0, makespan - goal.deadline)
        else:
            spent, late = cost, overtime
        random = next_random(random)
        increase = spent + price * late - cost - price * overtime if cost < math.inf else -1.0
        if increase <= 0.0 or random / RANDOM_MODULUS < math.exp(-increase / limit):
            cost = spent
            overtime = late
            _copy(segments, kept)
            if late <= 0.0 and spent < best_cost:
                best_cost = spent
                _copy(segments, best)
        else:
            _copy(kept, segments)
            fill_clocks(pipeline, segments, work)
    return best_cost


@compiled
def _copy(source: Segments, target: Segments) -> None:
    for i in range(len(source.bounds)):
        target.bounds[i] = source.bounds[i]
    for i in range(len(source.clocks)):
        target.clocks[i] = source.clocks[i]


@compiled
def fill_clocks(pipeline: Pipeline, segments: Segments, work: Iteration) -> bool:
    """Write the clocks of all segments to their nodes; return whether any clock changed."""
    is_changed = False
    num_ranks = len(pipeline.first) - 1
    num_segments = len(segments.clocks) // num_ranks
    for r in range(num_ranks):
        first = pipeline.first[r]
        for k in range(num_segments):
            bound = r * (num_segments + 1) + k
            clock = segments.clocks[r * num_segments + k]
            for node in range(first + segments.bounds[bound], first + segments.bounds[bound + 1]):
                if work.planned[node] != clock:
                    work.planned[node] = clock
                    is_changed = True
    return is_changed


@compiled
def _move(pipeline: Pipeline, segments: Segments, random: int) -> tuple[bool, int]:
    """Move one boundary or clock by up to four steps, or two clocks in opposite directions; return if any moved."""
    bounds, clocks = segments
    num_ranks = len(pipeline.first) - 1
    num_segments = len(clocks) // num_ranks
    random = next_random(random)
    pick = random % (num_ranks * num_segments * 3)
    r = pick // 3 // num_segments
    k = pick // 3 % num_segments
    random = next_random(random)
    shift = random % MOST_STEPS + 1
    if random // MOST_STEPS % 2:
        shift = -shift
    if pick % 3 == 0:
        b = r * (num_segments + 1) + k
        if k == 0:
            return False, random
        before = bounds[b]
        bounds[b] = min(max(before + shift, bounds[b - 1]), bounds[b + 1])
        return bounds[b] != before, random
    c = r * num_segments + k
    before = clocks[c]
    clocks[c] = min(max(before + shift, 0), pipeline.num_clocks[r] - 1)
    if clocks[c] == before:
        return False, random
    if pick % 3 == 2:  # one clock up, another down
        random = next_random(random)
        other = random % (num_ranks * num_segments)
        if other != c:
            random = next_random(random)
            back = random % MOST_STEPS + 1
            if clocks[c] > before:
                back = -back
            most = pipeline.num_clocks[other // num_segments] - 1
            clocks[other] = min(max(clocks[other] + back, 0), most)
    return True, random


@compiled
def run_iteration(  # noqa: C901, PLR0912, PLR0915  the innermost loop, run hundreds of thousands of times
    pipeline: Pipeline, work: Iteration
) -> tuple[float, float, float]:
    """Simulate an iteration with the planned clocks, where reductions take effect late and raises in time.

    A driver call that stalls the rank delays the first node after a reduction, or the last one before a raise. A raise
    at the start of the iteration is requested after the rank's last node, where it delays nothing.

    Returns the iteration time and the sums of all instructions' energies and times.
    """
    (
        order,
        pred,
        pred_node,
        pred_latency,
        epilogue,
        rank,
        first,
        options,
        times,
        energies,
        _,
        clocks_from,
        latency,
        stall,
    ) = pipeline
    planned, finish, active, num_pending, pending_at, pending_clock = work
    for r in range(len(first) - 1):
        active[r] = planned[first[r + 1] - 1]  # the clock at the end of the previous iteration
        num_pending[r] = 0
    energy_sum = 0.0
    time_sum = 0.0
    makespan = 0.0
    for v in order:
        begin = 0.0
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, finish[pred_node[k]] + pred_latency[k])
        r = rank[v]
        at = r * MAX_PENDING
        wanted = planned[v]
        before = planned[v - 1] if v > first[r] else planned[first[r + 1] - 1]
        after = planned[v + 1] if v + 1 < first[r + 1] else wanted
        called = begin
        if wanted < before:
            begin += stall[r]
        if wanted < after:
            begin += stall[r]
        clock = active[r]
        count = num_pending[r]
        while count > 0 and pending_at[at] <= begin:
            clock = pending_clock[at]
            count -= 1
            for i in range(count):
                pending_at[at + i] = pending_at[at + i + 1]
                pending_clock[at + i] = pending_clock[at + i + 1]
        if wanted >= clock:
            # a raise was requested early; it also cancels reductions that have not taken effect
            clock = wanted
            count = 0
        else:
            i = 0
            while i < count and pending_clock[at + i] >= wanted:
                i += 1
            if i < count:
                pending_clock[at + i] = wanted
                count = i + 1
            elif count == 0 or pending_clock[at + count - 1] > wanted:
                if count == MAX_PENDING:
                    count -= 1
                pending_at[at + count] = max(begin, called + latency[clocks_from[r] + wanted])
                pending_clock[at + count] = wanted
                count += 1
        now = begin
        left = 1.0
        energy = 0.0
        while True:
            duration = times[options[v] + clock]
            end = now + left * duration
            if count == 0 or end <= pending_at[at]:
                energy += left * energies[options[v] + clock]
                break
            done = (pending_at[at] - now) / duration
            energy += done * energies[options[v] + clock]
            left -= done
            now = pending_at[at]
            clock = pending_clock[at]
            count -= 1
            for i in range(count):
                pending_at[at + i] = pending_at[at + i + 1]
                pending_clock[at + i] = pending_clock[at + i + 1]
        active[r] = clock
        num_pending[r] = count
        finish[v] = end
        energy_sum += energy
        time_sum += end - begin
        makespan = max(makespan, end + epilogue[v])
    return makespan, energy_sum, time_sum
