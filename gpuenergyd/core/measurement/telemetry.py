"""Samples and intervals of one job put together: clock histories, energy counters, and the observation of an iteration.

Instants are integer nanoseconds of the host's monotonic clock, given by whoever measured; nothing here reads a clock.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from gpuenergyd.core.measurement.observation import (
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.timeline import makespan_s

Pieces = Sequence[tuple[int, int]]
"""Clocks in MHz and for how many ns each, in order of time."""

_NS_PER_S = 1e9
_OUTLIER_RATIO = 1.3
"""An instruction this much longer than its like in the same iteration was disturbed by something else."""
_WAITED_AT_LEAST_S = 0.002
"""A gap longer than this before an instruction means that it waited for its input."""


@dataclass(slots=True)
class ClockHistory:
    """The clock in force on one GPU over time: a step function, extended at its end."""

    initial_sm_clock_mhz: int
    _at_ns: list[int] = field(default_factory=list)
    _clocks_mhz: list[int] = field(default_factory=list)

    def record(self, effective_mono_ns: int, sm_clock_mhz: int) -> None:
        """Note that a clock took effect; what arrives out of order is put where it belongs."""
        position = bisect_right(self._at_ns, effective_mono_ns)
        self._at_ns.insert(position, effective_mono_ns)
        self._clocks_mhz.insert(position, sm_clock_mhz)

    def pieces(self, begin_ns: int, end_ns: int) -> Pieces:
        """Return the clocks over an interval."""
        if begin_ns >= end_ns:
            return ()
        position = bisect_right(self._at_ns, begin_ns)
        clock = self._clocks_mhz[position - 1] if position else self.initial_sm_clock_mhz
        if position == len(self._at_ns) or self._at_ns[position] >= end_ns:
            return ((clock, end_ns - begin_ns),)
        pieces = []
        at = begin_ns
        while at < end_ns:
            until = min(end_ns, self._at_ns[position]) if position < len(self._at_ns) else end_ns
            if until > at:
                pieces.append((clock, until - at))
            clock = self._clocks_mhz[position] if position < len(self._at_ns) else clock
            at = until
            position += 1
        return pieces

    def forget_before(self, mono_ns: int) -> None:
        """Drop what is older than an instant, keeping the clock in force at it."""
        keep_from = bisect_right(self._at_ns, mono_ns)
        if keep_from > 1:
            self.initial_sm_clock_mhz = self._clocks_mhz[keep_from - 2]
            del self._at_ns[: keep_from - 1]
            del self._clocks_mhz[: keep_from - 1]


@dataclass(slots=True)
class EnergyCounter:
    """Edges of one GPU's energy counter: the instants at which its value was seen to change.

    A counter moves in steps, so only its edges carry information. A decrease is a new count (driver reload):
    no energy is taken across it.
    """

    _at_ns: list[int] = field(default_factory=list)
    _energy_j: list[float] = field(default_factory=list)
    _segment: list[int] = field(default_factory=list)
    _is_interrupted: bool = False

    def begin_anew(self) -> None:
        """Take no energy across this moment, whatever the counter says: nobody was counting."""
        self._is_interrupted = True

    def record(self, edge_mono_ns: int, total_energy_j: float) -> None:
        """Note an edge; a repeated one changes nothing."""
        if not self._at_ns:
            self._append(edge_mono_ns, total_energy_j, 0)
        elif edge_mono_ns > self._at_ns[-1]:
            is_new_count = self._is_interrupted or total_energy_j < self._energy_j[-1]
            self._is_interrupted = False
            self._append(edge_mono_ns, total_energy_j, self._segment[-1] + is_new_count)

    def covers(self, mono_ns: int) -> bool:
        """Return whether an edge at or after this instant has been seen."""
        return bool(self._at_ns) and self._at_ns[-1] >= mono_ns

    def energy_j(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the energy of an interval, interpolated between edges; None when the edges do not span it."""
        if not self._at_ns or begin_ns < self._at_ns[0] or end_ns > self._at_ns[-1] or end_ns < begin_ns:
            return None
        begin, end = self._interpolate(begin_ns), self._interpolate(end_ns)
        if begin is None or end is None or begin[1] != end[1]:
            return None
        return end[0] - begin[0]

    def forget_before(self, mono_ns: int) -> None:
        """Drop edges that no interval from this instant on can need."""
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
    """One instruction as a training process timed it."""

    instruction: Instruction
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankIteration:
    """What one rank reported of one iteration; `next_begin_ns` 0 when there was no next iteration."""

    pp_rank: int
    iteration_index: int
    plan_epoch: int
    begin_ns: int
    end_ns: int
    next_begin_ns: int
    instructions: tuple[MeasuredInstruction, ...]


