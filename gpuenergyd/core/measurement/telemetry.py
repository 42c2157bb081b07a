"""Clock histories, energy counters and the observation of an iteration from samples and reported intervals.

Instants are integer nanoseconds of the host's monotonic clock; they are arguments, no function here reads a clock.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Protocol

from gpuenergyd.core.measurement.observation import (
    CallSample,
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.reorder import RankMemory
from gpuenergyd.core.pipeline.timeline import makespan_s

ClockIntervals = Sequence[tuple[int, int]]
"""Pairs (clock in MHz, duration in ns) in order of time."""

_NS_PER_S = 1e9
_EDGES_AROUND = 10
"""Edges on either side of an instant that show the period of a counter."""
_OUTLIER_RATIO = 1.3
"""An instruction longer than this ratio of its class's median in the iteration was disturbed."""
_ONE_CHANGE = 2
"""Clock intervals of an instruction in which one clock took effect."""
_WAITED_AT_LEAST_S = 0.002
"""Minimum gap before an instruction that counts as a wait for its input."""


class ClockRecord(Protocol):
    """Effective clock over time, and the driver calls that set it: of one GPU, or of the GPUs of a stage."""

    def clocks_between(self, begin_ns: int, end_ns: int) -> ClockIntervals:
        """Return the clocks over an interval and how long each was effective."""
        ...

    def num_calls_between(self, begin_ns: int, end_ns: int) -> int:
        """Return how many driver calls began in an interval, its begin included."""
        ...


