"""Jobs whose set calls stall training: the price is learned, and the plan pays it only where it gains."""

from statistics import mean

import pytest

from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_policies.bubble_aware.model import FittedJob
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.learning.calls import CallCost
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.unkind_training import TargetLatencies, UnkindDriver, UnkindTraining


def trained(stall_s: float, *, reported_early_s: float = 0.0, call_s: float = 0.0) -> UnkindTraining:
    driver = UnkindDriver(
        TargetLatencies(0.006, 0.006, 0.0), stall_s=stall_s, reported_early_s=reported_early_s, call_s=call_s
    )
    training = UnkindTraining(
        one_forward_one_backward(3, 8),
        a100_stages([1.0, 0.93, 1.1]),
        BubbleAware(),
        noise_ratio=0.003,
        assumed_latency_s=0.03,
        driver=driver,
    )
    training.run(70)
    return training


def learned(training: UnkindTraining) -> CallCost:
    view = training.job.view()
    assert view is not None
    return FittedJob(view).model.calls


def net(training: UnkindTraining, last: int = 20) -> tuple[float, float]:
    """Return saving and slowdown of the last iterations."""
    tuned = [row for row in training.history[-last:] if row[2] != PROOF_PLAN_ID]
    (time_s, energy_j), (then_s, then_j) = (
        (mean(t for t, _, _ in rows), mean(e for _, e, _ in rows)) for rows in (tuned, training.history[2:8])
    )
    return 1 - energy_j / then_j, time_s / then_s - 1


@pytest.mark.thorough
def test_a_stall_of_3_ms_at_each_call_is_learned_and_costs_no_time() -> None:
    training = trained(0.003, reported_early_s=0.004)
    saving, slowdown = net(training)
    calls = learned(training)

    assert calls.stall_s == pytest.approx(0.003, rel=0.1)
    assert calls.delay_s == pytest.approx(0.004, abs=0.001)
    assert slowdown < 0.003
    assert saving > 0.08


@pytest.mark.thorough
def test_free_calls_have_no_price_and_the_driver_sets_one_gpu_at_a_time() -> None:
    training = trained(0.0, call_s=0.002)
    saving, slowdown = net(training)

    assert learned(training).stall_s == 0.0
    assert slowdown < 0.003
    assert saving > 0.1


@pytest.mark.thorough
def test_calls_occupy_the_driver_for_at_most_a_quarter_of_the_time() -> None:
    """Without that limit, the plan of this job has eight calls of 0.1 s in an iteration of 1.6 s."""
    training = trained(0.0, call_s=0.1)
    plan = training.job.current_plan
    iteration_s = training.history[-1][0]
    num_calls = sum(
        change.sm_clock_mhz != before.sm_clock_mhz
        for rank in plan.ranks
        for before, change in zip((*rank.changes[-1:], *rank.changes), rank.changes, strict=False)
    )

    assert plan.purpose is PlanPurpose.TUNED
    assert num_calls * 0.1 <= 0.25 * iteration_s
