"""Other targets while a plan runs: which plan is in force at once, and by what it is judged."""

from gpuenergyd.core.job.messages import SendPlan, StragglerChanged, TargetChanged
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.policy_api.target import PerformanceTarget
from tests.support.job_run import JobRun, asked_view, kinds, plan


def test_a_plan_kept_for_a_new_target_is_guarded_by_it_from_the_next_iteration() -> None:
    run = JobRun(JobRules(proof_iterations=0), PerformanceTarget(0.2)).following(plan())
    for _ in range(4):
        assert kinds(run.pass_one(1.15)) in ([], ["AskPolicy"])
        run.decide(plan())
    run.feed(TargetChanged(PerformanceTarget()))
    run.pass_one(1.15)
    run.decide(plan())

    commands = [kinds(run.pass_one(1.15)) for _ in range(2)]

    assert "RestoreGpus" not in commands[0]
    assert "RestoreGpus" in commands[1]


def test_a_new_target_keeps_the_straggler_pace() -> None:
    run = JobRun(target=PerformanceTarget(0.1, straggler_time_s=1.5))

    run.feed(TargetChanged(PerformanceTarget(0.2)))

    assert run.job.target == PerformanceTarget(0.2, straggler_time_s=1.5)


def test_a_straggler_is_recorded_and_the_policy_is_asked_at_once() -> None:
    run = JobRun().following(plan())
    run.pass_one()
    run.decide(plan())

    commands = run.feed(StragglerChanged(1.4, "replica b is slow"))

    assert asked_view(commands).view.target.straggler_time_s == 1.4
    assert (run.job.notices.last, run.job.notices.last_at) == ("replica b is slow", 15)


def test_a_plan_kept_until_the_question_about_a_new_pace_is_answered_is_not_evaluated_by_another_target() -> None:
    run = JobRun(JobRules(proof_iterations=0), PerformanceTarget(0.2)).following(plan())
    run.pass_one(1.15)
    run.decide(plan())
    run.feed(TargetChanged(PerformanceTarget()))
    run.pass_one(1.15)
    run.feed(StragglerChanged(1.4, "slow"))
    assert asked_view(run.decide(plan())).view.target.straggler_time_s == 1.4  # the question that was held

    commands = [kinds(run.pass_one(1.15)) for _ in range(8)]

    assert commands == [[]] * 8


def test_before_the_first_plan_a_straggler_is_only_recorded() -> None:
    run = JobRun().asked()

    assert run.feed(StragglerChanged(1.4, "slow")) == ()
    assert run.job.target.straggler_time_s == 1.4


def straggled() -> JobRun:
    """Return a run with a plan for full speed, and one for a straggler of 1.4 s that is followed."""
    run = JobRun(JobRules(proof_iterations=0)).following(plan("tuned-1"))
    run.pass_one()
    run.feed(StragglerChanged(1.4, "slow"))
    run.decide(plan("tuned-1"))
    run.feed(StragglerChanged(1.4, "slow"))
    run.decide(plan("for-1.4"))
    assert run.sent[-1].plan.plan_id == "for-1.4"
    return run


def test_when_a_straggler_recovers_the_newest_plan_that_is_fast_enough_returns() -> None:
    run = straggled()
    run.feed(StragglerChanged(1.3, "less slow"))
    run.decide(plan("for-1.3"))

    commands = run.feed(StragglerChanged(None, "recovered"))

    assert [one.plan.plan_id for one in commands if isinstance(one, SendPlan)] == ["tuned-1"]
    assert run.job.current_plan.plan_id == "tuned-1"


def test_a_plan_stays_when_the_straggler_pace_changes_little() -> None:
    run = straggled()

    assert run.feed(StragglerChanged(1.3995, "hardly less")) != ()
    assert run.sent[-1].plan.plan_id == "for-1.4"
    run.feed(StragglerChanged(1.39, "less"))
    assert run.sent[-1].plan.plan_id == "tuned-1"


def test_without_a_fast_enough_plan_a_recovered_straggler_leads_to_full_speed() -> None:
    run = JobRun(JobRules(proof_iterations=0), PerformanceTarget(straggler_time_s=1.4)).following(plan("for-1.4"))
    run.pass_one()
    run.decide(plan("for-1.4"))

    commands = run.feed(StragglerChanged(None, "recovered"))

    assert [one.plan.plan_id for one in commands if isinstance(one, SendPlan)] == ["proof"]
    assert run.sent[-1].plan.reason == "a straggler has recovered"
    assert kinds(commands) == ["SendPlan", "AskPolicy"]
    assert kinds(run.decide(plan("for-1.4"))) == ["SendPlan"]


def test_iterations_at_a_straggler_pace_are_marked() -> None:
    run = straggled()
    run.pass_until(25)

    straggler_pace = {o.plan_id: o.is_at_straggler_pace for o in run.job.observations}

    assert straggler_pace == {"baseline": False, "tuned-1": False, "for-1.4": True}


def test_an_unchanged_straggler_pace_keeps_the_open_question_valid() -> None:
    run = straggled()
    assert kinds(run.pass_one()) == ["AskPolicy"]

    assert run.feed(StragglerChanged(1.4, "as slow as before")) == ()
    assert kinds(run.decide(plan("better"))) == ["SendPlan"]


def test_a_straggler_that_comes_while_the_policy_thinks_is_asked_about_as_soon_as_it_has_answered() -> None:
    run = JobRun(JobRules(proof_iterations=0)).following(plan("tuned-1"))
    run.pass_one()
    assert run.feed(StragglerChanged(1.4, "slow")) == ()

    commands = run.decide(plan("tuned-1"))

    assert asked_view(commands).view.target.straggler_time_s == 1.4
    assert "AskPolicy" not in kinds(run.decide(plan("for-1.4")))


def test_a_recovered_straggler_outdates_the_open_question() -> None:
    run = straggled()
    assert kinds(run.pass_one()) == ["AskPolicy"]

    run.feed(StragglerChanged(None, "recovered"))
    assert run.decide(plan("for-1.4-again")) == ()
