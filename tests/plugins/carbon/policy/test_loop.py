"""Targets that change while a job runs: plans follow, and are judged by the target they were made for."""

from dataclasses import replace
from statistics import median

import pytest

from gpuenergyd.core.job.measurements.measured_frontier import measured_frontier
from gpuenergyd.core.job.messages import JobPhase, TargetChanged
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.policies.bubble_aware.test_control_loop import training
from tests.support.remembered_plans import RememberedBubbleAware


def required(run: VirtualTraining, ratio: float) -> None:
    assert run.job.baseline is not None
    target = PerformanceTarget(0.1, permitted_time_s=run.job.baseline.iteration_time_s * (1 + ratio))
    run.feed(TargetChanged(target))


def last_slowdown(run: VirtualTraining, num: int = 6) -> float:
    assert run.job.baseline is not None
    return median(time_s for time_s, _, _ in run.history[-num:]) / run.job.baseline.iteration_time_s - 1


@pytest.mark.thorough
def test_a_plan_follows_a_moving_target_without_a_fault() -> None:
    run = training(RememberedBubbleAware(), max_slowdown_ratio=0.02)
    run.run(35)
    slowdowns = []
    for ratio in (0.08, 0.0):
        required(run, ratio)
        run.run(24)
        slowdowns.append(last_slowdown(run))

    assert run.job.phase is JobPhase.TUNED
    assert run.job.faults.num_faults == 0
    assert slowdowns == pytest.approx([0.08, 0.0], abs=0.006)


@pytest.mark.thorough
def test_a_plan_is_evaluated_against_the_target_it_was_made_for() -> None:
    class Slowly(BubbleAware):
        """A policy that keeps answering for the old target for a while."""

        def __init__(self) -> None:
            super().__init__()
            self.num_kept = 0

        def next_plan(self, view: JobView) -> ClockPlan:
            if view.target.permitted_time_s is not None and self.num_kept < 1:
                self.num_kept += 1
                return view.issued_plans[-1]
            return super().next_plan(view)

    run = training(Slowly(), max_slowdown_ratio=0.08)
    run.run(40)
    required(run, 0.0)
    run.run(3)

    assert run.job.faults.num_faults == 0


@pytest.mark.thorough
def test_the_frontier_of_a_pipeline_agrees_with_measured_iterations() -> None:
    policy = RememberedBubbleAware()
    run = training(policy)
    assert policy.frontier(replace(view_of(run, 16), issued_plans=())) == ()  # nothing is planned yet
    run.run(50)
    points = policy.frontier(view_of(run, 0))

    required(run, 0.05)
    run.run(14)

    assert run.job.baseline is not None
    assert points[0].iteration_time_s == pytest.approx(run.job.baseline.iteration_time_s, rel=2e-3)
    near = min(points, key=lambda point: abs(point.iteration_time_s - run.history[-1][0]))
    assert near.iteration_time_s == pytest.approx(run.history[-1][0], rel=0.01)
    assert near.energy_j == pytest.approx(run.history[-1][1], rel=0.02)


def view_of(run: VirtualTraining, num_iterations: int) -> JobView:
    """Return the view after some more iterations."""
    run.run(num_iterations)
    view = run.job.view()
    assert view is not None
    return view


def test_a_job_without_a_frontier_has_its_uniform_clock_curve() -> None:
    run = training(Uniform(), max_slowdown_ratio=0.1)
    run.run(40)

    points = measured_frontier(view_of(run, 0))

    assert len(points) >= 3
    assert points[0].energy_j > points[-1].energy_j
    assert points[-1].iteration_time_s > points[0].iteration_time_s * 1.02
