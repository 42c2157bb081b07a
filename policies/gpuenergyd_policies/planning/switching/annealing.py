"""Compiled kernels of the segment search: an iteration with late clock reductions, and simulated annealing.

Clocks are positions in a rank's list, lowest first. The segments of rank r begin and end at K + 1 `bounds`, positions
in the rank's program order, and run at K `clocks`; a segment may be empty.
"""

import math
from typing import NamedTuple

from gpuenergyd_policies.planning.compiled import compiled
from gpuenergyd_policies.planning.pseudo_random import RANDOM_MODULUS, next_random

OVERTIME_PRICE_GROWTH = 100.0
"""Factor by which time beyond the deadline gets more expensive from start to end."""
COOLING = 0.01
"""Final temperature, as a share of the initial one."""
MAX_PENDING = 8
"""Reductions of a rank under way at once; a further one replaces the last."""


class Pipeline(NamedTuple):
    """A pipeline: nodes in topological order, predecessors of v at pred[v]:pred[v + 1], nodes of r from first[r].

    Node v at clock c takes times[options[v] + c] and energies[options[v] + c]. A reduction to clock c on rank r takes
    effect reduction_latency[clocks_from[r] + c] after it is requested; each change stops the rank's work for stall[r].
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
    """Segments of all ranks, rank after rank: K + 1 bounds and K clocks each."""

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

    `waiting_power` is charged for the whole iteration time and `blocking_power` credited for each instruction's time.
    """

    blocking_power: float
    waiting_power: float
    deadline: float
    overtime_price: float
    temperature: float
    steps: int
    seed: int


class Move(NamedTuple):
    """A change of segments and the values to restore if it is rejected; indices are -1 where nothing changed."""

    rank: int
    bound: int
    bound_before: int
    clock: int
    clock_before: int
    other_clock: int
    other_clock_before: int
    changes_nodes: bool
    """False where no node's clock changed: between segments of the same clock, or in an empty segment."""


@compiled
def anneal(pipeline: Pipeline, segments: Segments, best: Segments, goal: Annealing, work: Iteration) -> float:
    """Anneal segments in place, write the cheapest that keep the deadline to `best`, and return their cost."""
    num_ranks = len(pipeline.first) - 1
    for r in range(num_ranks):
        fill_clocks(pipeline, segments, work, r)
    random = goal.seed * 2654435761 % RANDOM_MODULUS + 1
    cost = math.inf
    overtime = 0.0
    best_cost = math.inf
    spent = math.inf
    late = 0.0
    move = Move(0, -1, 0, -1, 0, -1, 0, False)
    for step in range(-1, goal.steps):
        share = max(step, 0) / goal.steps
        price = goal.overtime_price * OVERTIME_PRICE_GROWTH**share
        limit = goal.temperature * COOLING**share
        if step >= 0:
            move, random = _move(pipeline, segments, work, random)
            if move.bound < 0 and move.clock < 0:
                continue
        if step < 0 or move.changes_nodes:
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
            if late <= 0.0 and spent < best_cost:
                best_cost = spent
                for i in range(len(segments.bounds)):
                    best.bounds[i] = segments.bounds[i]
                for i in range(len(segments.clocks)):
                    best.clocks[i] = segments.clocks[i]
        else:
            _undo(pipeline, segments, work, move)
    return best_cost


@compiled
def fill_clocks(pipeline: Pipeline, segments: Segments, work: Iteration, r: int) -> bool:
    """Write the clocks of one rank's segments to its nodes; return whether any of them changed."""
    is_changed = False
    num_segments = len(segments.clocks) // (len(pipeline.first) - 1)
    for k in range(num_segments):
        bound = r * (num_segments + 1) + k
        clock = segments.clocks[r * num_segments + k]
        for node in range(pipeline.first[r] + segments.bounds[bound], pipeline.first[r] + segments.bounds[bound + 1]):
            if work.planned[node] != clock:
                work.planned[node] = clock
                is_changed = True
    return is_changed


@compiled
def _move(pipeline: Pipeline, segments: Segments, work: Iteration, random: int) -> tuple[Move, int]:
    """Move one boundary or one clock by up to four steps, or two clocks in opposite directions."""
    bounds, clocks = segments
    num_ranks = len(pipeline.first) - 1
    num_segments = len(clocks) // num_ranks
    random = next_random(random)
    pick = random % (num_ranks * num_segments * 3)
    r = pick // 3 // num_segments
    k = pick // 3 % num_segments
    random = next_random(random)
    shift = random % 4 + 1
    if random // 4 % 2:
        shift = -shift
    nothing = Move(r, -1, 0, -1, 0, -1, 0, False)
    if pick % 3 == 0:
        b = r * (num_segments + 1) + k
        before = bounds[b]
        if k == 0:
            return nothing, random
        moved = min(max(before + shift, bounds[b - 1]), bounds[b + 1])
        if moved == before:
            return nothing, random
        bounds[b] = moved
        is_changed = fill_clocks(pipeline, segments, work, r)
        return Move(r, b, before, -1, 0, -1, 0, is_changed), random
    c = r * num_segments + k
    before = clocks[c]
    moved = min(max(before + shift, 0), pipeline.num_clocks[r] - 1)
    if moved == before:
        return nothing, random
    clocks[c] = moved
    other = -1
    other_before = 0
    is_changed = False
    if pick % 3 == 2:  # one faster, another slower
        random = next_random(random)
        other = random % (num_ranks * num_segments)
        if other == c:
            other = -1
        else:
            random = next_random(random)
            back = random % 4 + 1
            if moved > before:
                back = -back
            other_rank = other // num_segments
            other_before = clocks[other]
            clocks[other] = min(max(other_before + back, 0), pipeline.num_clocks[other_rank] - 1)
            is_changed = fill_clocks(pipeline, segments, work, other_rank)
    is_changed = fill_clocks(pipeline, segments, work, r) or is_changed
    return Move(r, -1, 0, c, before, other, other_before, is_changed), random


@compiled
def _undo(pipeline: Pipeline, segments: Segments, work: Iteration, move: Move) -> None:
    """Restore the segments from before a move."""
    if move.bound >= 0:
        segments.bounds[move.bound] = move.bound_before
    else:
        segments.clocks[move.clock] = move.clock_before
    if move.other_clock >= 0:
        segments.clocks[move.other_clock] = move.other_clock_before
        num_segments = len(segments.clocks) // (len(pipeline.first) - 1)
        fill_clocks(pipeline, segments, work, move.other_clock // num_segments)
    fill_clocks(pipeline, segments, work, move.rank)


@compiled
def run_iteration(  # noqa: C901, PLR0912, PLR0915  the innermost loop, run hundreds of thousands of times
    pipeline: Pipeline, work: Iteration
) -> tuple[float, float, float]:
    """Simulate an iteration with the planned clocks, where reductions take effect late and raises in time.

    A call that stops the rank's work delays the first node after a reduction, or the last one before a raise. A raise
    at the begin of the iteration is requested after the rank's last node, where it delays nothing.

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
            # a raise was requested ahead of time; it also cancels reductions that have not taken effect
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
