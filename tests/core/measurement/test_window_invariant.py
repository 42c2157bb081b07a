"""Work and waiting of a rank add up to the window of the iteration, wherever its instructions lie."""

from collections import defaultdict
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.iteration_observation import observe_iteration
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import ClockHistory, EnergyCounter, MeasuredInstruction, RankIteration
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, dependency_graph

MS = 1_000_000
WINDOW_MS = 1000

spans_ms = st.lists(st.tuples(st.integers(-400, 1400), st.integers(0, 600)), min_size=1, max_size=8)
clock_changes_ms = st.lists(st.tuples(st.integers(-200, 1200), st.sampled_from([600, 900, 1200])), max_size=6)


def observed(spans: list[tuple[int, int]], changes: list[tuple[int, int]]) -> IterationObservation:
    instructions = tuple(Instruction(0, InstructionKind.F, m) for m in range(len(spans)))
    history = ClockHistory(1410)
    for at_ms, sm_clock_mhz in changes:
        history.record((10_000 + at_ms) * MS, sm_clock_mhz)
    begin_ns = 10_000 * MS
    ran = tuple(
        MeasuredInstruction(i, begin_ns + at * MS, begin_ns + (at + took) * MS)
        for i, (at, took) in zip(instructions, sorted(spans), strict=True)
    )
    rank = RankIteration(0, 0, 0, begin_ns, begin_ns + WINDOW_MS * MS, begin_ns + WINDOW_MS * MS, ran)
    return observe_iteration(
        ranks=[rank],
        graph=dependency_graph(Schedule("any", len(spans), (instructions,))),
        clocks={0: history},
        counters={0: EnergyCounter()},
        plan_id="p",
        is_regular=True,
    )[0]


@given(spans_ms, clock_changes_ms)
def test_work_and_waiting_add_up_to_the_window(spans: list[tuple[int, int]], changes: list[tuple[int, int]]) -> None:
    energy = observed(spans, changes).ranks[0]

    assert round(sum(share.time_s for share in energy.time_at) * 1e9) == WINDOW_MS * MS
    assert all(share.time_s >= 0 for share in energy.time_at)


@given(spans_ms)
def test_work_is_the_time_covered_by_instructions_inside_the_window(spans: list[tuple[int, int]]) -> None:
    worked_s = sum(share.time_s for share in observed(spans, []).ranks[0].time_at if share.kind is not None)
    covered = {ms for at, took in spans for ms in range(max(0, at), min(WINDOW_MS, at + took))}

    assert abs(worked_s - len(covered) / 1000) < 1e-9


def test_work_of_the_previous_iteration_after_rank_0_went_on_belongs_to_this_window() -> None:
    """Rank 1 ends its iteration 0.3 s after rank 0 has begun the next one."""
    order = (Instruction(1, InstructionKind.F, 0),)
    begin_ns = 10_000 * MS
    before = RankIteration(
        1, 0, 0, begin_ns - 1000 * MS, begin_ns, begin_ns + 300 * MS,
        (MeasuredInstruction(order[0], begin_ns - 400 * MS, begin_ns + 300 * MS),),
    )  # fmt: skip
    first = Instruction(0, InstructionKind.F, 0)
    own = {
        0: MeasuredInstruction(first, begin_ns, begin_ns + 500 * MS),
        1: MeasuredInstruction(order[0], begin_ns + 500 * MS, begin_ns + 900 * MS),
    }
    ranks = [
        RankIteration(rank, 1, 0, begin_ns, begin_ns + 1000 * MS, begin_ns + 1000 * MS, (ran,))
        for rank, ran in own.items()
    ]
    observation, unknown = (
        observe_iteration(
            ranks=ranks,
            graph=dependency_graph(Schedule("any", 1, ((first,), order))),
            clocks={0: ClockHistory(1410), 1: ClockHistory(1410)},
            counters={0: EnergyCounter(), 1: EnergyCounter()},
            plan_id="p",
            is_regular=True,
            previous=[previous],
        )[0]
        for previous in (before, replace(before, instructions=(), is_in_order=True))
    )

    by_kind = {share.kind: share.time_s for share in observation.ranks[1].time_at}
    assert by_kind == pytest.approx({InstructionKind.F: 0.7, None: 0.3})
    assert unknown.is_timed
    assert unknown.ranks[0].time_at == observation.ranks[0].time_at
    assert unknown.ranks[1].time_at == ()  # what it still did for the iteration before was not timed


def test_an_untimed_iteration_has_its_time_and_energy_and_nothing_of_its_instructions() -> None:
    begin_ns = 10_000 * MS
    counter = EnergyCounter()
    for k in range(3):
        counter.record(begin_ns + (k - 1) * 1000 * MS, 100.0 * k)
    first = Instruction(0, InstructionKind.F, 0)
    rank = RankIteration(0, 0, 0, begin_ns, begin_ns + 900 * MS, begin_ns + 1000 * MS, (), is_in_order=True)
    seen, spans = observe_iteration(
        ranks=[rank],
        graph=dependency_graph(Schedule("any", 1, ((first,),))),
        clocks={0: ClockHistory(1410)},
        counters={0: counter},
        plan_id="p",
        is_regular=True,
        has_replicas=True,
    )

    assert (seen.iteration_time_s, seen.energy_j, seen.is_own, seen.is_timed) == (1.0, 100.0, True, False)
    assert (seen.instruction_samples, seen.call_samples, seen.ranks[0].time_at, spans) == ((), (), (), ())
    assert {seen.lead_s, seen.busy_s, seen.launch_gap_s, seen.communication_latency_s, *seen.turnarounds_s} == {None}


def test_a_program_300_ms_ahead_of_its_gpu_books_neither_too_little_work_nor_waiting_twice() -> None:
    """Instructions that end after the window: 0.62 s of them lie inside it, in three pieces."""
    by_kind: dict[bool, float] = defaultdict(float)
    for share in observed([(300, 200), (520, 220), (760, 400), (1200, 100)], []).ranks[0].time_at:
        by_kind[share.kind is not None] += share.time_s

    assert abs(by_kind[True] - 0.66) < 1e-9
    assert abs(by_kind[False] - 0.34) < 1e-9
