"""Plans with few clock changes: at most K clock segments per rank and iteration, with the switch latency inside.

Theory of operation. A clock change costs: while a reduction is on its way, the slow segment's head still runs fast.
That head also gains time, which a plan that knows of it spends elsewhere. So segments are judged by what an
iteration takes and costs when each reduction arrives one latency after its segment begins and each raise, asked for
ahead, arrives just in time: what `switching` carries out.

The start is the cheapest segmentation under the prices of the continuous optimum: instruction i at clock c costs
energy - blocking power * time + price_i * time, and a dynamic program over (instruction, segments so far, clock)
finds the best K segments of each rank on its own. Ranks disagree a little about time, so simulated annealing follows,
over clocks and boundaries, with overtime charged ever more; it repeats exactly, from a fixed seed. Whatever comes out
is simulated again, independently, and must keep the deadline.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionClass
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import Timeline, timeline
from gpuenergyd_policies.planning.compiled import IS_COMPILED, compiled, floats, ints
from gpuenergyd_policies.planning.exact.tables import FloatArray
from gpuenergyd_policies.planning.frontier import SolvedPlan
from gpuenergyd_policies.planning.switching.requests import (
    Latency,
    SimulatedIteration,
    clock_changes,
    rank_latencies,
    simulate_switching,
)

RESTARTS = 3
STEPS = 250_000 if IS_COMPILED else 800
"""Annealing steps of one restart; an interpreter has time for a few only."""
TEMPERATURE_RATIO = 5e-4
"""Of the ideal saving: where annealing starts."""
COOLING = 0.01
"""How much of that temperature is left at the end."""
OVERTIME_PRICE_GROWTH = 100.0
"""How much dearer time beyond the deadline is at the end than at the start."""
_PENDING = 8


@dataclass(frozen=True, slots=True)
class SegmentedPlan:
    """Clocks in at most K segments per rank, the changes that bring them about, and what comes of it with latency."""

    sm_clocks_mhz: tuple[int, ...]
    planned: Timeline
    changes: tuple[tuple[ClockChange, ...], ...]
    simulated: SimulatedIteration

    def num_segments(self, pp_rank: int) -> int:
        """Return how many clock segments a rank has in one iteration."""
        clocks = [
            clock
            for clock, span in zip(self.sm_clocks_mhz, self.planned.spans, strict=True)
            if span.instruction.pp_rank == pp_rank
        ]
        return sum(1 for k, clock in enumerate(clocks) if k == 0 or clock != clocks[k - 1])


def plan_segments(
    graph: DependencyGraph,
    profile: PipelineProfile,
    solved: SolvedPlan,
    *,
    deadline_s: float,
    max_segments: int,
    latency: Latency,
    forced: bool = False,
    seed: int = 1,
    steps: int = STEPS,
) -> SegmentedPlan | None:
    """Return the cheapest plan found with at most `max_segments` segments per rank, None if none keeps the deadline.

    Args:
        graph: the pipeline.
        profile: its tables.
        solved: the plan without such limits for the same deadline: its prices are where the search begins.
        deadline_s: the iteration time owed, with latency.
        max_segments: K.
        latency: time from asking for a clock until it is effective.
        forced: the time until the deadline passes anyway, so that waiting is free.
        seed: of the search; the same seed gives the same plan.
        steps: how long to search.
    """
    search = _Search(graph, profile, latency=latency)
    constant = search.full_speed_plan(max_segments)
    best = constant if constant.simulated.iteration_time_s <= deadline_s else None
    for restart in range(RESTARTS):
        bounds, clocks = search.start(solved.prices_w, max_segments)
        found = search.anneal(
            bounds,
            clocks,
            max_segments=max_segments,
            deadline_s=deadline_s,
            waiting_power_w=0.0 if forced else profile.blocking_power_w * graph.num_ranks,
            overtime_price_w=max(solved.price_w, profile.blocking_power_w * graph.num_ranks),
            temperature_j=TEMPERATURE_RATIO * max(search.full_speed_j - solved.energy_j, 1e-3 * search.full_speed_j),
            seed=seed + restart,
            steps=steps,
        )
        if not found:
            continue
        plan = search.plan(bounds, clocks, max_segments)
        is_in_time = plan.simulated.iteration_time_s <= deadline_s
        if is_in_time and (best is None or plan.simulated.energy_j < best.simulated.energy_j):
            best = plan
    return best


class _Search:
    """One pipeline in the form that the kernels take; clock c of rank r is the c-th of that rank's, lowest first."""

    def __init__(self, graph: DependencyGraph, profile: PipelineProfile, *, latency: Latency) -> None:
        self._graph = graph
        self._profile = profile
        self._latencies = rank_latencies(latency, graph.num_ranks)
        # A raise is asked for ahead and comes in time; that reductions come late is what segments are judged with.
        self._lower_s = floats([own.lower_s for own in self._latencies])
        classes = sorted({i.instruction_class for i in graph.instructions})
        self._grids = [
            _rank_clocks([key for key in classes if key.pp_rank == r], profile) for r in range(graph.num_ranks)
        ]
        options = [[profile[key].interpolated(mhz) for mhz in self._grids[key.pp_rank]] for key in classes]
        start = np.cumsum([0] + [len(row) for row in options])
        position = {key: k for k, key in enumerate(classes)}
        self._table = ints([start[position[i.instruction_class]] for i in graph.instructions])
        self._times = floats([option.time_s for row in options for option in row])
        self._energies = floats([option.energy_j for row in options for option in row])
        self._order = ints(graph.topological_order)
        self._pred = ints(np.cumsum([0] + [len(p) for p in graph.predecessors]))
        self._pred_node = ints([u for before in graph.predecessors for u, _ in before])
        self._pred_latency = floats([latency for before in graph.predecessors for _, latency in before])
        self._epilogues_s = floats(graph.epilogues_s)
        self._rank = ints([i.pp_rank for i in graph.instructions])
        counts = np.bincount(np.asarray(self._rank), minlength=graph.num_ranks)
        self._first = ints(np.cumsum([0, *counts]))
        full_speed = [profile[i.instruction_class].at_max_clock for i in graph.instructions]
        idle_w = profile.blocking_power_w * graph.num_ranks
        self.full_speed_j = (
            sum(o.effective_energy_j(profile.blocking_power_w) for o in full_speed)
            + idle_w * timeline(graph, [o.time_s for o in full_speed]).iteration_time_s
        )

    def full_speed_plan(self, max_segments: int) -> SegmentedPlan:
        """Return every rank at its highest clock, which needs no change at all."""
        bounds: list[int] = []
        clocks: list[int] = []
        for r, grid in enumerate(self._grids):
            bounds += [0] + [self._first[r + 1] - self._first[r]] * max_segments
            clocks += [len(grid) - 1] * max_segments
        return self.plan(bounds, clocks, max_segments)

    def start(self, prices_w: Sequence[float], max_segments: int) -> tuple[list[int], list[int]]:
        """Return boundaries and clocks of the cheapest segments under these prices, rank after rank."""
        bounds: list[int] = []
        clocks: list[int] = []
        for r, grid in enumerate(self._grids):
            nodes = range(self._first[r], self._first[r + 1])
            costs = np.array(
                [
                    [
                        self._energies[self._table[v] + c]
                        + (prices_w[v] - self._profile.blocking_power_w) * self._times[self._table[v] + c]
                        for c in range(len(grid))
                    ]
                    for v in nodes
                ]
            )
            rank_bounds, rank_clocks = _cheapest_segments(costs, max_segments)
            bounds += rank_bounds
            clocks += rank_clocks
        return list(ints(bounds)), list(ints(clocks))

    def anneal(
        self,
        bounds: list[int],
        clocks: list[int],
        *,
        max_segments: int,
        deadline_s: float,
        waiting_power_w: float,
        overtime_price_w: float,
        temperature_j: float,
        seed: int,
        steps: int,
    ) -> bool:
        """Improve boundaries and clocks in place; return whether they keep the deadline."""
        n, num_ranks = len(self._graph.instructions), self._graph.num_ranks
        found_bounds, found_clocks = ints(bounds), ints(clocks)
        cost_j = _anneal(
            self._order,
            self._pred,
            self._pred_node,
            self._pred_latency,
            self._epilogues_s,
            self._rank,
            self._table,
            self._times,
            self._energies,
            self._first,
            ints([len(grid) for grid in self._grids]),
            num_ranks,
            max_segments,
            found_bounds,
            found_clocks,
            self._lower_s,
            self._profile.blocking_power_w,
            waiting_power_w,
            deadline_s,
            overtime_price_w,
            temperature_j,
            steps,
            seed,
            ints(np.zeros(n)),
            floats(np.zeros(n)),
            ints(np.zeros(num_ranks)),
            ints(np.zeros(num_ranks)),
            floats(np.zeros(num_ranks * _PENDING)),
            ints(np.zeros(num_ranks * _PENDING)),
            ints(bounds),
            ints(clocks),
        )
        bounds[:], clocks[:] = list(found_bounds), list(found_clocks)
        return cost_j < math.inf

    def plan(self, bounds: Sequence[int], clocks: Sequence[int], max_segments: int) -> SegmentedPlan:
        """Return segments as a plan, simulated by the same rules that carry it out."""
        n, num_ranks = len(self._graph.instructions), self._graph.num_ranks
        clock_of = ints(np.zeros(n))
        for r in range(num_ranks):
            _fill(clock_of, self._first, r, max_segments, ints(bounds), ints(clocks))
        finish, duration = floats(np.zeros(n)), floats(np.zeros(n))
        _run(
            self._order,
            self._pred,
            self._pred_node,
            self._pred_latency,
            self._epilogues_s,
            self._rank,
            self._table,
            self._times,
            self._energies,
            self._first,
            num_ranks,
            clock_of,
            self._lower_s,
            finish,
            ints(np.zeros(num_ranks)),
            ints(np.zeros(num_ranks)),
            floats(np.zeros(num_ranks * _PENDING)),
            ints(np.zeros(num_ranks * _PENDING)),
        )
        for v in self._graph.topological_order:
            start_s = max((finish[u] + latency_s for u, latency_s in self._graph.predecessors[v]), default=0.0)
            duration[v] = finish[v] - start_s
        planned = timeline(self._graph, duration)
        sm_clocks_mhz = tuple(self._grids[self._rank[v]][clock_of[v]] for v in range(n))
        by_instruction: dict[Instruction, int] = dict(zip(self._graph.instructions, sm_clocks_mhz, strict=True))
        changes = clock_changes(planned, by_instruction, latency=self._latencies)
        return SegmentedPlan(
            sm_clocks_mhz,
            planned,
            changes,
            simulate_switching(self._graph, self._profile, changes, latency=self._latencies),
        )


