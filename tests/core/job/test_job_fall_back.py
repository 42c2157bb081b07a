"""When a job goes back to full speed, whose fault that is, how long it waits, and what it still believes then."""

import pytest

from gpuenergyd.core.job.messages import (
    AskPolicy,
    ControlLost,
    Event,
    JobPhase,
    PlanDecided,
    PolicyFailed,
    PreviousRunFound,
    ProfilingPermissionChanged,
    RecordPhase,
    SendPlan,
    StoreRun,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from tests.support.job_run import FIRST_ASKED, PROFILING, JobRun, asked_view, kinds, plan


def test_a_slow_plan_is_taken_back_at_its_second_iteration_and_the_policy_asked_again_five_after() -> None:
    run = JobRun().following(plan())

    said = run.fall()

    assert kinds(said) == ["SendPlan", "RestoreGpus", "RecordPhase"]
    assert (run.sent[-1].plan.plan_id, run.sent[-1].apply_at_iteration) == ("full-speed-1", 18)
    assert (run.job.faults.num_faults, run.job.faults.num_slow_plans) == (1, 1)
    assert (run.job.phase, run.job.retry_in_iterations, run.job.is_given_up) == (JobPhase.FALLBACK, 8, False)
    run.pass_until(23)
    assert run.job.retry_in_iterations == 1
    assert kinds(run.pass_one()) == []  # the question asked before is still open


def test_an_answer_from_before_the_fall_counts_for_nothing_and_the_next_one_does() -> None:
    run = JobRun().following(plan())
    run.fall()
    run.answered_late()

    assert run.first(AskPolicy) == 23
    waits = [run.job.retry_in_iterations]
    assert kinds(run.decide(plan("again"))) == ["LeaseGpus", "SendPlan", "RecordPhase"]
    waits.append(run.job.retry_in_iterations)
    assert waits == [0, None]
    assert not run.job.is_given_up


def test_a_plan_that_is_tried_again_is_judged_by_what_it_does_then() -> None:
    run = JobRun().following(plan())
    run.fall()
    run.answered_late()
    run.first(AskPolicy)
    run.decide(plan())

    run.pass_until(31)

    assert run.job.phase is JobPhase.TUNED


def test_each_further_fault_doubles_the_wait() -> None:
    run = JobRun(JobRules(proof_iterations=0, relearn_after_slow_plans=99)).following(plan("tuned-1"))
    waits = []
    for number in range(2, 5):
        run.fall()
        waits.append(run.job.retry_in_iterations)
        run.answered_late()
        at = run.first(AskPolicy)
        run.decide(plan(f"tuned-{number}"))
        run.pass_until(at + 3)

    assert waits == [3 + 5, 3 + 10, 3 + 20]


def test_after_too_many_faults_the_job_stays_at_full_speed() -> None:
    run = JobRun(JobRules(max_faults=0)).following(plan())

    run.fall()

    assert run.job.is_given_up
    assert run.job.retry_in_iterations is None
    run.answered_late()
    run.pass_until(200)


def test_a_faster_job_is_not_the_plans_fault() -> None:
    run = JobRun().following(plan(expected_s=1.1))

    assert [kinds(run.pass_one(1.0)) for _ in range(4)][-1] == ["SendPlan", "RestoreGpus", "RecordPhase"]
    assert (run.job.faults.num_faults, run.job.faults.num_slow_plans, run.job.faults.num_fallbacks) == (0, 0, 1)


@pytest.mark.parametrize(
    ("event", "line", "num_faults", "wait"),
    [
        (PolicyFailed("it raised"), "policy p failed: it raised", 1, 5),
        (ControlLost("the worker died"), "the worker died", 1, 5),
        (PlanDecided(plan("odd", clock=1)), "policy p returned an invalid plan", 1, 5),
        (ProfilingPermissionChanged("no budget left"), "no budget left", 0, 64),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whose_fault_it_is_and_how_long_is_waited(event: Event, line: str, num_faults: int, wait: int) -> None:
    run = JobRun().asked()
    run.decide(plan("p", PROFILING))
    run.pass_one()

    said = run.tell(event)

    assert kinds(said) == ["SendPlan", "RestoreGpus", "RecordPhase"]
    assert (run.job.notices.last or "").startswith(line)
    assert run.job.notices.last_at == 13
    assert run.job.faults.num_faults == num_faults
    assert run.job.retry_in_iterations == run.sent[-1].apply_at_iteration - 12 + wait


def test_a_fault_before_any_plan_restores_nothing_and_waits_from_now_on() -> None:
    run = JobRun().asked()

    assert run.tell(PolicyFailed("late")) == (RecordPhase(JobPhase.FALLBACK, "policy p failed: late"),)
    assert run.job.faults.num_fallbacks == 0
    assert run.first(AskPolicy) == FIRST_ASKED + 5


def test_control_lost_before_there_is_a_baseline_waits_for_it() -> None:
    run = JobRun()
    run.pass_until(2)
    run.pass_one()
    run.tell(ControlLost("worker gone"))

    assert run.job.phase is JobPhase.FALLBACK
    assert run.first(AskPolicy) == FIRST_ASKED


def test_full_speed_that_has_moved_is_another_job_and_what_was_known_is_forgotten() -> None:
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


def test_two_slow_plans_in_a_row_are_learned_anew() -> None:
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
        said = run.pass_one()
        if said:
            break

    assert kinds(said) == ["RecordPhase", "AskPolicy"]
    assert run.job.phase_reason == "2 plans in a row were slow: profiling again"
    assert (asked_view(said).view.generation, run.job.faults.num_faults) == (1, 2)


def test_what_an_earlier_run_left_is_forgotten_where_it_does_not_hold() -> None:
    run = JobRun(JobRules(proof_iterations=0, relearn_after_slow_plans=1))
    run.tell(PreviousRunFound(PreviousRun("earlier", (), ())))
    run.following(plan("tuned-1"))
    run.fall()
    run.answered_late()

    for _ in range(60):
        said = run.pass_one()
        if said:
            break

    assert kinds(said) == ["StoreRun", "RecordPhase", "AskPolicy"]
    assert said[0] == StoreRun(None)
    assert run.job.knowledge.previous_run is None


def test_many_good_iterations_of_one_plan_make_up_for_a_fault() -> None:
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

    run.tell(PolicyFailed("late"))

    assert run.job.faults.fell_back_at == FIRST_ASKED + 1


def test_what_ran_since_the_fall_is_no_part_of_what_the_job_was_before() -> None:
    """Few iterations before and many after: taken together they would look like the new ones alone."""
    run = JobRun(JobRules(baseline_iterations=3, fallback_iterations=30, proof_iterations=0))
    at = run.first(AskPolicy)
    run.decide(plan())
    run.pass_until(at + 3)
    run.fall()
    run.answered_late()

    run.first(AskPolicy, time_s=1.2)

    assert run.job.phase_reason == "the job changed: an iteration takes 1.200 times as long as before"


def profiled_then_tuned() -> JobRun:
    """Return a run that profiled one iteration with its energy, and follows a tuned plan made from it."""
    run = JobRun(JobRules(proof_iterations=0)).asked()
    run.decide(plan("probe", PlanPurpose.PROFILE))
    run.pass_until(FIRST_ASKED + 3)
    run.pass_one(energy_j=50.0)
    run.decide(plan())
    run.pass_until(FIRST_ASKED + 7)
    return run


def test_a_changed_job_keeps_the_shape_of_what_it_showed_before() -> None:
    run = profiled_then_tuned()
    run.fall()
    run.answered_late()

    run.first(AskPolicy, time_s=1.2)

    known = run.job.knowledge.previous_run
    assert known is not None
    assert known.is_of_this_run
    assert (known.figures, len(known.profile)) == ((("own", 7.0),), 1)


def test_a_changed_job_that_never_profiled_keeps_what_it_was_recalled_with_under_its_own_figures() -> None:
    run = JobRun(JobRules(proof_iterations=0))
    run.tell(PreviousRunFound(PreviousRun("earlier", (), (), figures=(("own", 1.0),))))
    run.following(plan())
    run.fall()
    run.answered_late()

    run.first(AskPolicy, time_s=1.2)

    known = run.job.knowledge.previous_run
    assert known is not None
    assert (known.job_id, known.figures, known.is_of_this_run) == ("earlier", (("own", 7.0),), True)
