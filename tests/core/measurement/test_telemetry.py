"""Clock histories, energy counters and the observation of an iteration."""

from collections.abc import Mapping
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
    RankIteration,
)
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, dependency_graph, one_forward_one_backward

MS = 1_000_000


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


def test_clock_history_sorts_late_records() -> None:
    history = ClockHistory(1410)
    history.record(20, 900)
    history.record(10, 1200)

    assert list(history.clocks_between(0, 30)) == [(1410, 10), (1200, 10), (900, 10)]


@pytest.mark.fault(16)
def test_energy_across_a_counter_reset_is_missing_and_never_negative() -> None:
    counter = EnergyCounter()
    for at_ns, energy_j in [(0, 100.0), (100, 110.0), (200, 3.0), (300, 5.0)]:
        counter.record(at_ns, energy_j)

    assert counter.energy_j(0, 300) is None
    assert counter.energy_j(150, 250) is None
    assert counter.energy_j(200, 300) == pytest.approx(2.0)


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