def _rank_clocks(classes: Sequence[InstructionClass], profile: PipelineProfile) -> list[int]:
    """Return the clocks, ascending, that every class of a rank was measured at; failing that, all there are."""
    measured = [{option.sm_clock_mhz for option in profile[key].options} for key in classes]
    return sorted(set.intersection(*measured) or set.union(*measured)) if measured else []


def _cheapest_segments(costs: FloatArray, max_segments: int) -> tuple[list[int], list[int]]:
    """Return the K + 1 boundaries and K clocks of least total cost; `costs[i, c]` is instruction i at clock c."""
    n = len(costs)
    segments = min(max_segments, n)
    best = np.repeat(costs[0][None, :], segments, axis=0)
    came_from = np.full((n, segments, costs.shape[1]), -1, dtype=np.int64)
    for i in range(1, n):
        following = best.copy()
        for k in range(1, segments):
            cheapest = int(best[k - 1].argmin())
            is_switch = best[k - 1, cheapest] < best[k]
            following[k] = np.where(is_switch, best[k - 1, cheapest], best[k])
            came_from[i, k] = np.where(is_switch, cheapest, -1)
        best = following + costs[i]
    k, clock = segments - 1, int(best[segments - 1].argmin())
    bounds, clocks = [n], [clock]
    for i in range(n - 1, 0, -1):
        if came_from[i, k, clock] >= 0:
            clock, k = int(came_from[i, k, clock]), k - 1
            bounds.append(i)
            clocks.append(clock)
    bounds.append(0)
    unused = max_segments - len(clocks)
    return bounds[::-1] + [n] * unused, clocks[::-1] + [clocks[0]] * unused


