"""Measured saving of following a straggler's pace."""

import pytest

from gpuenergyd.core.distributed.straggler_savings import StragglerSavingEstimator
from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.plan import PlanPurpose

TUNED = PlanPurpose.TUNED


def iteration(time_s: float, energy_j: float | None, *, waited_s: float = 0.0) -> IterationObservation:
    return IterationObservation(
        iteration_index=0,
        plan_id="plan",
        iteration_time_s=time_s,
        instruction_samples=(),
        ranks=(RankEnergy(0, time_s, energy_j, ()),),
        is_regular=not waited_s,
        waited_s=waited_s,
    )


def gauge_of(*figures: tuple[float, float | None, float, bool]) -> StragglerSavingEstimator:
    """Return a gauge that has seen (time, energy, wait, whether the plan was made for the straggler)."""
    gauge = StragglerSavingEstimator()
    for time_s, energy_j, waited_s, is_for_straggler in figures:
        seen = iteration(time_s, energy_j, waited_s=waited_s)
        gauge.add(seen, TUNED, is_plan_for_straggler=is_for_straggler)
    return gauge


def test_following_is_compared_with_waiting_for_the_same_straggler() -> None:
    gauge = gauge_of(
        (1.0, 300.0, 0.0, False),
        (1.21, 340.0, 0.2, False),
        (1.20, 344.0, 0.2, False),
        (1.20, 306.0, 0.0, True),
        (1.20, 310.0, 0.01, True),
        (1.19, 308.0, 0.0, True),
    )

    saving = gauge.saving

    assert saving is not None
    assert (saving.waiting_energy_j, saving.following_energy_j) == (342.0, 308.0)
    assert saving.saving_ratio == pytest.approx(1 - 308 / 342)


@pytest.mark.parametrize(("permitted_ratio", "is_compared"), [(0.0, False), (0.05, True)])
def test_following_may_be_longer_by_the_permitted_slowdown(permitted_ratio: float, *, is_compared: bool) -> None:
    gauge = StragglerSavingEstimator()
    for time_s, energy_j, waited_s, is_following in [(1.2, 340.0, 0.2, False)] * 3 + [(1.26, 306.0, 0.0, True)] * 3:
        seen = iteration(time_s, energy_j, waited_s=waited_s)
        gauge.add(seen, TUNED, is_plan_for_straggler=is_following, permitted_ratio=permitted_ratio)

    assert (gauge.saving is not None) == is_compared


def test_following_faster_than_waiting_is_not_compared_whatever_is_permitted() -> None:
    gauge = StragglerSavingEstimator()
    for time_s, waited_s, is_following in [(1.2, 0.2, False)] * 3 + [(1.14, 0.0, True)] * 3:
        seen = iteration(time_s, 300.0, waited_s=waited_s)
        gauge.add(seen, TUNED, is_plan_for_straggler=is_following, permitted_ratio=0.05)

    assert gauge.saving is None


def test_waits_at_another_pace_are_not_compared() -> None:
    waited = [(1.5, 400.0, 0.5, False)] * 3
    followed = [(1.2, 308.0, 0.0, True)] * 3

    assert gauge_of(*waited, *followed).saving is None


@pytest.mark.parametrize("num_following", [0, 1])
def test_two_iterations_of_each_kind_are_required(num_following: int) -> None:
    waited = [(1.2, 340.0, 0.2, False)] * 3

    assert gauge_of(*waited, *[(1.2, 308.0, 0.0, True)] * num_following).saving is None


def test_iterations_without_energy_profiling_and_pauses_are_ignored() -> None:
    gauge = gauge_of((1.2, 340.0, 0.2, False), (1.2, None, 0.2, False), (1.2, 308.0, 0.0, True))
    gauge.add(iteration(3.0, 900.0, waited_s=2.0), TUNED, is_plan_for_straggler=False)
    gauge.add(iteration(1.2, 340.0, waited_s=0.2), PlanPurpose.TRIAL, is_plan_for_straggler=False)
    gauge.add(iteration(1.2, 308.0), TUNED, is_plan_for_straggler=True)

    assert gauge.saving is None


def test_waits_at_full_speed_count_only_without_waits_of_a_tuned_plan() -> None:
    gauge = StragglerSavingEstimator()
    for _ in range(3):
        gauge.add(iteration(1.2, 360.0, waited_s=0.2), PlanPurpose.BASELINE, is_plan_for_straggler=False)
        gauge.add(iteration(1.2, 306.0), TUNED, is_plan_for_straggler=True)
    at_full_speed = gauge.saving
    for _ in range(3):
        gauge.add(iteration(1.2, 340.0, waited_s=0.2), TUNED, is_plan_for_straggler=False)
    by_plan = gauge.saving

    assert at_full_speed is not None
    assert at_full_speed.saving_ratio == pytest.approx(1 - 306 / 360)
    assert by_plan is not None
    assert by_plan.saving_ratio == pytest.approx(1 - 306 / 340)


def test_the_last_saving_remains_when_a_new_pace_has_no_comparison() -> None:
    gauge = gauge_of(*[(1.2, 340.0, 0.2, False)] * 3, *[(1.2, 306.0, 0.0, True)] * 3)
    before = gauge.saving
    for _ in range(4):
        gauge.add(iteration(1.5, 400.0, waited_s=0.5), TUNED, is_plan_for_straggler=False)

    assert before is not None
    assert gauge.saving == before


def test_iterations_within_3_percent_of_the_pace_are_compared() -> None:
    """Waited for 1 s; what followed at 1.029 and 0.971 s counts, at 1.031 and 0.969 s not."""
    waited = [(1.0, 100.0, 0.2, False)] * 3

    near = gauge_of(*waited, (1.029, 80.0, 0.0, True), (0.971, 80.0, 0.0, True)).saving
    far = gauge_of(*waited, (1.031, 80.0, 0.0, True), (0.971, 80.0, 0.0, True), (0.969, 80.0, 0.0, True)).saving

    assert near is not None
    assert near.saving_ratio == pytest.approx(0.2)
    assert far is None


def test_the_pace_is_the_median_of_the_last_three_waits() -> None:
    """Five waits for 1 s and three for 2 s: the slower pace counts, of which there must be two and its followers."""
    early, late = [(1.0, 100.0, 0.2, False)] * 5, [(2.0, 150.0, 0.2, False)] * 3
    followed = [(1.0, 80.0, 0.0, True)] * 2 + [(2.0, 120.0, 0.0, True)] * 2

    saving = gauge_of(*followed, *early, *late).saving
    assert saving is not None
    assert (saving.waiting_energy_j, saving.following_energy_j) == (150.0, 120.0)
    before = gauge_of(*followed, *early, *late[:1]).saving
    assert before is not None
    assert before.waiting_energy_j == 100.0


def test_the_last_8_waiting_and_64_following_iterations_are_kept() -> None:
    """Of nine waits the first is gone: of the eight left, four cost 100 J and four 200 J, 150 J between them."""
    waits = [(1.0, 100.0, 0.2, False)] * 5 + [(1.0, 200.0, 0.2, False)] * 4
    followed = [(1.0, 50.0, 0.0, True)] * 33 + [(1.0, 70.0, 0.0, True)] * 32

    saving = gauge_of(*followed, *waits).saving

    assert saving is not None
    assert (saving.waiting_energy_j, saving.following_energy_j) == (150.0, 60.0)
