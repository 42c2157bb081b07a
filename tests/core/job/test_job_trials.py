"""How long a job tries settings, and what is kept of that."""

import pytest

from gpuenergyd.core.job.messages import (
    AskPolicy,
    JobPhase,
    RankChangedMicrobatches,
    RecordPhase,
    TrialPermissionChanged,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import TRIALS, ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.pipeline.reorder import split_in_place
from tests.support.job_run import APPLIED, CLOCKS, SCHEDULE, TRIAL, JobRun, kinds, plan, sends

# --- trials ---


def test_endless_trials_spend_the_account_and_then_waits_at_full_speed() -> None:
    run = JobRun(JobRules(proof_iterations=0)).asked()
    for number in range(1, 100):
        if run.job.control.question.is_open:
            run.decide(plan(f"p-{number}", TRIAL))  # at 1200 of 1410 MHz
        run.pass_one(1.0 if run.is_at_full_speed else 1410 / 1200)

    account = run.job.control.experiments.account
    assert 1.0 < account.cost_s <= account.income_s
    assert run.job.phase is JobPhase.TRIAL
    assert "until the time account can pay the next experiment: 0.17 s at most" in run.job.phase_reason
    assert run.job.faults.num_faults == 0


@pytest.mark.parametrize("purpose", sorted(TRIALS))
def test_a_trial_runs_for_one_iteration_and_again_if_it_is_wanted(purpose: PlanPurpose) -> None:
    run = JobRun().asked()
    probe = plan("p-1", purpose)

    assert [(one.plan.plan_id, one.apply_at_iteration) for one in sends(run.decide(probe))] == [
        ("p-1", APPLIED),
        ("proof", APPLIED + 1),
    ]
    run.pass_until(APPLIED + 12)  # the policy has not answered yet
    assert kinds(run.decide(probe)) == ["SendPlan", "SendPlan"]
    assert run.sent[-2].plan is probe
    run.pass_one()
    assert run.decide(probe) == ()  # its iteration has not run yet


def test_the_next_trial_replaces_full_speed_after_the_last_one() -> None:
    run = JobRun().asked()
    run.decide(plan("p-1", TRIAL))
    run.pass_one()
    run.decide(plan("p-2", TRIAL))

    assert [(one.plan.plan_id, one.apply_at_iteration) for one in run.sent] == [
        ("p-1", APPLIED),
        ("proof", APPLIED + 1),
        ("p-2", APPLIED + 1),
        ("proof", APPLIED + 2),
    ]


def test_a_tuned_plan_stays_while_the_policy_takes_long() -> None:
    run = JobRun(JobRules(proof_iterations=0)).following(plan())

    run.pass_until(60)


def test_an_earlier_refusal_of_trials_applies_when_the_policy_wants_one() -> None:
    run = JobRun().asked()
    assert run.feed(TrialPermissionChanged("no budget")) == ()

    assert run.decide(plan("p-1", TRIAL)) == (RecordPhase(JobPhase.FALLBACK, "no budget"),)
    assert run.job.retry_in_iterations == 64
    run.feed(TrialPermissionChanged(None))
    run.first(AskPolicy)
    assert kinds(run.decide(plan("p-1", TRIAL))) == ["LeaseGpus", "SendPlan", "SendPlan", "RecordPhase"]


def test_a_refusal_of_trials_does_not_stop_the_trial_of_an_order_at_full_speed() -> None:
    run = JobRun().following(plan())
    run.pass_one()
    split = split_in_place(SCHEDULE).orders
    ranks = tuple(
        RankClocks(r, (CLOCKS[0],) * len(order), constant_clock_changes(order, CLOCKS[0]))
        for r, order in enumerate(split)
    )
    run.decide(ClockPlan("trial", TRIAL, ranks, orders=split))
    assert run.job.phase is JobPhase.TRIAL

    assert run.feed(TrialPermissionChanged("no budget")) == ()
    assert run.job.current_plan.plan_id == "trial"


def test_a_refusal_of_trials_does_not_stop_a_tuned_plan() -> None:
    run = JobRun().following(plan())

    assert run.feed(TrialPermissionChanged("no budget")) == ()
    assert run.job.phase is JobPhase.TUNED


# --- what is kept ---


def test_iterations_that_tried_another_number_of_microbatches_are_dropped() -> None:
    """A policy would compare their times with full speed in the new number, which takes longer at every clock."""
    run = JobRun().asked()
    run.decide(plan("p-1", TRIAL))
    run.pass_until(APPLIED + 2)
    assert "p-1" in {seen.plan_id for seen in run.job.knowledge.iterations.kept}

    orders = one_forward_one_backward(2, 8).orders
    for rank, order in enumerate(orders):
        run.feed(RankChangedMicrobatches(rank, order, 8))

    assert run.job.phase is JobPhase.BASELINE
    assert run.job.knowledge.iterations.kept == []
    assert run.job.knowledge.generation == 1
