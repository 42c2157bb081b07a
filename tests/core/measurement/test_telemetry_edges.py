"""Clock histories, counters and observations: boundary cases."""

from collections.abc import Sequence

import pytest

from gpuenergyd.core.measurement.iteration_observation import observe_iteration
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import (
    ClockHistory,
    EnergyCounter,
    MeasuredInstruction,
    ObservedSpan,
    RankIteration,
    iteration_window,
)
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, dependency_graph, gpipe

MS = 1_000_000
F, B = InstructionKind.F, InstructionKind.B


def history(*changes: tuple[int, int]) -> ClockHistory:
    made = ClockHistory(5)
    for at_ns, clock in changes:
        made.record(at_ns, clock)
    return made


def counter(*edges: tuple[int, float]) -> EnergyCounter:
    made = EnergyCounter()
    for at_ns, energy_j in edges:
        made.record(at_ns, energy_j)
    return made


@pytest.mark.parametrize(
    ("begin_ns", "end_ns", "pieces"),
    [
        (0, 10, [(5, 10)]),  # a change takes effect at its instant and not before
        (0, 11, [(5, 10), (7, 1)]),
        (10, 20, [(7, 10)]),
        (10, 21, [(7, 10), (9, 1)]),
        (20, 30, [(9, 10)]),
        (9, 31, [(5, 1), (7, 10), (9, 11)]),
        (15, 15, []),
        (15, 14, []),
    ],
)
def test_clocks_between_two_instants(begin_ns: int, end_ns: int, pieces: list[tuple[int, int]]) -> None:
    assert list(history((10, 7), (20, 9)).clocks_between(begin_ns, end_ns)) == pieces


def test_of_two_changes_at_one_instant_the_later_record_counts() -> None:
    assert list(history((10, 7), (10, 9), (20, 11)).clocks_between(0, 30)) == [(5, 10), (9, 10), (11, 10)]


@pytest.mark.parametrize("before_ns", [0, 9, 10, 19, 20, 29, 30, 99])
def test_dropped_records_change_no_later_interval(before_ns: int) -> None:
    whole, cut = (history((10, 7), (20, 9), (30, 11)) for _ in range(2))

    cut.forget_before(before_ns)

    assert list(cut.clocks_between(before_ns, 200)) == list(whole.clocks_between(before_ns, 200))


def test_records_that_no_later_interval_needs_are_dropped() -> None:
    cut = history((10, 7), (20, 9), (30, 11))
    cut.forget_before(20)
    assert (cut._at_ns, cut._clocks_mhz, cut.initial_sm_clock_mhz) == ([20, 30], [9, 11], 7)

    cut.forget_before(29)
    assert cut._at_ns == [20, 30]
    cut.forget_before(30)
    assert (cut._at_ns, cut.initial_sm_clock_mhz) == ([30], 9)


@pytest.mark.parametrize(("before_ns", "kept"), [(5, [10, 20, 30]), (10, [10, 20, 30]), (19, [10, 20, 30]),
                                                  (20, [20, 30]), (29, [20, 30]), (30, [30]), (99, [30])])  # fmt: skip
def test_edges_that_no_later_interval_needs_are_dropped(before_ns: int, kept: list[int]) -> None:
    cut = counter((10, 1.0), (20, 2.0), (30, 4.0))

    cut.forget_before(before_ns)

    assert cut._at_ns == kept
    assert len(cut._energy_j) == len(cut._segment) == len(kept)
    if before_ns <= 20:
        assert cut.energy_j(20, 30) == 2.0


def test_an_empty_counter_drops_nothing() -> None:
    empty = EnergyCounter()
    empty.forget_before(10)

    assert not empty.covers(0)
    assert empty.energy_j(0, 0) is None


def test_energy_is_known_from_the_first_edge_to_the_last() -> None:
    seen = counter((10, 1.0), (20, 2.0), (40, 6.0))

    assert seen.energy_j(10, 40) == 5.0
    assert seen.energy_j(9, 40) is None
    assert seen.energy_j(10, 41) is None
    assert seen.energy_j(10, 10) == 0.0
    assert seen.energy_j(30, 20) is None
    assert seen.energy_j(15, 35) == pytest.approx(3.5)
    assert (seen.covers(40), seen.covers(41)) == (True, False)


