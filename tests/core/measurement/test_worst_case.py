"""The worst case of a plan: what its clocks may cost an iteration, as far as nothing better was measured."""

import pytest

from gpuenergyd.core.measurement.observation import ClockShare, InstructionSample, IterationObservation
from gpuenergyd.core.measurement.worst_case import ClockTimes, RankSpeed, WorstCase
from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionClass,
    InstructionKind,
    dependency_graph,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose, RankClocks

F, B = InstructionKind.F, InstructionKind.B
SCHEDULE = one_forward_one_backward(2, 4)
TIMES_S = {(0, F): 0.05, (0, B): 0.1, (1, F): 0.1, (1, B): 0.2}


def seen(*samples: tuple[int, InstructionKind, int, float]) -> IterationObservation:
    own = tuple(InstructionSample(rank, kind, (ClockShare(mhz, time_s),), 4) for rank, kind, mhz, time_s in samples)
    return IterationObservation(0, "p", 1.0, own, ())


def worst_case(*measured: tuple[int, InstructionKind, int, float], latency_s: float = 0.0) -> WorstCase:
    times = ClockTimes()
    times.add(seen(*((rank, kind, 1400, own) for (rank, kind), own in TIMES_S.items())), is_full_speed=True)
    times.add(seen(*measured), is_full_speed=False)
    return WorstCase(dependency_graph(SCHEDULE), times, [RankSpeed(1400, latency_s, 400.0)] * 2, 1.35)


def plan(*clocks_mhz: int, only: Instruction | None = None, watts: float | None = None) -> ClockPlan:
    """Return one clock for each rank, or for a single instruction of it."""
    ranks = []
    for rank, (order, mhz) in enumerate(zip(SCHEDULE.orders, clocks_mhz, strict=True)):
        clocks = tuple(mhz if only in {None, one} else 1400 for one in order)
        changes = tuple(ClockChange(one, 0.0, own) for one, own in zip(order, clocks, strict=True))
        ranks.append(RankClocks(rank, clocks, changes, watts))
    return ClockPlan("p", PlanPurpose.TRIAL, tuple(ranks))


def test_at_the_top_clock_nothing_is_lost() -> None:
    assert worst_case().extra_s(plan(1400, 1400)) == 0.0


def test_every_instruction_may_slow_as_much_as_its_clock_falls() -> None:
    full_s = 0.05 + 4 * 0.1 + 4 * 0.2 + 0.1

    assert worst_case().extra_s(plan(700, 700)) == pytest.approx(full_s)


def test_an_instruction_that_waits_anyway_costs_nothing() -> None:
    waiting = SCHEDULE.orders[0][1]  # the second forward of the first stage, for which the second stage is not ready

    assert worst_case().extra_s(plan(700, 1400, only=waiting)) == 0.0
    assert worst_case().extra_s(plan(1400, 700, only=SCHEDULE.orders[1][1])) > 0.0


def test_what_was_measured_makes_the_bound_tighter_between_and_below_its_clocks() -> None:
    times, own = worst_case((1, B, 700, 0.24)).times, InstructionClass(1, B)

    assert times.most_ratio(own, 700, 1400) == pytest.approx(1.2)
    assert times.most_ratio(own, 1400 / 1.5, 1400) == pytest.approx(1.1)
    assert times.most_ratio(own, 350, 1400) == pytest.approx(2.4)
    assert times.most_ratio(InstructionClass(1, F), 700, 1400) == 2.0
    # A gradient alone slows as the backward that it is a part of.
    assert times.most_ratio(InstructionClass(1, InstructionKind.W), 700, 1400) == pytest.approx(1.2)


def test_a_clock_that_is_raised_at_the_begin_of_an_instruction_is_late() -> None:
    second = SCHEDULE.orders[1][1]
    lost_s = worst_case(latency_s=0.02).extra_s(plan(1400, 700, only=second))

    assert lost_s == pytest.approx(worst_case().extra_s(plan(1400, 700, only=second)) + 0.02)


def test_a_power_limit_may_slow_as_much_as_it_lowers_the_power() -> None:
    assert worst_case().extra_s(plan(1400, 1400, watts=200.0)) == pytest.approx(1.35)


def test_measured_times_do_not_limit_what_a_plan_can_explain() -> None:
    worst = worst_case((1, B, 700, 0.2), (1, F, 700, 0.1), (0, F, 700, 0.05), (0, B, 700, 0.1), latency_s=0.01)

    assert worst.extra_s(plan(700, 700)) == 0.0
    assert worst.explained_s(plan(700, 700)) == pytest.approx(1.35 + 8 * 0.01)


def test_without_times_of_instructions_the_whole_iteration_counts() -> None:
    unknown = WorstCase(dependency_graph(SCHEDULE), ClockTimes(), [RankSpeed(1400, 0.0)] * 2, 2.0)

    assert unknown.extra_s(plan(1400, 700)) == pytest.approx(2.0)
