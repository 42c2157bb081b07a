"""Clock histories, energy counters and the observation of an iteration."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionKind,
    Schedule,
    dependency_graph,
    gpipe,
    one_forward_one_backward,
)

MS = 1_000_000
F, B = InstructionKind.F, InstructionKind.B


@given(
    changes=st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 9)), max_size=12),
    begin=st.integers(0, 1000),
    length=st.integers(0, 500),
)
def test_clock_intervals_fill_the_requested_interval(changes: list[tuple[int, int]], begin: int, length: int) -> None:
    history = ClockHistory(5)
    for at_ns, clock in changes:
        history.record(at_ns, clock)

    intervals = list(history.clocks_between(begin, begin + length))

    assert sum(ns for _, ns in intervals) == length
    assert all(ns > 0 for _, ns in intervals)


@pytest.mark.fault(16)
def test_energy_across_a_counter_reset_is_missing_and_never_negative() -> None:
    seen = counter((0, 100.0), (100, 110.0), (140, 110.0), (200, 3.0), (300, 5.0))

    assert seen.energy_j(0, 140) == 10.0  # a constant value is no reset
    assert seen.energy_j(0, 300) is None
    assert seen.energy_j(150, 250) is None
    assert seen.energy_j(200, 300) == pytest.approx(2.0)


@given(cuts=st.lists(st.integers(0, 1000), min_size=1, max_size=8))
def test_energy_adds_up_over_adjacent_windows(cuts: list[int]) -> None:
    counter = EnergyCounter()
    for step in range(11):
        counter.record(step * 100, step**2 * 1.5)
    instants = [0, *sorted(cuts), 1000]

    parts = [counter.energy_j(a, b) for a, b in pairwise(instants)]

    assert sum(part for part in parts if part is not None) == pytest.approx(150.0)


def test_communication_latency_is_measured_where_a_rank_waited() -> None:
    observation = _observe_two_ranks(begin_ms=(0, 0), f1_ms=(13, 23), next_begin_ms=(111, 111))

    assert observation.communication_latency_s == pytest.approx(0.003)
    assert observation.launch_gap_s == pytest.approx(0.001)
    assert observation.iteration_time_s == pytest.approx(0.111)


def test_a_wait_for_the_own_previous_step_is_no_communication_latency() -> None:
    """Rank 1 begins its step 40 ms after its input was there; what it takes from there is no latency either."""
    observation = _observe_two_ranks(begin_ms=(0, 45), f1_ms=(50, 60), next_begin_ms=(120, 170))

    assert observation.communication_latency_s == pytest.approx(0.003)
    assert observation.launch_gap_s == pytest.approx(0.001)


def test_turnarounds_are_measured_per_rank() -> None:
    observation = _observe_two_ranks(begin_ms=(-5, 8), f1_ms=(13, 23), next_begin_ms=(120, 70))

    assert list(observation.turnarounds_s) == pytest.approx([0.016, 0.003])
    assert observation.lead_s == pytest.approx(0.005)


def test_the_last_iteration_has_no_turnaround() -> None:
    observation = _observe_two_ranks(begin_ms=(0, 8), f1_ms=(13, 23), next_begin_ms=(0, 0))

    assert observation.turnarounds_s == (None, None)


def _observe_two_ranks(
    *, begin_ms: tuple[int, int], f1_ms: tuple[int, int], next_begin_ms: tuple[int, int]
) -> IterationObservation:
    schedule = one_forward_one_backward(2, 1)
    (f0, b0), (f1, b1) = schedule.orders
    times_ms = {f0: (0, 10), f1: f1_ms, b1: (f1_ms[1] + 1, 67), b0: (70, 104)}
    observation, _ = observe_iteration(
        ranks=[
            RankIteration(
                r,
                0,
                0,
                begin_ms[r] * MS,
                110 * MS,
                next_begin_ms[r] * MS,
                tuple(MeasuredInstruction(i, times_ms[i][0] * MS, times_ms[i][1] * MS) for i in order),
            )
            for r, order in enumerate(schedule.orders)
        ],
        graph=dependency_graph(schedule),
        clocks={0: ClockHistory(1410), 1: ClockHistory(1410)},
        counters={0: EnergyCounter(), 1: EnergyCounter()},
        plan_id="baseline",
        is_regular=True,
    )
    return observation


def _busy_s(
    durations_ms: Mapping[Instruction, int], *, clock_mhz: int = 1000, has_replicas: bool = True
) -> float | None:
    """Return what one rank's instructions take, one after another, waits for other replicas left out."""
    order = tuple(durations_ms)
    begin_ns, ran = 0, []
    for instruction, duration_ms in durations_ms.items():
        ran.append(MeasuredInstruction(instruction, begin_ns, begin_ns + duration_ms * MS))
        begin_ns += duration_ms * MS
    observation, _ = observe_iteration(
        ranks=[RankIteration(0, 0, 0, 0, begin_ns, 200 * MS, tuple(ran))],
        graph=dependency_graph(one_forward_one_backward(1, len(order) // 2)),
        clocks={0: ClockHistory(clock_mhz)},
        counters={0: EnergyCounter()},
        plan_id="p",
        is_regular=True,
        has_replicas=has_replicas,
    )
    return observation.busy_s


ORDER = one_forward_one_backward(1, 3).orders[0]


def test_an_instruction_with_a_hidden_wait_counts_with_the_median_of_its_class() -> None:
    """Forwards take 10 ms and backwards 20; the last backward reduces gradients, and waits for another replica."""
    plain = dict(zip(ORDER, (10, 20, 10, 20, 10, 20), strict=True))

    assert _busy_s(plain) == pytest.approx(0.090)
    assert _busy_s({**plain, ORDER[5]: 60}) == pytest.approx(0.090)
    assert _busy_s({**plain, ORDER[5]: 25}) == pytest.approx(0.095)  # what chance explains stays


def test_busy_time_is_unknown_without_replicas_or_with_a_missing_instruction() -> None:
    plain = dict(zip(ORDER, (10, 20, 10, 20, 10, 20), strict=True))
    other = Instruction(0, InstructionKind.F, 7)

    assert _busy_s(plain, has_replicas=False) is None
    assert _busy_s({other if one == ORDER[4] else one: ms for one, ms in plain.items()}) is None


def test_calls_are_counted_from_the_begin_of_an_interval_and_forgotten() -> None:
    history = ClockHistory(1410)
    for called_ns in (30, 10, 20):
        history.record_call(called_ns)

    assert history.num_calls_between(10, 30) == 2
    assert history.num_calls_between(11, 31) == 2
    history.forget_before(20)
    assert history.num_calls_between(0, 100) == 2


def _observe_calls(*called_ms: int, changes_ms: Mapping[int, int]) -> IterationObservation:
    history = ClockHistory(1410)
    for at_ms, clock in changes_ms.items():
        history.record(at_ms * MS, clock)
    for at_ms in called_ms:
        history.record_call(at_ms * MS)
    instructions = [
        MeasuredInstruction(Instruction(0, InstructionKind.F, k), k * 20 * MS, (k * 20 + 20) * MS) for k in (0, 1)
    ]
    observation, _ = observe_iteration(
        ranks=[RankIteration(0, 0, 0, 0, 50 * MS, 55 * MS, tuple(instructions))],
        graph=dependency_graph(one_forward_one_backward(1, 2)),
        clocks={0: history},
        counters={0: EnergyCounter()},
        plan_id=None,
        is_regular=True,
    )
    return observation


def test_an_instruction_with_a_call_shows_its_times_before_and_after_the_clock_took_effect() -> None:
    observation = _observe_calls(21, changes_ms={25: 900})

    (sample,) = observation.call_samples
    assert (sample.before.sm_clock_mhz, sample.after.sm_clock_mhz, sample.count) == (1410, 900, 1)
    assert (sample.before.time_s, sample.after.time_s) == pytest.approx((0.005, 0.015))
    assert sorted(s.num_calls for s in observation.instruction_samples) == [0.0, 1.0]


def test_a_clock_that_takes_effect_after_the_instruction_leaves_no_time_at_it() -> None:
    (sample,) = _observe_calls(1, changes_ms={}).call_samples
    assert (sample.before.time_s, sample.after.time_s) == pytest.approx((0.02, 0.0))


def test_an_instruction_with_two_calls_shows_no_price_of_one() -> None:
    assert _observe_calls(1, 5, changes_ms={8: 900}).call_samples == ()


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


def test_records_are_sorted_and_of_two_at_one_instant_the_later_counts() -> None:
    assert list(history((20, 9), (10, 7)).clocks_between(0, 30)) == [(5, 10), (7, 10), (9, 10)]
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
