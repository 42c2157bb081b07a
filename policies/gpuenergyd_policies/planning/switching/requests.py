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

L is a rank's own: the longest that any raise between clocks of its plan takes. How long reductions take plays no part
in what is asked for when, only in what comes of it. The driver sets one GPU of a host at a time, so a raise may wait
for calls that set others; where that happens on the planned timeline, the rank's L grows by the longest such wait.
"""

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency, constant_latency
from gpuenergyd.core.pipeline.timeline import Span, Timeline, iteration_energy_j
from gpuenergyd_policies.planning.switching.driver_queue import QueuedClockCall, driver_waits_s

Latency = float | Sequence[SwitchLatency]
"""Seconds from asking for any clock until it is effective, or what is known of each rank's GPU."""
_QUEUE_ROUNDS = 3


def clock_changes(
    planned: Timeline,
    sm_clocks_mhz: Mapping[Instruction, int],
    *,
    latency: Latency,
    profile: PipelineProfile | None = None,
) -> tuple[tuple[ClockChange, ...], ...]:
    """Return, per rank, the clock changes that bring a plan about: raises ahead of need, reductions on begin.

    Args:
        planned: when each instruction runs if every clock is there in time.
        sm_clocks_mhz: the plan.
        latency: time from asking for a clock until it is effective.
        profile: lets the level avoid clocks that are higher yet slower; without it a higher clock counts as faster.
    """
    latencies = rank_latencies(latency, planned.num_ranks)
    spans_of = [planned.rank_spans(pp_rank) for pp_rank in range(planned.num_ranks)]
    own_s = [
        _lead_s(own, {sm_clocks_mhz[span.instruction] for span in spans})
        for own, spans in zip(latencies, spans_of, strict=True)
    ]
    leads_s = own_s
    for _ in range(_QUEUE_ROUNDS):
        changes = tuple(
            _rank_changes(
                spans, sm_clocks_mhz, iteration_time_s=planned.iteration_time_s, lead_s=lead_s, profile=profile
            )
            for spans, lead_s in zip(spans_of, leads_s, strict=True)
        )
        waits_s = _longest_raise_waits_s(spans_of, changes, latencies)
        wanted_s = [
            max(lead_s, alone_s + wait_s) for lead_s, alone_s, wait_s in zip(leads_s, own_s, waits_s, strict=True)
        ]
        if wanted_s == leads_s:
            break
        leads_s = wanted_s
    return changes


def rank_latencies(latency: Latency, num_ranks: int) -> tuple[SwitchLatency, ...]:
    """Return the latency of each rank's clock changes."""
    if isinstance(latency, Sequence):
        return tuple(latency)
    return (constant_latency(latency),) * num_ranks


def _lead_s(latency: SwitchLatency, sm_clocks_mhz: Collection[int]) -> float:
    """Return how long ahead any raise between these clocks must be asked for; the last stands in where there is none.

    One lead for all raises of a rank keeps them in order: a longer one could overtake a shorter one before it.
    """
    raises_s = [latency.late_s(low, high) for low in sm_clocks_mhz for high in sm_clocks_mhz if high > low]
    return max(raises_s, default=latency.raise_s)


def _longest_raise_waits_s(
    spans_of: Sequence[Sequence[Span]],
    changes: Sequence[Sequence[ClockChange]],
    latencies: Sequence[SwitchLatency],
) -> list[float]:
    """Return, per rank, the longest that a raise waits for calls that set other GPUs, on the planned timeline."""
    longest_s = [0.0] * len(changes)
    if not any(latency.call_s for latency in latencies):
        return longest_s
    calls: list[QueuedClockCall] = []
    for rank, (spans, own) in enumerate(zip(spans_of, changes, strict=True)):
        start_s = {span.instruction: span.start_s for span in spans}
        in_force = own[-1].sm_clock_mhz if own else 0
        for change in own:
            if change.sm_clock_mhz != in_force:
                due_s = start_s[change.instruction] + change.offset_s
                is_raise = change.sm_clock_mhz > in_force
                calls.append(QueuedClockCall(due_s, latencies[rank].call_s, rank, is_raise))
            in_force = change.sm_clock_mhz
    for call, wait_s in zip(calls, driver_waits_s(calls), strict=True):
        if call.is_raise:
            longest_s[call.gpu] = max(longest_s[call.gpu], wait_s)
    return longest_s


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
    lead_s: float,
    profile: PipelineProfile | None,
) -> tuple[ClockChange, ...]:
    if not spans:
        return ()
    levels = _levels(
        spans,
        sm_clocks_mhz,
        iteration_time_s=iteration_time_s,
        lead_s=lead_s,
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
    lead_s: float,
    profile: PipelineProfile | None,
) -> list[_Request]:
    """Return every change of the level within one period, in order; the first hangs on the first begin."""
    # A moment is (position it hangs on, offset) -> planned time until which its level must suit. At a begin the level
    # may fall, a latency ahead of a begin it may rise; leads that reach before the first begin belong to the end.
    moments = {(k, 0.0): span.start_s + lead_s for k, span in enumerate(spans)}
    first_s = spans[0].start_s
    starts_s = [span.start_s for span in spans]
    last = len(spans) - 1
    for span in spans:
        until_s = span.start_s
        if until_s - lead_s <= first_s:
            until_s += iteration_time_s
        moment_s = until_s - lead_s
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
    latency: Latency,
    num_iterations: int = 3,
) -> SimulatedIteration:
    """Return the last of several iterations in a row, each clock effective as late as is typical.

    An instruction in mid-flight goes on at the speed and power of the new clock. Iterations are joined by a barrier.
    Every rank starts out at the highest clock of its first instruction. Where calls keep the driver, the iterations
    are run again with the waits for it that the first run shows.
    """
    latencies = rank_latencies(latency, graph.num_ranks)
    result, calls = _simulated(graph, profile, changes, latencies, {}, num_iterations)
    if sum(1 for own in latencies if own.call_s) < 2:
        return result
    waits_s = driver_waits_s([call for _, call in calls])
    wait_of = {key: wait_s for (key, _), wait_s in zip(calls, waits_s, strict=True) if wait_s > 0}
    return _simulated(graph, profile, changes, latencies, wait_of, num_iterations)[0] if wait_of else result


