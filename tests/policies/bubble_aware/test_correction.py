"""Small lateness that lasts is corrected for as long as that makes plans faster, but for what calls were given."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_policies.bubble_aware.figures import Figure
from gpuenergyd_policies.bubble_aware.outcome import PlanOutcome
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_sim.virtual_training.random_jobs import random_job

SCATTER_RATIO = 1e-4
STALL_S = 0.001
LONG = 1 + TUNING.min_iterations_to_keep_budget
"""Iterations of a plan, the first of which does not count."""


@pytest.fixture(scope="module")
def job() -> tuple[JobView, ClockPlan]:
    run = random_job(3006).training(BubbleAware(), JobRules())
    run.run(16)
    view = run.job.view()
    assert view is not None
    return view, run.job.current_plan


def is_slow(
    job: tuple[JobView, ClockPlan],
    *late_ratios: float,
    num_before: int = LONG,
    slowdown_ratio: float = 0.0,
    planned_ratio: float = 0.0,
    stall_s: float = 0.0,
) -> bool:
    """Return whether the last of several plans, each with more caution, is slow; the others ran `num_before`."""
    view, plan = job
    usual_s = view.baseline.iteration_time_s
    target_s = (1 + slowdown_ratio) * usual_s
    figures = dict(plan.figures) | {Figure.TARGET: 1 + slowdown_ratio, Figure.CALL_STALL: stall_s}
    predicted = PlanPrediction(target_s + planned_ratio * usual_s, 1.0, baseline_time_s=usual_s)
    plans = tuple(
        replace(
            plan,
            plan_id=f"tuned-{k + 1}",
            predicted=predicted,
            figures=tuple((figures | {Figure.CAUTION: 0.001 * k}).items()),
        )
        for k, _ in enumerate(late_ratios)
    )
    observations = tuple(
        replace(
            view.observations[-1], plan_id=own.plan_id, iteration_time_s=target_s * (1 + late_ratio), is_regular=True
        )
        for own, late_ratio in zip(plans, late_ratios, strict=True)
        for _ in range(LONG if own is plans[-1] else num_before)
    )
    view = replace(
        view,
        baseline=replace(view.baseline, iteration_sigma_s=SCATTER_RATIO * usual_s),
        target=PerformanceTarget(slowdown_ratio),
        issued_plans=plans,
        observations=observations,
    )
    return PlanOutcome.of(view, plans[-1]).is_slow


@pytest.mark.parametrize("slowdown_ratio", [0.0, 0.02])
def test_a_plan_that_stays_a_little_late_is_slow(job: tuple[JobView, ClockPlan], slowdown_ratio: float) -> None:
    assert is_slow(job, 0.0012, slowdown_ratio=slowdown_ratio)
    assert not is_slow(job, 0.0003, slowdown_ratio=slowdown_ratio)


def test_it_is_corrected_for_as_long_as_caution_makes_it_faster(job: tuple[JobView, ClockPlan]) -> None:
    assert is_slow(job, 0.0026, 0.0018, 0.0012)
    assert not is_slow(job, 0.0026, 0.0012, 0.0012)
    assert not is_slow(job, 0.0012, 0.0018)


def test_a_plan_that_ran_shortly_shows_nothing_of_caution(job: tuple[JobView, ClockPlan]) -> None:
    assert is_slow(job, 0.0012, 0.0012, num_before=LONG - 1)
    assert not is_slow(job, 0.0012, 0.0012)


def test_clear_lateness_is_always_slow(job: tuple[JobView, ClockPlan]) -> None:
    assert is_slow(job, 0.01, 0.01)


def test_a_plan_may_stay_late_by_the_time_that_its_calls_were_given(job: tuple[JobView, ClockPlan]) -> None:
    assert not is_slow(job, 0.0012, planned_ratio=0.001, stall_s=STALL_S)
    assert is_slow(job, 0.0022, planned_ratio=0.001, stall_s=STALL_S)
    assert is_slow(job, 0.0012, planned_ratio=0.001), "no calls stop its GPUs"


def test_a_bold_prediction_gives_calls_no_more_time(job: tuple[JobView, ClockPlan]) -> None:
    given_ratio = TUNING.far_late_of_calls_ratio

    assert not is_slow(job, given_ratio, planned_ratio=2 * given_ratio, stall_s=STALL_S)
    assert is_slow(job, given_ratio + 0.0009, planned_ratio=2 * given_ratio, stall_s=STALL_S)
