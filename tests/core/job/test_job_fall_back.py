"""When a job goes back to full speed, whose fault that is, how long it waits, and what it still believes then."""

import pytest

from gpuenergyd.core.job.messages import (
    AskPolicy,
    ControlLost,
    Event,
    JobPhase,
    PlanDecided,
    PolicyFailed,
    RecordPhase,
    SendPlan,
    TargetChanged,
    TrialPermissionChanged,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.target import PerformanceTarget
from tests.support.job_run import FIRST_ASKED, TRIAL, JobRun, asked_view, kinds, plan


def test_a_slow_plan_ends_at_its_second_iteration_and_the_policy_is_asked_five_later() -> None:
    run = JobRun().following(plan())

    commands = run.fall()

    assert kinds(commands) == ["SendPlan", "RestoreGpus", "RecordPhase"]
    assert (run.sent[-1].plan.plan_id, run.sent[-1].apply_at_iteration) == ("full-speed-1", 18)
    assert (run.job.faults.num_faults, run.job.faults.num_slow_plans) == (1, 1)
    assert (run.job.phase, run.job.retry_in_iterations, run.job.is_given_up) == (JobPhase.FALLBACK, 8, False)
    run.pass_until(23)
    assert run.job.retry_in_iterations == 1
    assert kinds(run.pass_one()) == []  # the question asked before is still open


def test_an_answer_from_before_a_fall_back_is_discarded_and_the_next_one_counts() -> None:
    run = JobRun().following(plan())
    run.fall()
    run.answered_late()

    assert run.first(AskPolicy) == 23
    waits = [run.job.retry_in_iterations]
    assert kinds(run.decide(plan("again"))) == ["LeaseGpus", "SendPlan", "RecordPhase"]
    waits.append(run.job.retry_in_iterations)
    assert waits == [0, None]
    assert not run.job.is_given_up


def test_a_plan_that_is_tried_again_is_guarded_by_its_new_iterations() -> None:
    run = JobRun().following(plan())
    run.fall()
    run.answered_late()
    run.first(AskPolicy)
    run.decide(plan())

    run.pass_until(31)

    assert run.job.phase is JobPhase.TUNED


def test_after_too_many_faults_the_job_stays_at_full_speed() -> None:
    run = JobRun(JobRules(max_faults=0)).following(plan())

    run.fall()

    assert run.job.is_given_up
    assert run.job.retry_in_iterations is None
    run.answered_late()
    run.pass_until(200)


def faster_than_expected() -> JobRun:
    """Return a job whose iterations took less time than predicted, just after it noticed."""
    run = JobRun().following(plan(expected_s=1.1))
    assert [kinds(run.pass_one(1.0)) for _ in range(4)][-1] == ["SendPlan", "SendPlan", "RecordNotice"]
    assert [one.plan.plan_id for one in run.sent[-2:]] == ["proof", "tuned"]
    assert run.job.notices.last == "an iteration takes 1 s, 1.1 s were expected"
    return run


def test_a_faster_job_keeps_its_plan_while_full_speed_is_no_faster() -> None:
    run = faster_than_expected()

    for _ in range(40):
        run.pass_one(1.0)
        if run.job.control.question.is_open:
            run.decide(plan(expected_s=1.1))

    faults = run.job.faults
    assert (faults.num_faults, faults.num_slow_plans, faults.num_fallbacks) == (0, 0, 0)
    assert run.job.phase is JobPhase.TUNED
    assert [one.plan.plan_id for one in run.sent].count("proof") <= 3


def test_a_plan_that_holds_a_faster_job_back_ends_without_a_fault() -> None:
    run = faster_than_expected()
    for _ in range(40):
        run.pass_one(0.8 if run.is_at_full_speed else 1.0)
        if run.job.phase is JobPhase.FALLBACK:
            break

    assert run.job.phase is JobPhase.FALLBACK
    assert (run.job.faults.num_faults, run.job.faults.num_slow_plans, run.job.faults.num_fallbacks) == (0, 0, 1)


def test_a_plan_that_is_too_slow_only_because_full_speed_is_faster_now_is_no_fault() -> None:
    run = JobRun().following(plan())
    for _ in range(40):
        run.pass_one(0.97 if run.is_at_full_speed else 1.0)
        if run.job.phase is JobPhase.FALLBACK:
            break

    assert run.job.phase_reason == "full speed is faster, 0.97 s per iteration, than when plan 'tuned' was made"
    assert (run.job.faults.num_faults, run.job.faults.num_slow_plans, run.job.faults.num_fallbacks) == (0, 0, 1)


def test_a_plan_that_is_kept_for_a_shorter_target_and_is_too_slow_is_a_fault() -> None:
    run = JobRun(JobRules(proof_iterations=0), target=PerformanceTarget(0.1)).following(plan())
    run.feed(TargetChanged(PerformanceTarget()))
    for _ in range(20):
        run.pass_one(1.08)
        if run.job.phase is JobPhase.FALLBACK:
            break
        if run.job.control.question.is_open:
            run.decide(plan())

    assert run.job.faults.num_faults == 1


def test_a_job_without_full_speed_blocks_that_is_faster_than_expected_returns_to_full_speed_ever_more_rarely() -> None:
    run = JobRun(JobRules(proof_iterations=0)).following(plan(expected_s=1.1))
    for _ in range(200):
        run.pass_one(1.0)
        if run.job.control.question.is_open:
            run.decide(plan(expected_s=1.1))

    assert run.job.faults.num_faults == 0
    assert run.job.faults.num_fallbacks <= 4
    assert run.job.phase is JobPhase.TUNED


@pytest.mark.parametrize(
    ("event", "line", "num_faults", "wait"),
    [
        (PolicyFailed("it raised"), "policy p failed: it raised", 1, 5),
        (ControlLost("the worker died"), "the worker died", 1, 5),
        (PlanDecided(plan("odd", clock=1)), "policy p returned an invalid plan", 1, 5),
        (TrialPermissionChanged("no budget left"), "no budget left", 0, 64),
    ],
    ids=lambda value: type(value).__name__,
)
def test_faults_and_waits_by_cause(event: Event, line: str, num_faults: int, wait: int) -> None:
    run = JobRun().asked()
    run.decide(plan("p", TRIAL))
    run.pass_one()

    commands = run.feed(event)

    assert kinds(commands) == ["SendPlan", "RestoreGpus", "RecordPhase"]
    assert (run.job.notices.last or "").startswith(line)
    assert run.job.notices.last_at == 13
    assert run.job.faults.num_faults == num_faults
    assert run.job.retry_in_iterations == run.sent[-1].apply_at_iteration - 12 + wait


def test_a_fault_before_any_plan_restores_nothing_and_waits_from_now_on() -> None:
    run = JobRun().asked()

    assert run.feed(PolicyFailed("late")) == (RecordPhase(JobPhase.FALLBACK, "policy p failed: late"),)
    assert run.job.faults.num_fallbacks == 0
    assert run.first(AskPolicy) == FIRST_ASKED + 5


def test_control_lost_before_there_is_a_baseline_waits_for_it() -> None:
    run = JobRun()
    run.pass_until(2)
    run.pass_one()
    run.feed(ControlLost("worker gone"))

    assert run.job.phase is JobPhase.FALLBACK
    assert run.first(AskPolicy) == FIRST_ASKED


def test_changed_full_speed_is_a_changed_job_and_drops_its_measurements() -> None:
    run = JobRun().following(plan())
    run.fall()
    run.answered_late()

    at = run.first(AskPolicy, time_s=1.2)

    assert run.job.phase_reason == "the job changed: an iteration takes 1.200 times as long as before"
    view = run.job.view()
    assert view is not None
    assert at >= 22
    assert view.generation == 1
    assert view.baseline.iteration_time_s == pytest.approx(1.2)
    assert min(o.iteration_index for o in view.observations) == run.job.faults.fell_back_at
    assert all(one.purpose is PlanPurpose.BASELINE for one in view.issued_plans)
    assert (run.job.faults.num_faults, run.job.faults.num_slow_plans) == (0, 0)


def test_a_job_that_changed_proves_its_saving_after_eight_tuned_iterations_again() -> None:
    run = JobRun().following(plan())
    for _ in range(4):
        run.pass_one()
    run.fall()
    run.fall()
    run.answered_late()
    at = run.first(AskPolicy, time_s=1.2)
    run.decide(plan("other@2"))
    run.pass_until(at + 3, time_s=1.2)

    assert run.first(SendPlan, time_s=1.2) == at + 3 + 7


def test_after_two_slow_plans_in_a_row_the_profile_is_measured_again() -> None:
    run = JobRun(JobRules(proof_iterations=0)).following(plan("tuned-1"))
    run.fall()
    run.answered_late()
    at = run.first(AskPolicy)
    assert run.job.knowledge.generation == 0
    run.decide(plan("tuned-2"))
    run.pass_until(at + 3)
    run.fall()
    run.answered_late()

    for _ in range(60):
        commands = run.pass_one()
        if commands:
            break

    assert kinds(commands) == ["RecordPhase", "AskPolicy"]
    assert run.job.phase_reason == "2 plans in a row were slow: beginning again"
    assert (asked_view(commands).view.generation, run.job.faults.num_faults) == (1, 2)


def test_many_good_iterations_of_one_plan_clear_a_fault() -> None:
    run = JobRun(JobRules(proof_iterations=0, redeeming_iterations=10)).following(plan("tuned-1"))
    run.fall()
    run.answered_late()
    at = run.first(AskPolicy)
    run.decide(plan("tuned-2"))
    run.pass_until(at + 3)

    run.pass_until(at + 3 + 9)
    assert run.job.faults.num_faults == 1
    run.pass_one()
    assert run.job.faults.num_faults == 0


def test_a_fault_without_a_plan_counts_full_speed_from_the_next_iteration_on() -> None:
    run = JobRun().asked()

    run.feed(PolicyFailed("late"))

    assert run.job.faults.fell_back_at == FIRST_ASKED + 1


def test_iterations_since_a_fall_back_do_not_describe_the_job_before_it() -> None:
    """Few iterations before and many after: taken together they would look like the new ones alone."""
    run = JobRun(JobRules(baseline_iterations=3, fallback_iterations=30, proof_iterations=0))
    at = run.first(AskPolicy)
    run.decide(plan())
    run.pass_until(at + 3)
    run.fall()
    run.answered_late()

    run.first(AskPolicy, time_s=1.2)

    assert run.job.phase_reason == "the job changed: an iteration takes 1.200 times as long as before"


@pytest.mark.parametrize(("full_speed_s", "num_faults"), [(1.015, 0), (1.0, 1)])
def test_a_plan_is_no_fault_if_full_speed_is_as_slow_right_after_it(full_speed_s: float, num_faults: int) -> None:
    """On a busy host all iterations become longer for a while; a plan that is slower than full speed counts."""
    run = JobRun(JobRules(proof_iterations=0)).following(plan())
    run.first(SendPlan, time_s=1.015)
    assert (run.job.faults.num_faults, run.job.faults.num_slow_plans) == (1, 1)
    run.answered_late()

    run.first(AskPolicy, time_s=full_speed_s)

    assert (run.job.faults.num_faults, run.job.faults.num_slow_plans) == (num_faults, num_faults)
    assert run.job.phase is JobPhase.FALLBACK
