"""Observation of an iteration: times, clocks and energies, from the ranks' reports and the GPUs' samples."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from gpuenergyd.core.measurement.observation import (
    CallSample,
    ClockShare,
    InstructionSample,
    IterationObservation,
    RankEnergy,
    TimeAtClock,
)
from gpuenergyd.core.measurement.telemetry import (
    ClockIntervals,
    ClockRecord,
    EnergyRecord,
    IterationWindow,
    MeasuredInstruction,
    ObservedSpan,
    RankIteration,
    iteration_window,
)
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.timeline import makespan_s

_NS_PER_S = 1e9
_OUTLIER_RATIO = 1.3
"""An instruction that takes more than this multiple of its class's median in the iteration was disturbed."""
_ONE_CHANGE = 2
"""Number of clock intervals of an instruction during which one clock took effect."""
_WAITED_AT_LEAST_S = 0.002
"""Minimum gap before an instruction to be a wait for its input."""


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
    """Return the observation and the spans of one iteration, from one report per stage; mappings are keyed by pp_rank.

    Ranks may end an iteration after rank 0 has begun the next one, so their last instructions in the reports of the
    `previous` iteration are work in this window. A GPU's time by clock is unknown if either iteration was not timed.
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
        before = [before for before in previous if before.pp_rank == rank.pp_rank]
        energies.append(_rank_energy(rank, before, window, history, counters[rank.pp_rank]))
        spans += [_span(m, window, energy) for m, energy in zip(rank.instructions, by_instruction, strict=True)]
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
        is_timed=all(rank.is_timed for rank in ranks),
        num_tokens=max((rank.num_tokens for rank in ranks if rank.num_tokens), default=None),
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
    """Return samples of instructions during which one driver call began and at most one clock took effect."""
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
    """Return the iteration time without waits for other replicas; None if an instruction was not reported.

    Such a wait happens inside an instruction, for example in the last backward if it reduces gradients. An instruction
    with many more cycles than the median of its class is therefore given the median. Gradient communication that is
    an instruction of its own is given no time, because any excess over its usual time is a wait.
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
    previous: Sequence[RankIteration],
    window: IterationWindow,
    history: ClockRecord,
    counter: EnergyRecord,
) -> RankEnergy:
    is_known = rank.is_timed and (rank.pp_rank == 0 or all(before.is_timed for before in previous))
    period_s, phase = counter.phase(window.begin_ns) or (None, None)
    energy = counter.estimate(window.begin_ns, window.end_ns)
    return RankEnergy(
        pp_rank=rank.pp_rank,
        window_s=(window.end_ns - window.begin_ns) / _NS_PER_S,
        energy_j=None if energy is None else energy.energy_j,
        time_at=_time_at(rank, previous, window, history) if is_known else (),
        counter_period_s=period_s,
        counter_phase=phase,
        energy_range_j=None if energy is None else (energy.low_j, energy.high_j),
        is_energy_estimated=energy is not None and energy.is_estimated,
        cap=history.cap_between(window.begin_ns, window.end_ns),
    )


def _time_at(
    rank: RankIteration, previous: Sequence[RankIteration], window: IterationWindow, history: ClockRecord
) -> tuple[TimeAtClock, ...]:
    busy: dict[tuple[InstructionKind | None, int, int], int] = defaultdict(int)
    at = window.begin_ns  # work and waiting add up to the window; time outside it belongs to another iteration
    late = [measured for before in previous for measured in before.instructions]
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
    return tuple(
        TimeAtClock(kind, clock, duration_ns / _NS_PER_S, chunk)
        for (kind, chunk, clock), duration_ns in sorted(busy.items(), key=lambda i: (i[0][0] or "", *i[0][1:]))
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
    """Return the median communication latency and the median launch gap, over instructions that waited for them."""
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
    return (max(0.0, median(latencies)) if latencies else None, max(0.0, median(gaps)) if gaps else None)
