"""Advice to plain loops: a range at full speed, figures once any slower setting was measured, and its words."""

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.job.outcome import OutcomeKind, find_outcome, outcome_line
from gpuenergyd.core.job.result_text import advice_text
from gpuenergyd.core.pipeline.graph import Instruction, Schedule
from gpuenergyd.core.pipeline.plan import PlanPurpose, SavingAdvice
from gpuenergyd.core.policy_api.policy import ClockPolicy, Lever
from gpuenergyd_other_policies.cost import Cost
from gpuenergyd_other_policies.uniform import Uniform
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.full_speed import FullSpeed
from gpuenergyd_policies.setting_search import ADVISED_SLOWDOWNS, MOST_LOST_ITERATIONS
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.plain_jobs import MEMORY_SHARES, GpuLoopWork, loop_training, random_gpu_work, random_loop_work
from tests.support.thorough import thorough
from tests.support.virtual_loop import B, F, O, VirtualLoop

TRIED = 64
"""Iterations after which all trials are over."""
CLOCKS, LIMITS = frozenset({Lever.CLOCKS}), frozenset({Lever.POWER_LIMITS})


def saving_of(run: VirtualTraining) -> float:
    estimate = run.job.estimate()
    assert estimate is not None
    assert estimate.saving is not None
    assert estimate.saving.saving_ratio is not None
    return estimate.saving.saving_ratio.estimate


def _without_slowdown(seed: int) -> VirtualTraining:
    run = loop_training(Uniform(trials="false"), random_loop_work(seed), max_slowdown_ratio=0.0, seed=seed)
    run.run(24)
    return run


@pytest.mark.parametrize("seed", [0, *thorough(1, 2, 3)])
def test_advice_from_full_speed_is_a_range_that_holds_what_the_job_then_saves(seed: int) -> None:
    advised = _without_slowdown(seed)

    assert not advised.slices
    assert [advice.max_slowdown_ratio for advice in advised.job.advice] == list(ADVISED_SLOWDOWNS)
    advice = advised.job.advice[2]
    assert not advice.is_measured
    assert advice.is_range
    permitted = loop_training(Uniform(), random_loop_work(seed), max_slowdown_ratio=0.05, seed=100 + seed)
    permitted.run(110)
    assert advice.low_ratio <= saving_of(permitted) <= advice.high_ratio


@pytest.mark.parametrize("kind", MEMORY_SHARES)
@pytest.mark.parametrize("seed", [0, *thorough(1, 2)])
def test_a_tenth_of_a_percent_permitted_measures_the_saving_at_five_percent(seed: int, kind: str) -> None:
    work = random_gpu_work(seed, kind)
    advised = loop_training(Uniform(), work, max_slowdown_ratio=0.001, seed=seed)
    advised.run(64)

    advice = advised.job.advice[-1]
    assert advice.max_slowdown_ratio == 0.05
    permitted = loop_training(Uniform(), work, max_slowdown_ratio=0.05, seed=100 + seed)
    permitted.run(110)
    assert not advice.is_range
    assert abs(advice.saving_ratio - saving_of(permitted)) <= 0.02


@pytest.mark.parametrize("policy", [Cost(eta="1"), Uniform()])
def test_power_limits_alone_are_advised_on_too(policy: ClockPolicy) -> None:
    run = loop_training(
        policy,
        random_loop_work(3),
        max_slowdown_ratio=0.0,
        seed=1,
        levers=frozenset({Lever.POWER_LIMITS}),
        power_limit_range_w=(100.0, 400.0),
    )
    run.run(64)

    assert len(run.job.advice) == len(ADVISED_SLOWDOWNS)
    assert "at 5 % slower this job would use " in outcome_line(run.job)


def test_a_cost_of_time_is_never_advised_to_save_energy() -> None:
    savings = []
    for eta in ("0", "1"):
        run = loop_training(Cost(eta=eta), random_loop_work(1), max_slowdown_ratio=0.001, seed=1)
        run.run(64)
        savings.append(run.job.advice[-1].saving_ratio)

    assert savings[0] < 0.01
    assert savings[1] > 0.03


