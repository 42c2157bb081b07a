"""One job on GPUs that are unkind in every way at once; the benchmark `everything-unkind` runs many."""

from statistics import mean

import pytest

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from tests.support.everything_unkind import best_result, conditions, result_of, training
from tests.support.random_jobs import random_job


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