_ChangeKey = tuple[Instruction, float]


def _simulated(
    graph: DependencyGraph,
    profile: PipelineProfile,
    changes: Sequence[Sequence[ClockChange]],
    latencies: Sequence[SwitchLatency],
    wait_of: Mapping[_ChangeKey, float],
    num_iterations: int,
) -> tuple[SimulatedIteration, list[tuple[_ChangeKey, QueuedClockCall]]]:
    """Return the last iteration, and the calls for clocks made in it."""
    order: list[list[int]] = [[] for _ in range(graph.num_ranks)]
    for node, instruction in enumerate(graph.instructions):
        order[instruction.pp_rank].append(node)
    asked: dict[Instruction, list[ClockChange]] = {}
    for change in (change for rank_changes in changes for change in rank_changes):
        asked.setdefault(change.instruction, []).append(change)
    clocks = [
        _RankClock(profile[graph.instructions[nodes[0]].instruction_class].at_max_clock.sm_clock_mhz, latency)
        if nodes
        else None
        for nodes, latency in zip(order, latencies, strict=True)
    ]
    result = SimulatedIteration(0.0, 0.0)
    calls: list[tuple[_ChangeKey, QueuedClockCall]] = []
    for _ in range(num_iterations):
        calls.clear()
        finish_s = [0.0] * len(graph.instructions)
        durations_s = [0.0] * len(graph.instructions)
        energies_j = [0.0] * len(graph.instructions)
        for v in graph.topological_order:
            instruction = graph.instructions[v]
            start_s = max((finish_s[u] + latency_s for u, latency_s in graph.predecessors[v]), default=0.0)
            clock = clocks[instruction.pp_rank]
            assert clock is not None
            for change in asked.get(instruction, ()):
                key, due_s = (instruction, change.offset_s), start_s + change.offset_s
                before_mhz = clock.ask(due_s, change.sm_clock_mhz, wait_s=wait_of.get(key, 0.0))
                if change.sm_clock_mhz != before_mhz:
                    is_raise = change.sm_clock_mhz > before_mhz
                    call_s = latencies[instruction.pp_rank].call_s
                    calls.append((key, QueuedClockCall(due_s, call_s, instruction.pp_rank, is_raise)))
            finish_s[v], energies_j[v] = clock.run(profile[instruction.instruction_class], start_s)
            durations_s[v] = finish_s[v] - start_s
        iteration_time_s = max(map(add, finish_s, graph.epilogues_s))
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
    return result, calls


class _RankClock:
    """The clock of one simulated GPU over time; changes are asked for in program order."""

    def __init__(self, sm_clock_mhz: int, latency: SwitchLatency) -> None:
        self._pending: list[tuple[float, int]] = []
        self._sm_clock_mhz = sm_clock_mhz
        self._asked_mhz = sm_clock_mhz
        self._latency = latency

    def ask(self, due_s: float, sm_clock_mhz: int, *, wait_s: float = 0.0) -> int:
        """Ask for a clock and return the one asked for before; what would come after it is overtaken for good.

        A clock that has been asked for already is not asked for again.
        """
        before_mhz, self._asked_mhz = self._asked_mhz, sm_clock_mhz
        if sm_clock_mhz != before_mhz:
            effective_s = due_s + wait_s + self._latency.typical_s(before_mhz, sm_clock_mhz)
            self._pending = [p for p in self._pending if p[0] < effective_s]
            self._pending.append((effective_s, sm_clock_mhz))
        return before_mhz

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