@compiled
def _run(
    order: list[int],
    pred: list[int],
    pred_node: list[int],
    pred_latency: list[float],
    epilogues_s: list[float],
    rank: list[int],
    table: list[int],
    times: list[float],
    energies: list[float],
    first: list[int],
    num_ranks: int,
    clock_of: list[int],
    lower_s: list[float],
    finish: list[float],
    active: list[int],
    num_pending: list[int],
    pending_at: list[float],
    pending_clock: list[int],
) -> tuple[float, float, float]:
    """Return the iteration time, and the sums of energy and time of all instructions."""
    for r in range(num_ranks):
        active[r] = clock_of[first[r + 1] - 1]  # what the iteration before left
        num_pending[r] = 0
    energy_sum = 0.0
    time_sum = 0.0
    makespan = 0.0
    for v in order:
        begin = 0.0
        for k in range(pred[v], pred[v + 1]):
            begin = max(begin, finish[pred_node[k]] + pred_latency[k])
        r = rank[v]
        at = r * 8
        wanted = clock_of[v]
        now_active = active[r]
        count = num_pending[r]
        while count > 0 and pending_at[at] <= begin:
            now_active = pending_clock[at]
            count -= 1
            for i in range(count):
                pending_at[at + i] = pending_at[at + i + 1]
                pending_clock[at + i] = pending_clock[at + i + 1]
        if wanted >= now_active:
            # a raise was asked for ahead; it also takes back reductions that have not arrived
            now_active = wanted
            count = 0
        else:
            i = 0
            while i < count and pending_clock[at + i] >= wanted:
                i += 1
            if i < count:
                pending_clock[at + i] = wanted
                count = i + 1
            elif count == 0 or pending_clock[at + count - 1] > wanted:
                if count == 8:
                    count -= 1
                pending_at[at + count] = begin + lower_s[r]
                pending_clock[at + count] = wanted
                count += 1
        now = begin
        left = 1.0
        energy = 0.0
        while True:
            duration = times[table[v] + now_active]
            end = now + left * duration
            if count == 0 or end <= pending_at[at]:
                energy += left * energies[table[v] + now_active]
                break
            done = (pending_at[at] - now) / duration
            energy += done * energies[table[v] + now_active]
            left -= done
            now = pending_at[at]
            now_active = pending_clock[at]
            count -= 1
            for i in range(count):
                pending_at[at + i] = pending_at[at + i + 1]
                pending_clock[at + i] = pending_clock[at + i + 1]
        active[r] = now_active
        num_pending[r] = count
        finish[v] = end
        energy_sum += energy
        time_sum += end - begin
        makespan = max(makespan, end + epilogues_s[v])
    return makespan, energy_sum, time_sum


