"""When to ask for which clock, so that a late clock costs energy and never time; and a simulator to prove it.

Theory of operation. A clock asked for at time t is effective at t + L. On the planned timeline let the *level* at t
be a clock that suits every instruction that runs in [t, t + L]: whatever is asked for then is never too slow when it
arrives. The level rises L before a faster instruction begins and falls when a slower one begins, so a raise is asked
for early and a reduction late. Each change is tied to the last instruction that has begun by then, as an offset from
its begin.

Why that is never slower than the plan. Suppose everything so far began no later than planned. Then each request is
made no later than planned, so from the planned start of an instruction on, a clock that suits it is effective:
reductions wait for a later instruction to begin. Whatever it did before is gained. So it ends no later than planned,
by induction over the graph. This needs one rule from whoever carries changes out: a change never overrides one that
stands later in program order and was made before.

The sequence is cyclic: what the first instructions need is asked for at the end of the iteration before, and
the first instruction always carries a change of its own, so that one lost record heals within an iteration.

What carries changes out takes two with one instruction: one now, one later, which replace those of the instruction
before. So delayed changes of one instruction are merged into the earliest and highest, and one that might replace a
delayed change still to come says again which clock is due by now.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from gpuenergyd.core.pipeline import DependencyGraph, Instruction
from gpuenergyd.core.plan import ClockChange
from gpuenergyd.core.profile import InstructionProfile, PipelineProfile
from gpuenergyd.core.timeline import Span, Timeline, iteration_energy_j


def clock_changes(
    planned: Timeline,
    sm_clocks_mhz: Mapping[Instruction, int],
    *,
    switch_latency_s: float,
    profile: PipelineProfile | None = None,
) -> tuple[tuple[ClockChange, ...], ...]:
    """Return, per rank, the clock changes that bring a plan about: raises ahead of need, reductions on begin.

    Args:
        planned: when each instruction runs if every clock is there in time.
        sm_clocks_mhz: the plan.
        switch_latency_s: time from asking for a clock until it is effective.
        profile: lets the level avoid clocks that are higher yet slower; without it a higher clock counts as faster.
    """
    return tuple(
        _rank_changes(
            planned.rank_spans(pp_rank),
            sm_clocks_mhz,
            iteration_time_s=planned.iteration_time_s,
            switch_latency_s=switch_latency_s,
            profile=profile,
        )
        for pp_rank in range(planned.num_ranks)
    )


@dataclass(frozen=True, slots=True)
class _Request:
    """Ask for a clock `offset_s` after the instruction at this position of the rank's order has begun."""

    position: int
    offset_s: float
    sm_clock_mhz: int


def _rank_changes(
    spans: Sequence[Span],
    sm_clocks_mhz: Mapping[Instruction, int],
    *,
    iteration_time_s: float,
    switch_latency_s: float,
    profile: PipelineProfile | None,
) -> tuple[ClockChange, ...]:
    if not spans:
        return ()
    levels = _levels(
        spans,
        sm_clocks_mhz,
        iteration_time_s=iteration_time_s,
        switch_latency_s=switch_latency_s,
        profile=profile,
    )
    return tuple(
        ClockChange(spans[request.position].instruction, request.offset_s, request.sm_clock_mhz)
        for request in _one_now_one_later(levels)
    )


