"""Curves of past jobs reach the policy before it begins, and those that a plan brings are stored."""

from dataclasses import replace

from gpuenergyd.core.job.messages import PastJobsFound, StoreCurves
from gpuenergyd.core.job.rules import JobRules
from tests.support.job_run import JobRun, plan
from tests.support.past_jobs import past_job

FOUND = PastJobsFound((past_job(),))


def test_past_jobs_that_are_found_in_time_are_in_the_view() -> None:
    run = JobRun()
    run.feed(FOUND)

    run.asked()
    view = run.job.view()
    assert view is not None
    assert view.past_jobs == FOUND.jobs


def test_past_jobs_that_come_late_are_not_used() -> None:
    run = JobRun().following(plan("tuned-1"))

    run.feed(FOUND)

    assert run.job.knowledge.past_jobs == ()


def test_the_curves_of_a_plan_are_stored_and_the_plan_is_kept_without_them() -> None:
    run, learned = JobRun().asked(), past_job().learned

    commands = run.decide(replace(plan("tuned-1"), learned=learned))

    assert [own.learned for own in commands if isinstance(own, StoreCurves)] == [learned]
    assert run.job.current_plan.plan_id == "tuned-1"
    assert run.job.current_plan.learned is None


def test_impossible_curves_are_not_stored() -> None:
    run, learned = JobRun().asked(), past_job().learned

    commands = run.decide(replace(plan("tuned-1"), learned=replace(learned, power_w=-5.0)))

    assert not any(isinstance(own, StoreCurves) for own in commands)
    assert run.job.current_plan.plan_id == "tuned-1"


def test_past_jobs_are_dropped_when_the_plans_made_from_them_are_slow_again_and_again() -> None:
    run = JobRun(JobRules(proof_iterations=0, relearn_after_slow_plans=1))
    run.feed(FOUND)
    run.following(plan("tuned-1"))
    run.fall()
    run.answered_late()

    for _ in range(60):
        if run.pass_one():
            break

    assert run.job.knowledge.past_jobs == ()


def test_past_jobs_survive_a_restart_of_the_daemon() -> None:
    run, next_run = JobRun(), JobRun()
    run.feed(FOUND)
    run.asked()

    next_run.job.restore(run.job.snapshot())

    assert next_run.job.knowledge.past_jobs == FOUND.jobs
