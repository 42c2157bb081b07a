"""Trials of loops that permit no slowdown: they cost less than an iteration, and show what a slowdown would save."""

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.outcome import OutcomeKind, find_outcome
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import ClockPolicy, Lever
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.setting_search import MOST_LOST_ITERATIONS
from gpuenergyd_policies.uniform import Uniform
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.plain_jobs import MEMORY_SHARES, GpuLoopWork, loop_training, random_gpu_work
from tests.support.thorough import thorough

TRIED = 64
"""Iterations after which all trials are over."""
CLOCKS, LIMITS = frozenset({Lever.CLOCKS}), frozenset({Lever.POWER_LIMITS})


def trained(policy: ClockPolicy, work: GpuLoopWork, *, slowdown_ratio: float = 0.0, seed: int = 0) -> VirtualTraining:
    run = loop_training(policy, work, max_slowdown_ratio=slowdown_ratio, seed=seed)
    run.run(110 if slowdown_ratio else TRIED)
    return run


def lost_iterations(run: VirtualTraining) -> float:
    """Return the time that iterations under plans took beyond full speed, in iterations."""
    assert run.job.baseline is not None
    baseline_s = run.job.baseline.iteration_time_s
    plans = {plan.plan_id for plan in run.job.knowledge.plans.kept if plan.purpose is PlanPurpose.TRIAL}
    return sum(max(0.0, seen.own_time_s / baseline_s - 1) for seen in run.job.observations if seen.plan_id in plans)


@pytest.mark.parametrize("policy", [Uniform, BubbleAware])
@pytest.mark.parametrize("kind", MEMORY_SHARES)
@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3)])
def test_trials_show_what_the_job_then_saves(policy: type[ClockPolicy], kind: str, seed: int) -> None:
    work = random_gpu_work(seed, kind)

    advised = trained(policy(), work, seed=seed)

    assert 0 < lost_iterations(advised) < MOST_LOST_ITERATIONS + 0.2
    assert advised.job.phase is JobPhase.TUNED
    advice = advised.job.advice[-1]
    assert (advice.max_slowdown_ratio, advice.is_measured) == (0.05, True)
    estimate = trained(Uniform(), work, slowdown_ratio=0.05, seed=100 + seed).job.estimate()
    assert estimate is not None
    assert estimate.saving is not None
    assert estimate.saving.saving_ratio is not None
    saved = estimate.saving.saving_ratio.estimate
    assert abs(advice.saving_ratio - saved) <= 0.02


def test_a_loop_that_waits_for_memory_saves_at_the_time_of_full_speed() -> None:
    run = trained(Uniform(), random_gpu_work(12, "memory-bound"), seed=12)
    run.run(50)

    plan = run.job.current_plan
    assert plan.purpose is PlanPurpose.TUNED
    assert "took no more time than full speed in its trial: this loop seems to wait for memory" in plan.reason
    assert find_outcome(run.job).kind is OutcomeKind.SAVED
    estimate = run.job.estimate()
    assert estimate is not None
    assert estimate.saving is not None
    assert estimate.saving.saving_ratio is not None
    assert estimate.saving.saving_ratio.low > 0.05


def test_a_loop_that_computes_stays_at_full_speed_after_its_trials() -> None:
    run = trained(Uniform(), random_gpu_work(0, "compute-bound"))

    assert not run.job.current_plan.ranks
    outcome = find_outcome(run.job)
    assert outcome.kind is OutcomeKind.NOTHING_TO_SAVE
    assert "at 5 % slower this job would use " in outcome.advice
    assert "predicted" not in outcome.advice


@pytest.mark.parametrize("policy", [Uniform, BubbleAware])
def test_an_option_forbids_trials(policy: type[Uniform | BubbleAware]) -> None:
    run = trained(policy(trials="false"), random_gpu_work(0, "compute-bound"))

    assert not run.slices
    assert not run.job.advice[-1].is_measured


def test_power_limits_are_tried_where_clocks_may_not_be_set() -> None:
    run = loop_training(
        Uniform(),
        random_gpu_work(0, "compute-bound"),
        max_slowdown_ratio=0.0,
        seed=1,
        levers=LIMITS,
        power_limit_range_w=(100.0, 400.0),
    )
    run.run(TRIED)

    tried = [plan for plan in run.job.knowledge.plans.kept if plan.purpose is PlanPurpose.TRIAL]
    assert tried
    assert all(plan.power_limits_w and not plan.sets_clocks for plan in tried)
    assert 0 <= lost_iterations(run) < MOST_LOST_ITERATIONS + 0.2