@dataclass(frozen=True, slots=True)
class ObservedSpan:
    """One instruction on the measured timeline; seconds count from the begin of the iteration on rank 0."""

    pp_rank: int
    kind: InstructionKind
    microbatch_index: int
    chunk_index: int
    start_s: float
    end_s: float
    mean_sm_clock_mhz: float | None


@dataclass(frozen=True, slots=True)
class IterationWindow:
    """One iteration of all ranks: rank 0's begin to rank 0's next begin, the same window for every GPU.

    One window for all keeps the sum exact: every joule of every GPU falls into exactly one iteration.
    """

    begin_ns: int
    end_ns: int


def iteration_window(rank_0: RankIteration) -> IterationWindow:
    """Return the window of an iteration; the last one of a job ends with its step."""
    return IterationWindow(rank_0.begin_ns, rank_0.next_begin_ns or rank_0.end_ns)


def observe_iteration(
    *,
    ranks: Sequence[RankIteration],
    graph: DependencyGraph,
    clocks: Mapping[int, ClockHistory],
    counters: Mapping[int, EnergyCounter],
    plan_id: str | None,
    is_regular: bool,
    has_replicas: bool = False,
) -> tuple[IterationObservation, tuple[ObservedSpan, ...]]:
    """Put together what all ranks and their GPUs showed in one iteration; maps are keyed by pp_rank."""
    window = iteration_window(next(rank for rank in ranks if rank.pp_rank == 0))
    samples: list[InstructionSample] = []
    energies: list[RankEnergy] = []
    spans: list[ObservedSpan] = []
    for rank in ranks:
        history = clocks[rank.pp_rank]
        pieces = [history.pieces(measured.begin_ns, measured.end_ns) for measured in rank.instructions]
        samples += _instruction_samples(rank, pieces)
        energies.append(_rank_energy(rank, window, history, counters[rank.pp_rank]))
        spans += [_span(measured, window, of_it) for measured, of_it in zip(rank.instructions, pieces, strict=True)]
    latency_s, gap_s = _gaps(ranks, graph)
    observation = IterationObservation(
        iteration_index=ranks[0].iteration_index,
        plan_id=plan_id,
        iteration_time_s=(window.end_ns - window.begin_ns) / _NS_PER_S,
        instruction_samples=tuple(samples),
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
    """Return the time from a rank's last instruction to its next step, None where there was none of either."""
    if not rank.instructions or not rank.next_begin_ns:
        return None
    return (rank.next_begin_ns - max(measured.end_ns for measured in rank.instructions)) / _NS_PER_S


def _lead_s(rank: RankIteration) -> float | None:
    if not rank.instructions:
        return None
    return (min(measured.begin_ns for measured in rank.instructions) - rank.begin_ns) / _NS_PER_S


def _instruction_samples(rank: RankIteration, pieces: Sequence[Pieces]) -> list[InstructionSample]:
    """Return the samples of a rank's instructions; `pieces` are the clocks of each."""
    groups: dict[tuple[InstructionKind, int, int], list[dict[int, int]]] = defaultdict(list)
    for measured, of_it in zip(rank.instructions, pieces, strict=True):
        shares: dict[int, int] = {}
        for clock, duration_ns in of_it:
            shares[clock] = shares.get(clock, 0) + duration_ns
        if shares:
            mostly = max(shares, key=shares.__getitem__)
            groups[measured.instruction.kind, measured.instruction.chunk_index, mostly].append(shares)
    samples = []
    for (kind, chunk_index, _), members in sorted(groups.items()):
        typical_ns = median(sum(shares.values()) for shares in members)
        kept = [shares for shares in members if sum(shares.values()) <= _OUTLIER_RATIO * typical_ns]
        total: dict[int, int] = defaultdict(int)
        for shares in kept:
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
            )
        )
    return samples


