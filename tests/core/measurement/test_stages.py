"""Several ranks of a stage as one: as late as the latest, as fast as the slowest, and with the energy of all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.measurement.iteration_observation import observe_iteration
from gpuenergyd.core.measurement.stages import stage_clocks, stage_energy, stage_iteration
from gpuenergyd.core.measurement.telemetry import ClockHistory, EnergyCounter, MeasuredInstruction, RankIteration
from gpuenergyd.core.pipeline.graph import dependency_graph, one_forward_one_backward

SCHEDULE = one_forward_one_backward(2, 2)
END_NS = 1000
CHANGES = st.lists(st.tuples(st.integers(0, END_NS), st.integers(1, 9)), max_size=6)
DELAYS_NS = st.lists(st.integers(0, 30), min_size=4, max_size=4)


def iteration(pp_rank: int, stage_rank: int, *, delay_ns: int = 0, next_begin_ns: int = END_NS) -> RankIteration:
    """Return instructions of 100 ns one after the other, all of them late by a delay."""
    begins_ns = [100 * k + delay_ns for k in range(4)]
    ran = zip(SCHEDULE.orders[pp_rank], begins_ns, strict=True)
    return RankIteration(
        pp_rank=pp_rank,
        iteration_index=3,
        plan_epoch=1,
        begin_ns=delay_ns,
        end_ns=400 + delay_ns,
        next_begin_ns=next_begin_ns + delay_ns if next_begin_ns else 0,
        instructions=tuple(MeasuredInstruction(own, at, at + 100) for own, at in ran),
        stage_rank=stage_rank,
    )


def history_of(changes: list[tuple[int, int]]) -> ClockHistory:
    history = ClockHistory(10)
    for at_ns, clock_mhz in changes:
        history.record(at_ns, clock_mhz)
        history.record_call(at_ns)
    return history


def test_one_rank_is_its_stage() -> None:
    own = iteration(0, 0)
    history, counter = ClockHistory(10), EnergyCounter()

    assert stage_iteration([own]) is own
    assert stage_clocks([history]) is history
    assert stage_energy([counter]) is counter


@given(delays_ns=DELAYS_NS)
def test_a_stage_is_as_late_as_its_latest_rank(delays_ns: list[int]) -> None:
    stage = stage_iteration([iteration(0, k, delay_ns=delay_ns) for k, delay_ns in enumerate(delays_ns)])

    latest = iteration(0, 0, delay_ns=max(delays_ns))
    assert stage == latest


def test_each_instruction_counts_as_the_rank_that_ended_it_last() -> None:
    early, late = iteration(0, 0), iteration(0, 1, delay_ns=5)
    longer = MeasuredInstruction(early.instructions[1].instruction, 100, 230)
    mixed = RankIteration(
        0, 3, 1, 0, 400, 0, (early.instructions[0], longer, *early.instructions[2:]), launched_iteration_index=7
    )

    stage = stage_iteration([mixed, late])

    spans = [(measured.begin_ns, measured.end_ns) for measured in stage.instructions]
    assert spans == [(5, 105), (105, 230), (230, 305), (305, 405)]  # one at a time, as on one GPU
    assert (stage.next_begin_ns, stage.launched_iteration_index) == (0, 7)


@given(first=CHANGES, second=CHANGES, begin_ns=st.integers(0, END_NS), length_ns=st.integers(0, END_NS))
def test_the_clock_of_a_stage_is_the_lowest_at_each_instant(
    first: list[tuple[int, int]], second: list[tuple[int, int]], begin_ns: int, length_ns: int
) -> None:
    histories = [history_of(first), history_of(second)]
    stage = stage_clocks(histories)

    at_each_ns = [
        clock_mhz
        for clock_mhz, duration_ns in stage.clocks_between(begin_ns, begin_ns + length_ns)
        for _ in range(duration_ns)
    ]

    of_gpus = [
        [clock for clock, ns in history.clocks_between(begin_ns, begin_ns + length_ns) for _ in range(ns)]
        for history in histories
    ]
    assert at_each_ns == [min(pair) for pair in zip(*of_gpus, strict=True)]
    num_calls = [history.num_calls_between(begin_ns, begin_ns + length_ns) for history in histories]
    assert stage.num_calls_between(begin_ns, begin_ns + length_ns) == max(num_calls)


def test_the_energy_of_a_stage_is_a_sum_that_is_unknown_if_a_part_is() -> None:
    counters = [EnergyCounter(), EnergyCounter()]
    for k, counter in enumerate(counters):
        counter.record(0, 0.0)
        counter.record(2 * END_NS, 100.0 * (k + 1))

    assert stage_energy(counters).energy_j(0, END_NS) == 150.0
    assert stage_energy([*counters, EnergyCounter()]).energy_j(0, END_NS) is None


def test_the_errors_of_the_gpus_of_a_stage_are_independent() -> None:
    counters = [EnergyCounter(1000.0) for _ in range(4)]
    for counter in counters:
        counter.record(0, 0.0)
        counter.record(10 * END_NS, 100.0)
    of_one, of_all = counters[0].estimate(0, END_NS), stage_energy(counters).estimate(0, END_NS)

    assert of_one is not None
    assert of_all is not None
    assert of_all.is_estimated
    assert of_all.energy_j == pytest.approx(4 * of_one.energy_j)
    assert of_all.high_j - of_all.energy_j == pytest.approx(2 * (of_one.high_j - of_one.energy_j))
    assert stage_energy([*counters, EnergyCounter()]).estimate(0, END_NS) is None


def test_a_policy_sees_one_observation_per_stage() -> None:
    counters = [EnergyCounter() for _ in range(4)]
    for counter in counters:
        counter.record(0, 0.0)
        counter.record(2 * END_NS, 200.0)
    ranks = [stage_iteration([iteration(pp, k, delay_ns=k) for k in range(2)]) for pp in range(2)]

    observation, spans = observe_iteration(
        ranks=ranks,
        graph=dependency_graph(SCHEDULE),
        clocks={pp: stage_clocks([ClockHistory(10), history_of([(0, 8)])]) for pp in range(2)},
        counters={pp: stage_energy(counters[2 * pp : 2 * pp + 2]) for pp in range(2)},
        plan_id="p",
        is_regular=True,
    )

    assert observation.energy_j == 400.0
    assert all(rank.is_energy_estimated for rank in observation.ranks)
    low_j, high_j = observation.estimated_range_j or (0.0, 0.0)
    first_low_j, first_high_j = observation.ranks[0].energy_range_j or (0.0, 0.0)
    assert low_j <= 400.0 <= high_j
    assert high_j - low_j == pytest.approx(math.sqrt(2) * (first_high_j - first_low_j))
    assert [rank.energy_j for rank in observation.ranks] == [200.0, 200.0]
    assert {share.sm_clock_mhz for sample in observation.instruction_samples for share in sample.shares} == {8}
    assert len(spans) == 8
