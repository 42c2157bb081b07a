"""Jobs on GPUs whose clocks take effect about as late as instructions last, with tails, and reported too early."""

import pytest

from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.unkind_training import TargetLatencies, UnkindDriver, UnkindTraining


def training(seed: int, *, least_median_s: float = 0.06) -> UnkindTraining:
    """Return a pipeline of instructions of 50 to 110 ms on GPUs with latencies of up to 100 ms, and rarely 400 ms."""
    latencies = TargetLatencies(least_median_s, 0.1, tail_ratio=0.01, seed=seed)
    return UnkindTraining(
        one_forward_one_backward(4, 8),
        a100_stages((1.0, 0.93, 1.0, 1.1)),
        BubbleAware(),
        noise_ratio=0.003,
        assumed_latency_s=0.03,
        seed=seed,
        driver=UnkindDriver(latencies, reported_early_s=0.02, call_s=0.001),
    )


@pytest.mark.thorough
def test_a_job_whose_clocks_are_later_than_assumed_learns_plans_that_are_on_time() -> None:
    run = training(seed=3)
    run.run(90)

    assert any(plan.purpose is PlanPurpose.TUNED for plan in run.job.knowledge.plans.kept)
    tuned = [(time_s, energy_j) for time_s, energy_j, plan_id in run.history if (plan_id or "").startswith("tuned")]
    full_speed_s, full_speed_j = (sum(values) / 6 for values in list(zip(*run.history[2:8], strict=True))[:2])
    assert sum(time_s for time_s, _, _ in run.history[2:]) < 1.01 * full_speed_s * len(run.history[2:])
    assert sum(energy_j for _, energy_j in tuned) < 0.93 * full_speed_j * len(tuned)


@pytest.mark.thorough
def test_a_plan_that_changes_clocks_too_often_is_made_calmer_instead_of_given_up() -> None:
    """The best clocks change faster than latencies of 20 to 100 ms permit, and no plan of few segments is on time."""
    run = training(seed=12, least_median_s=0.02)
    run.run(30)

    tuned = [energy_j for _, energy_j, plan_id in run.history if (plan_id or "").startswith("tuned")]
    full_speed_j = sum(energy_j for _, energy_j, _ in run.history[2:8]) / 6
    assert tuned
    assert tuned[-1] < 0.93 * full_speed_j
