"""Clock requests for a plan, timed such that a late clock costs energy but no time.

Theory of operation. A clock requested at time t takes effect at t + L. On the planned timeline, the *required clock* at
t is the lowest one that is fast enough for every instruction running in [t, t + L]: whatever is requested then is never
too slow when it takes effect. It rises L before a faster instruction begins and falls when a slower one begins, so a
raise is requested early and a reduction late. Each request is tied to the last instruction that has begun by then, as
an offset from its start.

The result is never slower than the plan. Suppose everything up to now began no later than planned. Then each request is
made no later than planned. From the planned start of an instruction on, a fast enough clock is therefore in effect,
because reductions wait for a later instruction to begin. Starting early does no harm. So the instruction ends no later
than planned, by induction over the graph. The process that makes the changes must follow one rule: a change never
overrides one that is later in program order and was requested before.

The sequence is cyclic: clocks for the first instructions are requested at the end of the previous iteration. The first
instruction always has a change of its own, so that one lost message is corrected within an iteration.

An instruction can have two changes, an immediate one and a delayed one, which replace those of the instruction before.
Delayed changes of one instruction are therefore merged into the earliest time and the highest clock. A change that
might replace a pending delayed one repeats the clock that should be in force by now.

L depends on the rank and on the target clock: it is the longest latency of raises to that clock from other clocks of
the plan. A clock with a longer L may be requested before one that is needed earlier; from then on the higher of both is
required. A request replaces one that has not taken effect, so a raise that would replace a lower one still needed
is requested in its place. The latency of reductions does not affect the timing, only the result. The driver changes
one GPU of a host at a time, so a raise may wait for calls for other GPUs; where that happens on the planned
timeline, the rank's leads grow by the longest such wait.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from statistics import mean

from gpuenergyd.core.pipeline.graph import Instruction, InstructionClass
from gpuenergyd.core.pipeline.plan import ClockChange
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency, constant_latency, region_of
from gpuenergyd.core.pipeline.timeline import Span, Timeline
from gpuenergyd_policies.planning.switching.driver_queue import QueuedClockCall, driver_waits_s

Latency = float | Sequence[SwitchLatency]
"""Time in s from any clock request until it takes effect, or the latency of each rank's GPU."""
PlannedClocks = frozenset[tuple[InstructionClass, int]]
"""Instruction classes with their planned clocks."""
_RequiredClock = Callable[[frozenset[int]], int]  # of the numbers of such pairs
_QUEUE_ROUNDS = 3


def clock_changes(
    planned: Timeline,
    sm_clocks_mhz: Mapping[Instruction, int],
    *,
    latency: Latency,
    profile: PipelineProfile | None = None,
) -> tuple[tuple[ClockChange, ...], ...]:
    """Return, per rank, the clock changes that carry out a plan: early raises, and reductions as instructions begin.

    In `planned` every clock is in effect in time. The profile identifies clocks that are higher but slower; without it,
    a higher clock is assumed to be faster.
    """
    latencies = rank_latencies(latency, planned.num_ranks)
    spans_of = planned.spans_of_ranks()
    own_leads_s = [
        raise_leads_s(own, {sm_clocks_mhz[span.instruction] for span in spans})
        for own, spans in zip(latencies, spans_of, strict=True)
    ]
    # The same groups of instructions recur within an iteration, on all ranks and in all rounds.
    number_of: dict[tuple[InstructionClass, int], int] = {}
    numbers_of = [
        [number_of.setdefault((i.instruction_class, sm_clocks_mhz[i]), len(number_of)) for i in instructions]
        for instructions in ([span.instruction for span in spans] for spans in spans_of)
    ]
    entries = list(number_of)

    @cache
    def required_clock(numbers: frozenset[int]) -> int:
        return fast_enough_clock(frozenset(entries[number] for number in numbers), profile)

    waits_s = [0.0] * planned.num_ranks
    for _ in range(_QUEUE_ROUNDS):
        changes = tuple(
            _rank_changes(
                spans,
                numbers,
                [entries[number][1] for number in numbers],
                iteration_time_s=planned.iteration_time_s,
                leads_s={clock: lead_s + wait_s for clock, lead_s in own.items()},
                required_clock=required_clock,
            )
            for spans, numbers, own, wait_s in zip(spans_of, numbers_of, own_leads_s, waits_s, strict=True)
        )
        wanted_s = [*map(max, waits_s, longest_raise_waits_s(spans_of, changes, latencies))]
        if wanted_s == waits_s:
            break
        waits_s = wanted_s
    return changes


def rank_latencies(latency: Latency, num_ranks: int) -> tuple[SwitchLatency, ...]:
    """Return the latency of each rank's clock changes."""
    if isinstance(latency, Sequence):
        return tuple(latency)
    return (constant_latency(latency),) * num_ranks


