"""Captured pipelines in virtual time: timetables keep nearly all of the saving of hooks, at the same speed."""

from statistics import fmean
from typing import Any

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.captured_training import CapturedTraining, demo_work, waiting_power_w
from tests.support.remembered_plans import RememberedBubbleAware

NUM_ITERATIONS = 80
CONDITIONS: dict[str, Any] = {
    "noise_ratio": 0.003,
    "switch_latency_s": 0.014,
    "latency_spread_ratio": 0.3,
    "waiting_power_w": waiting_power_w,
}


def outcome(run: VirtualTraining) -> tuple[float, float]:
    """Return saving and slowdown of the iterations of the plan in force against those of the baseline."""
    baseline = run.history[2:12]
    tuned = [row for row in run.history if row[2] == run.job.current_plan.plan_id]
    saving = 1 - fmean(energy_j for _, energy_j, _ in tuned) / fmean(energy_j for _, energy_j, _ in baseline)
    return saving, fmean(time_s for time_s, _, _ in tuned) / fmean(time_s for time_s, _, _ in baseline) - 1


@pytest.mark.thorough
def test_a_captured_pipeline_saves_nearly_as_much_as_a_hooked_one_in_the_same_time() -> None:
    schedule = one_forward_one_backward(4, 8)
    hooked = VirtualTraining(schedule, demo_work(4), RememberedBubbleAware(), seed=2, **CONDITIONS)
    captured = CapturedTraining(schedule, demo_work(4), RememberedBubbleAware(), seed=2, **CONDITIONS)

    hooked.run(NUM_ITERATIONS)
    try:
        captured.run(NUM_ITERATIONS)
    finally:
        captured.close()

    assert captured.job.phase is JobPhase.TUNED
    assert captured.job.current_plan.purpose is PlanPurpose.TUNED
    hooked_saving, _ = outcome(hooked)
    saving, slowdown = outcome(captured)
    assert saving >= 0.9 * hooked_saving
    assert slowdown <= 0.01
    assert captured.time_error_max_ratio <= 1e-3
    assert captured.num_unread == 0
    assert captured.num_calls_in_capture == 0