def test_repeated_and_late_edges_are_ignored() -> None:
    seen = counter((10, 1.0), (20, 2.0), (20, 9.0), (15, 9.0), (30, 3.0))

    assert seen.energy_j(10, 30) == 2.0
    assert seen._at_ns == [10, 20, 30]


def test_a_decrease_of_the_counter_is_a_reset_and_a_constant_value_is_not() -> None:
    assert counter((10, 1.0), (20, 1.0), (30, 2.0)).energy_j(10, 30) == 1.0
    assert counter((10, 1.0), (20, 0.5), (30, 2.0)).energy_j(10, 30) is None


def test_energy_is_known_again_after_an_interruption() -> None:
    seen = counter((10, 1.0), (20, 2.0))
    seen.interrupt()
    for at_ns, energy_j in ((30, 3.0), (40, 4.0), (50, 5.0)):
        seen.record(at_ns, energy_j)

    assert seen.energy_j(20, 30) is None
    assert seen.energy_j(25, 26) is None
    assert seen.energy_j(30, 50) == 2.0
    assert seen.energy_j(10, 20) == 1.0


def test_the_last_iteration_ends_with_its_step_and_others_with_the_next_begin() -> None:
    one = RankIteration(0, 0, 0, 10, 50, 60, ())

    assert (iteration_window(one).begin_ns, iteration_window(one).end_ns) == (10, 60)
    assert iteration_window(RankIteration(0, 0, 0, 10, 50, 0, ())).end_ns == 50


Times = Sequence[tuple[Instruction, int, int]]
"""Instructions with begin and end in ms."""


def observed(
    *ranks: Times, clocks: ClockHistory | None = None, edges: EnergyCounter | None = None, end_ms: int = 1000
) -> tuple[IterationObservation, tuple[ObservedSpan, ...]]:
    """Return what was seen of an iteration from 10 ms on, until `end_ms`."""
    orders = tuple(tuple(i for i, _, _ in own) for own in ranks)
    reports = [
        RankIteration(r, 3, 0, 10 * MS, 999 * MS, end_ms * MS,
                      tuple(MeasuredInstruction(i, a * MS, b * MS) for i, a, b in own))
        for r, own in enumerate(ranks)
    ]  # fmt: skip
    return observe_iteration(
        ranks=reports,
        graph=dependency_graph(Schedule("seen", 9, orders)),
        clocks={r: clocks or ClockHistory(1000) for r in range(len(ranks))},
        counters={r: edges or EnergyCounter() for r in range(len(ranks))},
        plan_id="p",
        is_regular=True,
    )


def forwards(*spans_ms: tuple[int, int]) -> Times:
    return [(Instruction(0, F, m), a, b) for m, (a, b) in enumerate(spans_ms)]


def test_instructions_more_than_30_percent_above_the_median_are_outliers() -> None:
    usual = [(100, 110), (120, 130), (140, 150)]

    (kept,) = observed(forwards(*usual, (200, 213)))[0].instruction_samples
    (left_out,) = observed(forwards(*usual, (200, 214)))[0].instruction_samples

    assert [kept.count, kept.time_s] == pytest.approx([4, 0.01075])
    assert [left_out.count, left_out.time_s] == pytest.approx([3, 0.010])


def test_samples_are_grouped_by_the_main_clock() -> None:
    clocks = history((0, 1400), (108 * MS, 700), (115 * MS, 1400), (146 * MS, 700))
    observation, spans = observed(forwards((100, 110), (120, 130), (140, 150)), clocks=clocks)

    (top,) = observation.instruction_samples
    assert top.count == 3
    assert [s.sm_clock_mhz for s in top.shares] == [1400, 700]
    assert [s.time_s for s in top.shares] == pytest.approx([0.024 / 3, 0.006 / 3])
    assert [s.mean_sm_clock_mhz for s in spans] == pytest.approx([1260.0, 1400.0, 1120.0])


def test_a_repeated_clock_within_an_instruction_is_one_share() -> None:
    clocks = history((0, 1400), (103 * MS, 700), (106 * MS, 1400))

    (sample,) = observed(forwards((100, 110)), clocks=clocks)[0].instruction_samples

    assert [s.sm_clock_mhz for s in sample.shares] == [1400, 700]
    assert [s.time_s for s in sample.shares] == pytest.approx([0.007, 0.003])


def test_an_instruction_of_zero_length_is_no_sample() -> None:
    observation, spans = observed(forwards((100, 100)))

    assert observation.instruction_samples == ()
    assert spans[0].mean_sm_clock_mhz is None