class EnergyRecord(Protocol):
    """Energy over time: of one GPU, or of the GPUs of a stage."""

    def energy_j(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the energy of an interval; None if it is unknown."""
        ...

    def phase(self, at_ns: int) -> tuple[float, float] | None:
        """Return (period of updates in s, share of it that has passed at an instant); None if unknown."""
        ...


@dataclass(slots=True)
class ClockHistory:
    """Effective clock of one GPU over time, a step function, and the driver calls that set it."""

    initial_sm_clock_mhz: int
    _at_ns: list[int] = field(default_factory=list)
    _clocks_mhz: list[int] = field(default_factory=list)
    _calls_ns: list[int] = field(default_factory=list)

    def record(self, effective_mono_ns: int, sm_clock_mhz: int) -> None:
        """Record a clock and the instant at which it took effect; records may arrive out of order."""
        position = bisect_right(self._at_ns, effective_mono_ns)
        self._at_ns.insert(position, effective_mono_ns)
        self._clocks_mhz.insert(position, sm_clock_mhz)

    def record_call(self, called_mono_ns: int) -> None:
        """Record the begin of a driver call that sets the clock; records may arrive out of order."""
        insort(self._calls_ns, called_mono_ns)

    def num_calls_between(self, begin_ns: int, end_ns: int) -> int:
        """Return how many driver calls began in an interval, its begin included."""
        return bisect_left(self._calls_ns, end_ns) - bisect_left(self._calls_ns, begin_ns)

    def clocks_between(self, begin_ns: int, end_ns: int) -> ClockIntervals:
        """Return the clocks over an interval and how long each was effective."""
        if begin_ns >= end_ns:
            return ()
        position = bisect_right(self._at_ns, begin_ns)
        clock = self._clocks_mhz[position - 1] if position else self.initial_sm_clock_mhz
        if position == len(self._at_ns) or self._at_ns[position] >= end_ns:
            return ((clock, end_ns - begin_ns),)
        intervals = []
        at = begin_ns
        while at < end_ns:
            until = min(end_ns, self._at_ns[position]) if position < len(self._at_ns) else end_ns
            if until > at:
                intervals.append((clock, until - at))
            clock = self._clocks_mhz[position] if position < len(self._at_ns) else clock
            at = until
            position += 1
        return intervals

    def forget_before(self, mono_ns: int) -> None:
        """Drop records older than an instant, except the clock effective at that instant."""
        del self._calls_ns[: bisect_left(self._calls_ns, mono_ns)]
        keep_from = bisect_right(self._at_ns, mono_ns)
        if keep_from > 1:
            self.initial_sm_clock_mhz = self._clocks_mhz[keep_from - 2]
            del self._at_ns[: keep_from - 1]
            del self._clocks_mhz[: keep_from - 1]


@dataclass(slots=True)
class EnergyCounter:
    """Edges of one GPU's energy counter: the instants at which its value changed.

    The counter moves in steps, so that only its edges carry information. A decrease is a reset (driver reload): energy
    across it is unknown.
    """

    _at_ns: list[int] = field(default_factory=list)
    _energy_j: list[float] = field(default_factory=list)
    _segment: list[int] = field(default_factory=list)
    _is_interrupted: bool = False

    def interrupt(self) -> None:
        """Treat the next edge as the start of a new count: energy across this moment is unknown."""
        self._is_interrupted = True

    def record(self, edge_mono_ns: int, total_energy_j: float) -> None:
        """Record an edge; a repeated or older one is ignored."""
        if not self._at_ns:
            self._append(edge_mono_ns, total_energy_j, 0)
        elif edge_mono_ns > self._at_ns[-1]:
            is_new_count = self._is_interrupted or total_energy_j < self._energy_j[-1]
            self._is_interrupted = False
            self._append(edge_mono_ns, total_energy_j, self._segment[-1] + is_new_count)

    def covers(self, mono_ns: int) -> bool:
        """Return whether there is an edge at or after this instant."""
        return bool(self._at_ns) and self._at_ns[-1] >= mono_ns

    def energy_j(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the energy of an interval, interpolated between edges; None if the edges do not span it."""
        if not self._at_ns or begin_ns < self._at_ns[0] or end_ns > self._at_ns[-1] or end_ns < begin_ns:
            return None
        begin, end = self._interpolate(begin_ns), self._interpolate(end_ns)
        if begin is None or end is None or begin[1] != end[1]:
            return None
        return end[0] - begin[0]

    def phase(self, at_ns: int) -> tuple[float, float] | None:
        """Return (period in s, share of it that has passed since an update); None with too few edges around.

        Not every update is seen, so the period is about the shortest time between two edges.
        """
        right = bisect_left(self._at_ns, at_ns)
        near_ns = self._at_ns[max(0, right - _EDGES_AROUND) : right + _EDGES_AROUND]
        if right == 0 or len(near_ns) < _EDGES_AROUND:
            return None
        gaps_ns = sorted(after - before for before, after in pairwise(near_ns))
        period_ns = gaps_ns[len(gaps_ns) // 10]
        return period_ns / _NS_PER_S, (at_ns - self._at_ns[right - 1]) / period_ns % 1.0

    def forget_before(self, mono_ns: int) -> None:
        """Drop edges that no interval after this instant needs."""
        keep_from = bisect_right(self._at_ns, mono_ns) - 1
        if keep_from > 0:
            for column in (self._at_ns, self._energy_j, self._segment):
                del column[:keep_from]

    def _append(self, at_ns: int, energy_j: float, segment: int) -> None:
        self._at_ns.append(at_ns)
        self._energy_j.append(energy_j)
        self._segment.append(segment)

    def _interpolate(self, at_ns: int) -> tuple[float, int] | None:
        right = bisect_left(self._at_ns, at_ns)
        if self._at_ns[right] == at_ns:
            return self._energy_j[right], self._segment[right]
        left = right - 1
        if self._segment[left] != self._segment[right]:
            return None
        share = (at_ns - self._at_ns[left]) / (self._at_ns[right] - self._at_ns[left])
        return self._energy_j[left] + share * (self._energy_j[right] - self._energy_j[left]), self._segment[left]


@dataclass(frozen=True, slots=True)
class MeasuredInstruction:
    """Begin and end of one instruction, timed by the training process."""

    instruction: Instruction
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankIteration:
    """Report of one rank on one iteration; `next_begin_ns` is 0 if there was no next iteration."""

    pp_rank: int
    iteration_index: int
    plan_epoch: int
    begin_ns: int
    end_ns: int
    next_begin_ns: int
    instructions: tuple[MeasuredInstruction, ...]
    launched_iteration_index: int = -1
    """The newest iteration that the rank's program had launched when it reported this one; -1 if unknown."""
    stage_rank: int = 0
    """Number of the rank among those of its stage."""
    memory: RankMemory | None = None
    """Memory of the rank's GPU in this iteration; None if it was not measured."""
    reorder_refusal: str = ""
    """Why the rank takes no other order any more; empty if it does."""


@dataclass(frozen=True, slots=True)
class ObservedSpan:
    """One instruction on the measured timeline, in seconds from the begin of the iteration on rank 0."""

    pp_rank: int
    kind: InstructionKind
    microbatch_index: int
    chunk_index: int
    start_s: float
    end_s: float
    mean_sm_clock_mhz: float | None


@dataclass(frozen=True, slots=True)
class IterationWindow:
    """Energy window of an iteration: from rank 0's begin to its next begin, the same for every GPU.

    A common window keeps sums exact: every joule of every GPU belongs to exactly one iteration.
    """

    begin_ns: int
    end_ns: int


def iteration_window(rank_0: RankIteration) -> IterationWindow:
    """Return the window of an iteration; the last iteration of a job ends with its step."""
    return IterationWindow(rank_0.begin_ns, rank_0.next_begin_ns or rank_0.end_ns)


def observe_iteration(
    *,
    ranks: Sequence[RankIteration],
    graph: DependencyGraph,
    clocks: Mapping[int, ClockRecord],
    counters: Mapping[int, EnergyRecord],
    plan_id: str | None,
    is_regular: bool,
    has_replicas: bool = False,
    previous: Sequence[RankIteration] = (),
) -> tuple[IterationObservation, tuple[ObservedSpan, ...]]:
    """Return the observation and the spans of one iteration, given one report per stage; maps are keyed by pp_rank.

    Ranks may end an iteration after rank 0 has begun the next one: their last instructions in the reports of the
    `previous` iteration are work in this window.
    """
    window = iteration_window(next(rank for rank in ranks if rank.pp_rank == 0))
    samples: list[InstructionSample] = []
    with_call: list[CallSample] = []
    energies: list[RankEnergy] = []
    spans: list[ObservedSpan] = []
    for rank in ranks:
        history = clocks[rank.pp_rank]
        by_instruction = [history.clocks_between(m.begin_ns, m.end_ns) for m in rank.instructions]
        num_calls = [history.num_calls_between(m.begin_ns, m.end_ns) for m in rank.instructions]
        samples += _instruction_samples(rank, by_instruction, num_calls)
        with_call += _call_samples(rank, by_instruction, num_calls)
        late = [m for before in previous if before.pp_rank == rank.pp_rank for m in before.instructions]
        energies.append(_rank_energy(rank, late, window, history, counters[rank.pp_rank]))
        spans += [_span(m, window, own) for m, own in zip(rank.instructions, by_instruction, strict=True)]
    latency_s, gap_s = _gaps(ranks, graph)
    observation = IterationObservation(
        iteration_index=ranks[0].iteration_index,
        plan_id=plan_id,
        iteration_time_s=(window.end_ns - window.begin_ns) / _NS_PER_S,
        instruction_samples=tuple(samples),
        call_samples=tuple(with_call),
        ranks=tuple(energies),
        is_regular=is_regular,
        communication_latency_s=latency_s,
        launch_gap_s=gap_s,
        turnarounds_s=tuple(_turnaround_s(rank) for rank in ranks),
        lead_s=_lead_s(next(rank for rank in ranks if rank.pp_rank == 0)),
        busy_s=_busy_s(ranks, graph, clocks) if has_replicas else None,
    )
    return observation, tuple(spans)


def _turnaround_s(rank: RankIteration) -> float | None:
    """Return the time from a rank's last instruction to its next step; None without instructions or next step."""
    if not rank.instructions or not rank.next_begin_ns:
        return None
    return (rank.next_begin_ns - max(measured.end_ns for measured in rank.instructions)) / _NS_PER_S


def _lead_s(rank: RankIteration) -> float | None:
    if not rank.instructions:
        return None
    return (min(measured.begin_ns for measured in rank.instructions) - rank.begin_ns) / _NS_PER_S


def _instruction_samples(
    rank: RankIteration, clocks: Sequence[ClockIntervals], num_calls: Sequence[int]
) -> list[InstructionSample]:
    """Return the samples of a rank's instructions, given the clock intervals and the number of calls of each."""
    groups: dict[tuple[InstructionKind, int, int], list[tuple[dict[int, int], int]]] = defaultdict(list)
    for measured, intervals, calls in zip(rank.instructions, clocks, num_calls, strict=True):
        shares: dict[int, int] = {}
        for clock, duration_ns in intervals:
            shares[clock] = shares.get(clock, 0) + duration_ns
        if shares:
            mostly = max(shares, key=shares.__getitem__)
            groups[measured.instruction.kind, measured.instruction.chunk_index, mostly].append((shares, calls))
    samples = []
    for (kind, chunk_index, _), members in sorted(groups.items()):
        typical_ns = median(sum(shares.values()) for shares, _ in members)
        kept = [(shares, calls) for shares, calls in members if sum(shares.values()) <= _OUTLIER_RATIO * typical_ns]
        total: dict[int, int] = defaultdict(int)
        for shares, _ in kept:
            for clock, duration_ns in shares.items():
                total[clock] += duration_ns
        samples.append(
            InstructionSample(
                pp_rank=rank.pp_rank,
                kind=kind,
                chunk_index=chunk_index,
                shares=tuple(
                    ClockShare(clock, duration_ns / len(kept) / _NS_PER_S)
                    for clock, duration_ns in sorted(total.items(), reverse=True)
                ),
                count=len(kept),
                num_calls=sum(calls for _, calls in kept) / len(kept),
            )
        )
    return samples


def _call_samples(rank: RankIteration, clocks: Sequence[ClockIntervals], num_calls: Sequence[int]) -> list[CallSample]:
    """Return the samples of instructions in which one call began, with at most one change of the effective clock."""
    groups: dict[tuple[InstructionKind, int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for measured, intervals, calls in zip(rank.instructions, clocks, num_calls, strict=True):
        if calls != 1 or not 0 < len(intervals) <= _ONE_CHANGE:
            continue
        before_mhz, before_ns = intervals[0]
        after_mhz, after_ns = intervals[1] if len(intervals) == _ONE_CHANGE else (before_mhz, 0)
        key = (measured.instruction.kind, measured.instruction.chunk_index, before_mhz, after_mhz)
        groups[key].append((before_ns, after_ns))
    return [
        CallSample(
            InstructionClass(rank.pp_rank, kind, chunk_index),
            ClockShare(before_mhz, median(before for before, _ in members) / _NS_PER_S),
            ClockShare(after_mhz, median(after for _, after in members) / _NS_PER_S),
            len(members),
        )
        for (kind, chunk_index, before_mhz, after_mhz), members in sorted(groups.items())
    ]


def _busy_s(ranks: Sequence[RankIteration], graph: DependencyGraph, clocks: Mapping[int, ClockRecord]) -> float | None:
    """Return the iteration time of the instructions without waits for other replicas; None if one was not reported.

    Such a wait is inside an instruction, for instance the last backward, if gradients are reduced inside it. An
    instruction with many more cycles than the median of its class counts with the median. Gradient communication that
    is an instruction of its own counts nothing: it is a wait as far as it is longer than usual.
    """
    classes: dict[InstructionClass, list[tuple[Instruction, int, float]]] = defaultdict(list)
    for rank in ranks:
        for measured in rank.instructions:
            duration_ns = measured.end_ns - measured.begin_ns
            intervals = clocks[rank.pp_rank].clocks_between(measured.begin_ns, measured.end_ns)
            cycles = sum(clock * ns for clock, ns in intervals)
            classes[measured.instruction.instruction_class].append((measured.instruction, duration_ns, cycles))
    durations_s: dict[Instruction, float] = {}
    for members in classes.values():
        typical = median(cycles for _, _, cycles in members)
        for instruction, duration_ns, own_cycles in members:
            share = typical / own_cycles if own_cycles > _OUTLIER_RATIO * typical else 1.0
            if instruction.kind.waits_for_ranks:
                share = 0.0
            durations_s[instruction] = share * duration_ns / _NS_PER_S
    if any(instruction not in durations_s for instruction in graph.instructions):
        return None
    return makespan_s(graph, [durations_s[instruction] for instruction in graph.instructions])


def _rank_energy(
    rank: RankIteration,
    late: Sequence[MeasuredInstruction],
    window: IterationWindow,
    history: ClockRecord,
    counter: EnergyRecord,
) -> RankEnergy:
    busy: dict[tuple[InstructionKind | None, int, int], int] = defaultdict(int)
    at = window.begin_ns  # work and waiting add up to the window: whatever lies outside of it belongs to another one
    for measured in sorted([*late, *rank.instructions], key=lambda m: m.begin_ns):
        begin = min(max(at, measured.begin_ns), window.end_ns)
        end = min(max(begin, measured.end_ns), window.end_ns)
        for clock, duration_ns in history.clocks_between(at, begin):
            busy[None, 0, clock] += duration_ns
        for clock, duration_ns in history.clocks_between(begin, end):
            busy[measured.instruction.kind, measured.instruction.chunk_index, clock] += duration_ns
        at = end
    for clock, duration_ns in history.clocks_between(at, window.end_ns):
        busy[None, 0, clock] += duration_ns
    period_s, phase = counter.phase(window.begin_ns) or (None, None)
    return RankEnergy(
        pp_rank=rank.pp_rank,
        window_s=(window.end_ns - window.begin_ns) / _NS_PER_S,
        energy_j=counter.energy_j(window.begin_ns, window.end_ns),
        time_at=tuple(
            TimeAtClock(kind, clock, duration_ns / _NS_PER_S, chunk)
            for (kind, chunk, clock), duration_ns in sorted(busy.items(), key=lambda i: (i[0][0] or "", *i[0][1:]))
        ),
        counter_period_s=period_s,
        counter_phase=phase,
    )


def _span(measured: MeasuredInstruction, window: IterationWindow, clocks: ClockIntervals) -> ObservedSpan:
    duration_ns = measured.end_ns - measured.begin_ns
    weighted = sum(clock * ns for clock, ns in clocks)
    instruction = measured.instruction
    return ObservedSpan(
        pp_rank=instruction.pp_rank,
        kind=instruction.kind,
        microbatch_index=instruction.microbatch_index,
        chunk_index=instruction.chunk_index,
        start_s=(measured.begin_ns - window.begin_ns) / _NS_PER_S,
        end_s=(measured.end_ns - window.begin_ns) / _NS_PER_S,
        mean_sm_clock_mhz=weighted / duration_ns if duration_ns > 0 else None,
    )


def _gaps(ranks: Sequence[RankIteration], graph: DependencyGraph) -> tuple[float | None, float | None]:
    """Return the medians (communication latency, launch gap) over the instructions that waited for either."""
    times = {m.instruction: (m.begin_ns, m.end_ns) for rank in ranks for m in rank.instructions}
    step_begin_ns = {rank.pp_rank: rank.begin_ns for rank in ranks}
    latencies: list[float] = []
    gaps: list[float] = []
    for v, instruction in enumerate(graph.instructions):
        if instruction not in times:
            continue
        begin_ns = times[instruction][0]
        own_ns = other_ns = None
        for u, _ in graph.predecessors[v]:
            before = graph.instructions[u]
            if before in times:
                if before.pp_rank == instruction.pp_rank:
                    own_ns = max(own_ns or 0, times[before][1])
                else:
                    other_ns = max(other_ns or 0, times[before][1])
        # A rank's first instruction may have waited for the end of the rank's previous step.
        free_ns = step_begin_ns[instruction.pp_rank] if own_ns is None else own_ns
        if other_ns is not None and other_ns - free_ns > _WAITED_AT_LEAST_S * _NS_PER_S:
            latencies.append((begin_ns - other_ns) / _NS_PER_S)
        elif own_ns is not None and (other_ns is None or own_ns - other_ns > _WAITED_AT_LEAST_S * _NS_PER_S):
            gaps.append((begin_ns - own_ns) / _NS_PER_S)
    return (
        max(0.0, median(latencies)) if latencies else None,
        max(0.0, median(gaps)) if gaps else None,
    )