def _busy_s(ranks: Sequence[RankIteration], graph: DependencyGraph, clocks: Mapping[int, ClockHistory]) -> float | None:
    """Return how long the instructions would take if no rank waited for its likes in other replicas.

    Such a wait hides in one instruction, the last backward for instance, when gradients are reduced inside it: what
    takes many more cycles than its likes counts as long as they are. None when an instruction was not reported.
    """
    classes: dict[InstructionClass, list[tuple[Instruction, int, float]]] = defaultdict(list)
    for rank in ranks:
        for measured in rank.instructions:
            duration_ns = measured.end_ns - measured.begin_ns
            pieces = clocks[rank.pp_rank].pieces(measured.begin_ns, measured.end_ns)
            cycles = sum(clock * ns for clock, ns in pieces)
            classes[measured.instruction.instruction_class].append((measured.instruction, duration_ns, cycles))
    durations_s: dict[Instruction, float] = {}
    for members in classes.values():
        typical = median(cycles for _, _, cycles in members)
        for instruction, duration_ns, own_cycles in members:
            share = typical / own_cycles if own_cycles > _OUTLIER_RATIO * typical else 1.0
            durations_s[instruction] = share * duration_ns / _NS_PER_S
    if any(instruction not in durations_s for instruction in graph.instructions):
        return None
    return makespan_s(graph, [durations_s[instruction] for instruction in graph.instructions])


def _rank_energy(
    rank: RankIteration, window: IterationWindow, history: ClockHistory, counter: EnergyCounter
) -> RankEnergy:
    busy: dict[tuple[InstructionKind | None, int, int], int] = defaultdict(int)
    at = window.begin_ns
    for measured in sorted(rank.instructions, key=lambda m: m.begin_ns):
        begin, end = max(at, measured.begin_ns), min(window.end_ns, measured.end_ns)
        if begin > at:
            for clock, duration_ns in history.pieces(at, begin):
                busy[None, 0, clock] += duration_ns
        for clock, duration_ns in history.pieces(begin, end):
            busy[measured.instruction.kind, measured.instruction.chunk_index, clock] += duration_ns
        at = max(at, end)
    for clock, duration_ns in history.pieces(at, window.end_ns):
        busy[None, 0, clock] += duration_ns
    return RankEnergy(
        pp_rank=rank.pp_rank,
        window_s=(window.end_ns - window.begin_ns) / _NS_PER_S,
        energy_j=counter.energy_j(window.begin_ns, window.end_ns),
        time_at=tuple(
            TimeAtClock(kind, clock, duration_ns / _NS_PER_S, chunk)
            for (kind, chunk, clock), duration_ns in sorted(busy.items(), key=lambda i: (i[0][0] or "", *i[0][1:]))
        ),
    )


def _span(measured: MeasuredInstruction, window: IterationWindow, pieces: Pieces) -> ObservedSpan:
    duration_ns = measured.end_ns - measured.begin_ns
    weighted = sum(clock * ns for clock, ns in pieces)
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
    """Return (communication latency, launch gap): medians over the instructions that show one or the other."""
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
        # A rank's first instruction may have waited for the end of the rank's own step before.
        free_ns = step_begin_ns[instruction.pp_rank] if own_ns is None else own_ns
        if other_ns is not None and other_ns - free_ns > _WAITED_AT_LEAST_S * _NS_PER_S:
            latencies.append((begin_ns - other_ns) / _NS_PER_S)
        elif own_ns is not None and (other_ns is None or own_ns - other_ns > _WAITED_AT_LEAST_S * _NS_PER_S):
            gaps.append((begin_ns - own_ns) / _NS_PER_S)
    return (
        max(0.0, median(latencies)) if latencies else None,
        max(0.0, median(gaps)) if gaps else None,
    )