def test_the_outcome_of_a_loop_says_the_saving_of_more_slowdown() -> None:
    run = _without_slowdown(0)

    outcome = find_outcome(run.job)

    assert outcome.kind is OutcomeKind.NOTHING_TO_SAVE
    assert outcome.advice.startswith("at 1 % slower this job would use ")
    assert "predicted, not known better): --max-slowdown 0.05" in outcome.advice
    assert outcome.advice.endswith("to measure instead of predict, within some iterations: --max-slowdown 0.001")
    assert outcome_line(run.job).startswith(f"{outcome.reason}; {outcome.advice}; cost so far: 0.0 s")


def test_a_tuned_loop_is_advised_on_larger_slowdowns_only() -> None:
    run = loop_training(Uniform(), random_loop_work(2), max_slowdown_ratio=0.02, seed=2)
    run.run(60)

    assert {advice.max_slowdown_ratio for advice in run.job.advice} <= {0.05}


def test_a_loop_with_phases_gets_advice_for_all_of_them_together() -> None:
    schedule = Schedule("loop", 1, ((Instruction(0, F, 0), Instruction(0, B, 0), Instruction(0, O, 0)),))
    run = VirtualLoop(schedule=schedule)

    run.run(48)

    savings = [advice.saving_ratio for advice in run.job.advice]
    assert len(savings) == len(ADVISED_SLOWDOWNS)
    assert 0.0 < savings[0] < savings[1] < savings[2] < 0.3
    assert "at 2 % slower this job would use " in find_outcome(run.job).advice


def test_data_parallel_loops_without_phases_get_no_advice_that_no_option_would_claim() -> None:
    run = loop_training(Uniform(), random_loop_work(0), max_slowdown_ratio=0.0, seed=0, num_dp_ranks=4)
    run.run(24)

    assert run.job.advice == ()


def test_policy_full_speed_gives_no_advice_that_it_would_not_follow() -> None:
    run = loop_training(FullSpeed(), random_loop_work(0), max_slowdown_ratio=0.0, seed=0)
    run.run(24)

    assert run.job.advice == ()


def test_advice_in_words() -> None:
    advice = SavingAdvice(0.02, 0.11, 0.09, 0.13, is_measured=True)

    assert advice_text([advice]) == (
        "at 2 % slower this job would use 11.0 % less energy (9.0-13.0 %, measured): --max-slowdown 0.02"
    )
    assert advice_text([SavingAdvice(0.01, 0.001, 0.0, 0.002, is_measured=False)]) == ""


def test_advice_that_is_no_better_known_than_within_points_has_no_figure() -> None:
    advice = SavingAdvice(0.05, 0.12, 0.04, 0.25, is_measured=False)

    assert advice_text([advice]) == (
        "at 5 % slower this job would use 4 to 25 % less energy (predicted, not known better): --max-slowdown 0.05;"
        " to measure instead of predict, within some iterations: --max-slowdown 0.001"
    )


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


@pytest.mark.parametrize("first_faster", [11, 16, 20])
def test_a_loop_that_becomes_faster_during_its_trials_does_not_seem_to_wait_for_memory(first_faster: int) -> None:
    run = loop_training(Uniform(), random_gpu_work(0, "compute-bound"), max_slowdown_ratio=0.0, seed=first_faster)
    lowered = []
    for index in range(TRIED):
        run.step_overhead_s = max(0.02, 0.6 - 0.04 * max(0, index - first_faster))
        run.run(1)
        lowered.append(run.job.current_plan.purpose is PlanPurpose.TUNED and bool(run.job.current_plan.ranks))

    assert not any(lowered)
    assert any(plan.purpose is PlanPurpose.TRIAL for plan in run.job.knowledge.plans.kept)


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