def _levels(
    spans: Sequence[Span],
    sm_clocks_mhz: Mapping[Instruction, int],
    *,
    iteration_time_s: float,
    switch_latency_s: float,
    profile: PipelineProfile | None,
) -> list[_Request]:
    """Return every change of the level within one period, in order; the first hangs on the first begin."""
    # A moment is (position it hangs on, offset) -> planned time until which its level must suit. At a begin the level
    # may fall, a latency ahead of a begin it may rise; leads that reach before the first begin belong to the end.
    moments = {(k, 0.0): span.start_s + switch_latency_s for k, span in enumerate(spans)}
    first_s = spans[0].start_s
    starts_s = [span.start_s for span in spans]
    last = len(spans) - 1
    for span in spans:
        until_s = span.start_s
        if until_s - switch_latency_s <= first_s:
            until_s += iteration_time_s
        moment_s = until_s - switch_latency_s
        if moment_s <= first_s:
            continue
        position = bisect_right(starts_s, moment_s) - 1
        offset_s = moment_s - starts_s[position]
        if position == last:
            offset_s = min(offset_s, spans[last].duration_s)
        moments[position, offset_s] = max(until_s, moments.get((position, offset_s), 0.0))
    requests: list[_Request] = []
    in_force: int | None = None
    for (at, offset_s), until_s in sorted(moments.items()):
        window = _window(spans, at, until_s, iteration_time_s=iteration_time_s)
        level_mhz = _suitable_clock([spans[k].instruction for k in window], sm_clocks_mhz, profile)
        if level_mhz != in_force:
            requests.append(_Request(at, offset_s, level_mhz))
            in_force = level_mhz
    return requests


def _window(spans: Sequence[Span], first: int, until_s: float, *, iteration_time_s: float) -> list[int]:
    """Return the positions that run from position `first` on and begin by `until_s`, into the next iteration."""
    n = len(spans)
    positions = [first]
    for k in range(first + 1, first + n):
        start_s = spans[k % n].start_s + (iteration_time_s if k >= n else 0.0)
        if start_s > until_s:
            break
        positions.append(k % n)
    return positions


def _suitable_clock(
    instructions: Sequence[Instruction], sm_clocks_mhz: Mapping[Instruction, int], profile: PipelineProfile | None
) -> int:
    """Return the lowest clock at which each of the instructions is at least as fast as planned."""
    at_least_mhz = max(sm_clocks_mhz[i] for i in instructions)
    if profile is None:
        return at_least_mhz
    needs = {(i.instruction_class, sm_clocks_mhz[i]) for i in instructions}
    if len(needs) == 1:
        return at_least_mhz

    def worst_stretch(sm_clock_mhz: int) -> float:
        return max(
            profile[key].interpolated(sm_clock_mhz).time_s / profile[key].interpolated(planned_mhz).time_s
            for key, planned_mhz in needs
        )

    candidates = sorted({o.sm_clock_mhz for key, _ in needs for o in profile[key].options})
    suitable = [c for c in candidates if worst_stretch(c) <= 1.0]
    if at_least_mhz in suitable:
        return at_least_mhz
    return min(suitable) if suitable else min(candidates, key=worst_stretch)


def _one_now_one_later(requests: Sequence[_Request]) -> list[_Request]:
    """Leave each instruction one change at its begin and one delayed; sooner and faster is always safe."""
    result: list[_Request] = []
    for position, group in groupby(requests, key=lambda request: request.position):
        own = list(group)
        now = [request for request in own if request.offset_s <= 0.0]
        later = [request for request in own if request.offset_s > 0.0]
        if later and not now and result and result[-1].offset_s > 0.0:
            now = [_Request(position, 0.0, result[-1].sm_clock_mhz)]
        result += now
        if later:
            result.append(_Request(position, later[0].offset_s, later[-1].sm_clock_mhz))
    return result


def naive_changes(
    graph: DependencyGraph, sm_clocks_mhz: Mapping[Instruction, int]
) -> tuple[tuple[ClockChange, ...], ...]:
    """Return, per rank, a change at the begin of each instruction whose clock differs: late by the whole latency."""
    changes: list[list[ClockChange]] = [[] for _ in range(graph.num_ranks)]
    for instruction in graph.instructions:
        rank_changes = changes[instruction.pp_rank]
        if not rank_changes or rank_changes[-1].sm_clock_mhz != sm_clocks_mhz[instruction]:
            rank_changes.append(ClockChange(instruction, 0.0, sm_clocks_mhz[instruction]))
    return tuple(tuple(rank_changes) for rank_changes in changes)


@dataclass(frozen=True, slots=True)
class SimulatedIteration:
    """What an iteration took and cost once clocks arrive late."""

    iteration_time_s: float
    energy_j: float