@compiled
def _fill(
    clock_of: list[int], first: list[int], r: int, num_segments: int, bounds: list[int], clocks: list[int]
) -> None:
    for k in range(num_segments):
        for p in range(bounds[r * (num_segments + 1) + k], bounds[r * (num_segments + 1) + k + 1]):
            clock_of[first[r] + p] = clocks[r * num_segments + k]


@compiled
def _anneal(
    order: list[int],
    pred: list[int],
    pred_node: list[int],
    pred_latency: list[float],
    epilogues_s: list[float],
    rank: list[int],
    table: list[int],
    times: list[float],
    energies: list[float],
    first: list[int],
    num_clocks: list[int],
    num_ranks: int,
    num_segments: int,
    best_bounds: list[int],
    best_clocks: list[int],
    lower_s: list[float],
    blocking_power: float,
    waiting_power: float,
    deadline: float,
    overtime_price: float,
    temperature: float,
    steps: int,
    seed: int,
    clock_of: list[int],
    finish: list[float],
    active: list[int],
    num_pending: list[int],
    pending_at: list[float],
    pending_clock: list[int],
    bounds: list[int],
    clocks: list[int],
) -> float:
    """Anneal `bounds` and `clocks`, leave the best that keeps the deadline in `best_...`, and return its cost."""
    for r in range(num_ranks):
        _fill(clock_of, first, r, num_segments, bounds, clocks)
    state = seed * 2654435761 % 2147483647 + 1
    cost = math.inf
    overtime = 0.0
    best = math.inf
    for step in range(-1, steps):
        share = max(step, 0) / steps
        price = overtime_price * OVERTIME_PRICE_GROWTH**share
        limit = temperature * COOLING**share
        r = k = other = changed_bound = changed_clock = other_clock = -1
        if step >= 0:
            state = state * 48271 % 2147483647
            pick = state % (num_ranks * num_segments * 3)
            r = pick // 3 // num_segments
            k = pick // 3 % num_segments
            state = state * 48271 % 2147483647
            shift = state % 4 + 1
            if state // 4 % 2:
                shift = -shift
            if pick % 3 == 0:
                b = r * (num_segments + 1) + k
                if k == 0:
                    continue
                moved = min(max(bounds[b] + shift, bounds[b - 1]), bounds[b + 1])
                if moved == bounds[b]:
                    continue
                changed_bound = bounds[b]
                bounds[b] = moved
            else:
                c = r * num_segments + k
                moved = min(max(clocks[c] + shift, 0), num_clocks[r] - 1)
                if moved == clocks[c]:
                    continue
                changed_clock = clocks[c]
                clocks[c] = moved
                if pick % 3 == 2:  # one faster, another slower
                    state = state * 48271 % 2147483647
                    other = state % (num_ranks * num_segments)
                    if other == c:
                        other = -1
                    else:
                        state = state * 48271 % 2147483647
                        back = state % 4 + 1
                        if moved > changed_clock:
                            back = -back
                        other_clock = clocks[other]
                        clocks[other] = min(max(other_clock + back, 0), num_clocks[other // num_segments] - 1)
                        _fill(clock_of, first, other // num_segments, num_segments, bounds, clocks)
            _fill(clock_of, first, r, num_segments, bounds, clocks)
        makespan, energy_sum, time_sum = _run(
            order,
            pred,
            pred_node,
            pred_latency,
            epilogues_s,
            rank,
            table,
            times,
            energies,
            first,
            num_ranks,
            clock_of,
            lower_s,
            finish,
            active,
            num_pending,
            pending_at,
            pending_clock,
        )
        spent = energy_sum - blocking_power * time_sum + waiting_power * makespan
        late = max(0.0, makespan - deadline)
        state = state * 48271 % 2147483647
        threshold = spent + price * late - cost - price * overtime if cost < math.inf else -1.0
        if threshold <= 0.0 or state / 2147483647.0 < math.exp(-threshold / limit):
            cost = spent
            overtime = late
            if late <= 0.0 and spent < best:
                best = spent
                for i in range(len(bounds)):
                    best_bounds[i] = bounds[i]
                for i in range(len(clocks)):
                    best_clocks[i] = clocks[i]
            continue
        if changed_bound >= 0:
            bounds[r * (num_segments + 1) + k] = changed_bound
        else:
            clocks[r * num_segments + k] = changed_clock
        if other >= 0:
            clocks[other] = other_clock
            _fill(clock_of, first, other // num_segments, num_segments, bounds, clocks)
        _fill(clock_of, first, r, num_segments, bounds, clocks)
    return best