def longest_lead_s(latency: SwitchLatency, sm_clocks_mhz: Collection[int]) -> float:
    """Return the longest lead with which raises between these clocks are requested.

    A plan without raises uses the general latency of raises.
    """
    return max(raise_leads_s(latency, sm_clocks_mhz).values(), default=max(latency.stall_s, latency.raise_s))


def raise_leads_s(latency: SwitchLatency, sm_clocks_mhz: Collection[int]) -> dict[int, float]:
    """Return how far ahead each of these clocks is requested, if it is a raise from another one.

    The lead is at least the stall of a call, which must be over when the faster instruction begins. The lowest clock
    is never the target of a raise and gets the longest lead of the others.
    """
    ordered = sorted(sm_clocks_mhz)
    # A latency depends on the region of the clock before, not on the clock.
    lowest_of = {region_of(clock, latency.max_sm_clock_mhz): clock for clock in reversed(ordered)}
    leads_s = {
        high: max(latency.stall_s, *(latency.late_s(low, high) for low in lowest_of.values() if low < high))
        for k, high in enumerate(ordered)
        if k
    }
    longest_s = max(leads_s.values(), default=max(latency.stall_s, latency.raise_s))
    return dict.fromkeys(ordered[:1], longest_s) | leads_s


def longest_raise_waits_s(
    spans_of: Sequence[Sequence[Span]], changes: Sequence[Sequence[ClockChange]], latencies: Sequence[SwitchLatency]
) -> list[float]:
    """Return, per rank, the longest wait of a raise for other driver calls on its host, on the planned timeline."""
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
                latency = latencies[rank]
                calls.append(QueuedClockCall(due_s, latency.call_s, rank, is_raise, latency.num_calls, latency.host))
            in_force = change.sm_clock_mhz
    for call, wait_s in zip(calls, driver_waits_s(calls), strict=True):
        if call.is_raise:
            longest_s[call.stage] = max(longest_s[call.stage], wait_s)
    return longest_s


def expected_late_s(
    changes: Sequence[Sequence[ClockChange]], profile: PipelineProfile, latencies: Sequence[SwitchLatency]
) -> float:
    """Return the time that an iteration is expected to lose to raises that take much longer than their lead.

    The lead of a raise is its late (90th percentile) latency. Beyond it, the distribution has a long tail on some GPUs
    (arXiv 2502.20075): until such a raise takes effect, instructions run at the previous clock. Every raise adds the
    mean excess times its relative speed-up, as if no rank had slack, so this is an upper estimate.
    """
    late_s = 0.0
    for pp_rank, (own, latency) in enumerate(zip(changes, latencies, strict=True)):
        if not latency.excess_s:
            continue
        classes = [profile[key] for key in profile.classes if key.pp_rank == pp_rank]
        before_mhz = own[-1].sm_clock_mhz if own else 0
        for change in own:
            if change.sm_clock_mhz > before_mhz:
                speeds = [
                    c.interpolated(change.sm_clock_mhz).time_s / c.interpolated(before_mhz).time_s for c in classes
                ]
                late_s += latency.excess_s * max(0.0, 1 - mean(speeds))
            before_mhz = change.sm_clock_mhz
    return late_s


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """Request for a clock `offset_s` after the start of the instruction at this position in the rank's order."""

    position: int
    offset_s: float
    sm_clock_mhz: int


def _rank_changes(
    spans: Sequence[Span],
    numbers: Sequence[int],
    sm_clocks_mhz: Sequence[int],
    *,
    iteration_time_s: float,
    leads_s: Mapping[int, float],
    required_clock: _RequiredClock,
) -> tuple[ClockChange, ...]:
    if not spans:
        return ()
    requests = _required_clocks(
        spans,
        numbers,
        iteration_time_s=iteration_time_s,
        leads_s=leads_without_replaced_raises_s(spans, sm_clocks_mhz, leads_s, iteration_time_s=iteration_time_s),
        required_clock=required_clock,
    )
    return tuple(
        ClockChange(spans[request.position].instruction, request.offset_s, request.sm_clock_mhz)
        for request in merge_per_instruction(requests)
    )


