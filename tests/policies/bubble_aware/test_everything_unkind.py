"""One job on GPUs that are unkind in every way at once; the benchmark `everything-unkind` runs many."""

from statistics import mean

import pytest

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.random_jobs import random_job
from tests.support.everything_unkind import best_result, conditions, result_of, training


@pytest.mark.thorough
def test_a_job_gets_a_plan_near_the_best_under_the_same_conditions_and_an_honest_interval() -> None:
    job = random_job(1014)
    under = conditions(job.model, 1014, job.schedule.num_ranks)
    run = training(job, under, BubbleAware())
    try:
        run.run(80)
    finally:
        run.close()

    plan, saving = run.job.current_plan, run.job.knowledge.saving()
    assert plan.purpose is PlanPurpose.TUNED
    ours, best = result_of(job, under, plan), best_result(job, under, max_slowdown_ratio=0.01)
    assert ours.energy_j < 1.02 * best.energy_j
    tuned_s = [time_s for time_s, _, plan_id in run.history if (plan_id or "").startswith("tuned")]
    assert mean(tuned_s) < 1.01 * mean(time_s for time_s, _, _ in run.history[2:8])
    assert saving is not None
    assert saving.saving_ratio is not None
    assert saving.saving_ratio.low <= ours.saving_ratio <= saving.saving_ratio.high


def plan_after(num_iterations: int, seed: int) -> ClockPlan:
    """Return the plan in force after some iterations of a job whose policy learns from plans."""
    job = random_job(seed)
    run = training(job, conditions(job.model, seed, job.schedule.num_ranks), BubbleAware())
    try:
        run.run(num_iterations)
    finally:
        run.close()
    return run.job.current_plan


def test_an_unknown_gpu_is_no_noise_of_the_job() -> None:
    """Draws from the generic prior differ widely; with clocks that fall at once, the plan would be 3 % late in some."""
    plan = plan_after(14, seed=17001)

    assert plan.purpose is PlanPurpose.TUNED, plan.reason


@pytest.mark.thorough
def test_a_plan_saves_though_no_slowdown_is_permitted_and_calls_take_a_thousandth_of_the_time() -> None:
    """Once this job knows that calls stop its GPUs, every plan but full speed is late, if only by that."""
    plan = plan_after(24, seed=17006)

    assert plan.purpose is PlanPurpose.TUNED
    assert plan.predicted is not None
    assert plan.predicted.baseline_energy_j is not None
    assert plan.predicted.energy_j < 0.95 * plan.predicted.baseline_energy_j