def test_spans_count_from_the_begin_of_the_iteration() -> None:
    _, (span,) = observed(forwards((100, 110)))

    assert [span.start_s, span.end_s] == pytest.approx([0.090, 0.100])
    assert (span.pp_rank, span.kind, span.microbatch_index, span.chunk_index) == (0, F, 0, 0)


def test_the_window_consists_of_instructions_and_waits() -> None:
    edges = counter((0, 0.0), (2000 * MS, 2000.0))
    own = [(Instruction(0, F, 0), 100, 200), (Instruction(0, B, 0), 250, 400)]

    (rank,) = observed(own, edges=edges)[0].ranks

    assert rank.window_s == pytest.approx(0.990)
    assert rank.energy_j == pytest.approx(990.0)
    assert [(share.kind, share.sm_clock_mhz, share.chunk_index) for share in rank.time_at] == [
        (None, 1000, 0),
        (B, 1000, 0),
        (F, 1000, 0),
    ]
    assert [share.time_s for share in rank.time_at] == pytest.approx([0.740, 0.150, 0.100])


def test_instructions_that_overlap_or_leave_the_window_are_counted_once_and_inside_it() -> None:
    own = [(Instruction(0, F, 0), 5, 200), (Instruction(0, F, 1), 150, 300), (Instruction(0, B, 0), 900, 1200)]

    (rank,) = observed(own)[0].ranks

    times_s = {share.kind: share.time_s for share in rank.time_at}
    assert times_s == pytest.approx({F: 0.290, B: 0.100, None: 0.600})


def gaps(own_end_ms: int, other_end_ms: int, begin_ms: int) -> tuple[float | None, float | None]:
    """Return (latency, gap) seen at B0 of rank 0, which waits for F0 of its own and for B0 of rank 1."""
    (f0, b0), (f1, b1) = gpipe(2, 1).orders
    first = [(f0, own_end_ms - 10, own_end_ms), (b0, begin_ms, begin_ms + 10)]
    # What rank 1 waited for is neither: both of its inputs came at about the same time.
    second = [(f1, own_end_ms, other_end_ms - 5), (b1, other_end_ms - 5, other_end_ms)]
    observation, _ = observed(first, second)
    return observation.communication_latency_s, observation.launch_gap_s


def test_an_input_more_than_2_ms_late_was_waited_for() -> None:
    """F1 on rank 1 has only the other rank to wait for, and begins with its end: 0 of latency, the median of two."""
    assert gaps(100, 203, 209) == pytest.approx((0.003, 0.0))
    assert gaps(100, 102, 109) == pytest.approx((0.0, 0.0))


def test_waits_are_never_negative() -> None:
    (f0,), (f1,) = (tuple(order[:1]) for order in gpipe(2, 1).orders)

    observation, _ = observed([(f0, 100, 120)], [(f1, 115, 130)])

    assert observation.communication_latency_s == 0.0
    assert observation.launch_gap_s is None


def test_a_pipeline_of_one_rank_shows_launch_gaps_only() -> None:
    observation, _ = observed(forwards((100, 110), (113, 120), (124, 130)))

    assert observation.communication_latency_s is None
    assert observation.launch_gap_s == pytest.approx(0.0035)


def test_a_launch_gap_is_measured_where_the_input_was_ready_2_ms_earlier() -> None:
    """B0 of rank 0 waits for its own rank: 7 ms. B1 had both inputs within 2 ms: its 30 ms are neither.

    Others wait for one side only: gaps of 1, 3 and 9 ms, two latencies of 5 ms.
    """
    first = [
        (Instruction(0, F, 0), 100, 110),
        (Instruction(0, F, 1), 111, 140),
        (Instruction(0, B, 0), 147, 160),
        (Instruction(0, B, 1), 190, 200),
    ]
    second = [
        (Instruction(1, F, 0), 115, 120),
        (Instruction(1, B, 0), 123, 130),
        (Instruction(1, F, 1), 145, 146),
        (Instruction(1, B, 1), 155, 158),
    ]

    observation, _ = observed(first, second)

    assert observation.communication_latency_s == pytest.approx(0.005)
    assert observation.launch_gap_s == pytest.approx(0.005)


def test_energy_of_an_iteration_without_edges_is_missing() -> None:
    assert observed(forwards((100, 110)))[0].energy_j is None