def _required_clocks(
    spans: Sequence[Span],
    numbers: Sequence[int],
    *,
    iteration_time_s: float,
    leads_s: Sequence[float],
    required_clock: _RequiredClock,
) -> list[TimedRequest]:
    """Return every change of the required clock within one period, in order; the first is tied to the first start.

    `numbers`, of class and planned clock, and `leads_s` are in the order of the spans.
    """
    # Moments map (position, offset) to planned time. The required clock may fall when an instruction begins, and rise
    # one lead before; leads that reach before the first start belong to the end of the previous iteration. A moment
    # after the end of the last instruction is tied to that end and keeps its time.
    moments = {(k, 0.0): span.start_s for k, span in enumerate(spans)}
    first_s = spans[0].start_s
    starts_s = [span.start_s for span in spans]
    last = len(spans) - 1
    for span, lead_s in zip(spans, leads_s, strict=True):
        needed_s = span.start_s
        if needed_s - lead_s <= first_s:
            needed_s += iteration_time_s
        moment_s = needed_s - lead_s
        if moment_s <= first_s:
            continue
        position = bisect_right(starts_s, moment_s) - 1
        offset_s = moment_s - starts_s[position]
        if position == last:
            offset_s = min(offset_s, spans[last].duration_s)
        moments[position, offset_s] = max(moment_s, moments.get((position, offset_s), 0.0))
    requested_by = RequestedBy(starts_s, leads_s, iteration_time_s=iteration_time_s)
    requests: list[TimedRequest] = []
    in_force: int | None = None
    for (at, offset_s), moment_s in sorted(moments.items()):
        required_mhz = required_clock(frozenset([numbers[k] for k in requested_by.positions(at, moment_s)]))
        if required_mhz != in_force:
            requests.append(TimedRequest(at, offset_s, required_mhz))
            in_force = required_mhz
    return requests


def leads_without_replaced_raises_s(
    spans: Sequence[Span], sm_clocks_mhz: Sequence[int], leads_s: Mapping[int, float], *, iteration_time_s: float
) -> list[float]:
    """Return the lead of each position, such that no raise is replaced by a higher one before it takes effect.

    A higher clock that would be requested while a lower raise is still pending is requested together with it.
    """
    n = len(spans)
    found_s = [leads_s[clock] for clock in sm_clocks_mhz]
    longest_s = max(found_s)
    for k in range(n - 1, -1, -1):
        needed_s = spans[k].start_s
        if sm_clocks_mhz[k] <= sm_clocks_mhz[k - 1]:
            continue  # not a raise
        for at in range(k + 1, k + n):
            j = at % n
            start_s = spans[j].start_s + (iteration_time_s if at >= n else 0.0)
            if start_s - longest_s >= needed_s:
                break
            requested_s = start_s - found_s[j]
            if sm_clocks_mhz[j] > sm_clocks_mhz[k] and needed_s - found_s[k] < requested_s < needed_s:
                was_longest = found_s[j] == longest_s
                found_s[j] = start_s - needed_s + leads_s[sm_clocks_mhz[j]]
                longest_s = max(found_s) if was_longest else max(longest_s, found_s[j])
    return found_s


class RequestedBy:
    """Which instructions of a rank must have been requested by a moment, continuing into the next iteration."""

    def __init__(self, starts_s: Sequence[float], leads_s: Sequence[float], *, iteration_time_s: float) -> None:
        self._num_instructions, longest_s = len(starts_s), max(leads_s)
        both_s = [*starts_s, *(start_s + iteration_time_s for start_s in starts_s)]
        self._earliest_s = [start_s - longest_s for start_s in both_s]  # with a lead as long as the longest
        self._requested_s = [start_s - lead_s for start_s, lead_s in zip(both_s, [*leads_s, *leads_s], strict=True)]

    def positions(self, first: int, moment_s: float) -> list[int]:
        """Return the positions from `first` on whose lead has begun at a moment."""
        n, positions = self._num_instructions, [first]
        for k in range(first + 1, first + n):
            if self._earliest_s[k] > moment_s:
                break
            if self._requested_s[k] <= moment_s:
                positions.append(k % n)
        return positions


def fast_enough_clock(planned: PlannedClocks, profile: PipelineProfile | None) -> int:
    """Return the lowest clock at which each of the instructions is at least as fast as planned."""
    at_least_mhz = max(planned_mhz for _, planned_mhz in planned)
    if profile is None or len(planned) == 1:
        return at_least_mhz

    def worst_stretch(sm_clock_mhz: int) -> float:
        return max(
            profile[key].interpolated(sm_clock_mhz).time_s / profile[key].interpolated(planned_mhz).time_s
            for key, planned_mhz in planned
        )

    candidates = sorted({o.sm_clock_mhz for key, _ in planned for o in profile[key].options})
    if at_least_mhz in candidates and worst_stretch(at_least_mhz) <= 1.0:
        return at_least_mhz  # the usual case: no other clock has to be checked
    fast_enough = [c for c in candidates if worst_stretch(c) <= 1.0]
    return min(fast_enough) if fast_enough else min(candidates, key=worst_stretch)


def merge_per_instruction(requests: Sequence[TimedRequest]) -> list[TimedRequest]:
    """Keep at most one immediate and one delayed request per instruction; earlier and higher is always safe."""
    result: list[TimedRequest] = []
    for position, group in groupby(requests, key=lambda request: request.position):
        own = list(group)
        now = [request for request in own if request.offset_s <= 0.0]
        later = [request for request in own if request.offset_s > 0.0]
        if later and not now and result and result[-1].offset_s > 0.0:
            now = [TimedRequest(position, 0.0, result[-1].sm_clock_mhz)]
        result += now
        if later:
            result.append(TimedRequest(position, later[0].offset_s, later[-1].sm_clock_mhz))
    return result