def simulate_switching(
    graph: DependencyGraph,
    profile: PipelineProfile,
    changes: Sequence[Sequence[ClockChange]],
    *,
    switch_latency_s: float,
    num_iterations: int = 3,
) -> SimulatedIteration:
    """Return the last of several iterations in a row, each clock effective `switch_latency_s` after it was asked for.

    An instruction in mid-flight goes on at the speed and power of the new clock. Iterations are joined by a barrier.
    Every rank starts out at the highest clock of its first instruction.
    """
    order: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    for node, instruction in enumerate(graph.instructions):
        order[instruction.pp_rank].append(node)
    asked: list[dict[Instruction, list[tuple[float, int]]]] = []
    for rank_changes in changes:
        by_instruction: dict[Instruction, list[tuple[float, int]]] = {}
        for change in rank_changes:
            by_instruction.setdefault(change.instruction, []).append((change.offset_s, change.sm_clock_mhz))
        asked.append(by_instruction)
    clocks = [
        _RankClock(profile[graph.instructions[nodes[0]].instruction_class].at_max_clock.sm_clock_mhz) if nodes else None
        for nodes in order
    ]
    result = SimulatedIteration(0.0, 0.0)
    for _ in range(num_iterations):
        finish_s = [0.0] * len(graph.instructions)
        durations_s = [0.0] * len(graph.instructions)
        energies_j = [0.0] * len(graph.instructions)
        for v in graph.topological_order:
            instruction = graph.instructions[v]
            start_s = max((finish_s[u] + latency_s for u, latency_s in graph.predecessors[v]), default=0.0)
            clock = clocks[instruction.pp_rank]
            assert clock is not None
            for offset_s, sm_clock_mhz in asked[instruction.pp_rank].get(instruction, ()):
                clock.ask(start_s + offset_s + switch_latency_s, sm_clock_mhz)
            finish_s[v], energies_j[v] = clock.run(profile[instruction.instruction_class], start_s)
            durations_s[v] = finish_s[v] - start_s
        iteration_time_s = max(finish_s)
        result = SimulatedIteration(
            iteration_time_s,
            iteration_energy_j(
                energies_j=energies_j,
                durations_s=durations_s,
                iteration_time_s=iteration_time_s,
                num_ranks=graph.num_ranks,
                blocking_power_w=profile.blocking_power_w,
            ),
        )
        for clock in clocks:
            if clock is not None:
                clock.next_iteration(iteration_time_s)
    return result


class _RankClock:
    """The clock of one simulated GPU over time; changes are asked for in program order."""

    def __init__(self, sm_clock_mhz: int) -> None:
        self._pending: list[tuple[float, int]] = []
        self._sm_clock_mhz = sm_clock_mhz

    def ask(self, effective_s: float, sm_clock_mhz: int) -> None:
        """Make a clock effective then; earlier changes that would come after it are overtaken for good."""
        self._pending = [p for p in self._pending if p[0] < effective_s]
        self._pending.append((effective_s, sm_clock_mhz))

    def next_iteration(self, iteration_time_s: float) -> None:
        """Count time from the end of an iteration on."""
        self._pending = [(effective_s - iteration_time_s, mhz) for effective_s, mhz in self._pending]

    def run(self, options: InstructionProfile, start_s: float) -> tuple[float, float]:
        """Run one instruction from `start_s`; return when it ends and the energy it took."""
        now_s, left, energy_j = start_s, 1.0, 0.0
        while True:
            while self._pending and self._pending[0][0] <= now_s:
                self._sm_clock_mhz = self._pending.pop(0)[1]
            option = options.interpolated(self._sm_clock_mhz)
            end_s = now_s + left * option.time_s
            if not self._pending or end_s <= self._pending[0][0]:
                return end_s, energy_j + left * option.energy_j
            done = (self._pending[0][0] - now_s) / option.time_s
            energy_j += done * option.energy_j
            left -= done
            now_s = self._pending[0][0]
