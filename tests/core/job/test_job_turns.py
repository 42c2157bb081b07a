"""When a job asks, what a plan that is answered leads to, and when its saving is proven, to the very iteration."""

from dataclasses import replace

import pytest

from gpuenergyd.core.job.messages import (
    AskPolicy,
    ControlLost,
    EndJob,
    Event,
    GpuViewChanged,
    JobPhase,
    LeaseGpus,
    MergedIterationObserved,
    RankChangedMicrobatches,
    RankLost,
    RankReleased,
    RecordPhase,
    ReplicaBlockBegins,
    RestoreGpus,
    SendPlan,
    TrialPermissionChanged,
)
from gpuenergyd.core.job.rules import JobRules, member_rules
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import (
    TRIALS,
    ClockPlan,
    PlanPurpose,
    RankClocks,
    baseline_plan,
    constant_clock_changes,
)
from gpuenergyd.core.pipeline.reorder import split_in_place
from gpuenergyd.core.policy_api.target import PerformanceTarget
from tests.support.job_run import (
    APPLIED,
    CLOCKS,
    FIRST_ASKED,
    SCHEDULE,
    TRIAL,
    UUIDS,
    JobRun,
    asked_view,
    joined,
    kinds,
    new_job,
    plan,
    sends,
)

# --- until the first plan ---


def test_after_two_warm_up_and_ten_baseline_iterations_the_policy_is_asked() -> None:
    run = JobRun()

    returned = [run.pass_one() for _ in range(12)]

    assert returned[2] == (RecordPhase(JobPhase.BASELINE, "warm"),)
    assert [index for index, commands in enumerate(returned) if commands] == [2, FIRST_ASKED]
    view = asked_view(returned[FIRST_ASKED]).view
    assert (view.baseline.num_iterations, view.generation, view.issued_plans) == (10, 0, ())


def test_a_disturbed_iteration_counts_neither_for_warm_up_nor_for_the_baseline() -> None:
    run = JobRun()
    run.pass_until(2)

    assert run.pass_one(is_regular=False) == ()
    assert kinds(run.pass_one()) == ["RecordPhase"]
    run.pass_one(is_regular=False)
    assert run.first(AskPolicy) == FIRST_ASKED + 2


def test_iterations_of_an_unknown_epoch_are_not_regular() -> None:
    run = JobRun()
    run.pass_until(2)

    for index in (2, 3):
        assert run.feed(MergedIterationObserved(IterationObservation(index, None, 1.0, (), ()), 9)) == ()
    assert run.job.phase is JobPhase.WARMUP
    assert [o.is_regular for o in run.job.observations] == [False] * 4


def test_nothing_is_observed_before_all_ranks_have_joined() -> None:
    job = new_job()
    job.handle(joined(0))

    assert job.handle(MergedIterationObserved(IterationObservation(0, None, 1.0, (), ()), 0)) == ()
    assert job.handle(ControlLost("no driver")) == ()
    assert (job.num_iterations, job.view(), job.phase) == (0, None, JobPhase.JOINING)


def test_the_policy_sees_new_gpu_measurements_of_joined_ranks_only() -> None:
    run = JobRun()
    better = replace(run.job.ranks.gpus[1], switch_latency_s=0.5)
    run.feed(GpuViewChanged(1, better))
    run.feed(GpuViewChanged(2, better))

    returned = [run.pass_one() for _ in range(12)]

    assert [gpu.switch_latency_s for gpu in asked_view(returned[-1]).view.gpus] == [0.01, 0.5]
    assert sorted(run.job.ranks.gpus) == [0, 1]


def test_at_most_one_question_is_open() -> None:
    run = JobRun().asked()

    assert [run.pass_one() for _ in range(5)] == [()] * 5
    run.job.control.question.accept_answer()
    assert kinds(run.pass_one()) == ["AskPolicy"]


# --- plans ---


def test_the_first_plan_takes_the_lease_and_is_followed_three_iterations_later() -> None:
    run = JobRun().asked()

    assert run.decide(plan()) == (
        LeaseGpus(UUIDS),
        SendPlan(plan(), 1, APPLIED),
        RecordPhase(JobPhase.TUNED, "why tuned"),
    )


def test_an_unchanged_plan_is_not_sent_again_and_a_new_one_needs_no_new_lease() -> None:
    run = JobRun().following(plan())

    run.pass_one()
    assert run.decide(plan()) == ()
    run.pass_one()
    assert run.decide(plan("better")) == (SendPlan(plan("better"), 2, 18),)
    assert run.job.phase_reason == "why better"


def test_a_plan_without_clocks_restores_the_gpus_and_iterations_until_then_are_not_regular() -> None:
    run = JobRun().following(plan())
    run.pass_one()
    full_speed = ClockPlan("un", PlanPurpose.BASELINE, reason="enough")

    returned = run.decide(full_speed)

    assert returned == (SendPlan(full_speed, 2, 17), RestoreGpus(UUIDS, "enough"))
    run.pass_until(19)
    assert [o.is_regular for o in run.job.observations[-4:]] == [False, False, True, True]
    assert run.feed(RankReleased(0)) == (
        RecordPhase(JobPhase.ENDED, "rank 0 was released"),
        EndJob("rank 0 was released"),
    )


def test_a_plan_without_clocks_before_any_lease_restores_nothing() -> None:
    run = JobRun().asked()

    assert kinds(run.decide(ClockPlan("un", PlanPurpose.BASELINE))) == ["SendPlan", "RecordPhase"]


@pytest.mark.parametrize("event", [RankReleased(1), RankLost(1, "killed")])
def test_the_end_restores_what_is_leased(event: Event) -> None:
    run = JobRun().following(plan())

    assert kinds(run.feed(event)) == ["RestoreGpus", "RecordPhase", "EndJob"]
    assert run.feed(event) == ()


def test_a_plan_runs_at_full_speed_inside_profiling_without_leaving_it() -> None:
    run = JobRun().asked()
    phases = []
    for own in (plan("p-1", TRIAL), plan("p-2", PlanPurpose.BASELINE, 1410), ClockPlan("p-3", PlanPurpose.BASELINE)):
        run.decide(own)
        phases.append(run.job.phase)
        run.pass_one()

    assert phases == [JobPhase.TRIAL, JobPhase.TRIAL, JobPhase.TUNED]


# --- proof of savings ---


def test_after_eight_tuned_iterations_a_proof_block_of_four_runs_at_full_speed() -> None:
    run = JobRun().following(plan())
    run.pass_until(APPLIED + 7)

    returned = run.pass_one()

    sent = [one for one in returned if isinstance(one, SendPlan)]
    assert [(one.plan.plan_id, one.apply_at_iteration) for one in sent] == [("proof", 24), ("tuned", 28)]
    assert sent[0].plan.reason == "proof of savings"
    assert sent[0].plan.ranks[0].sm_clocks_mhz == (1410,) * 8
    assert kinds(returned) == ["SendPlan", "SendPlan"]


def test_a_tuned_job_runs_at_full_speed_in_the_same_iterations_as_another_replica() -> None:
    run = JobRun().following(plan())
    run.pass_until(APPLIED + 3)

    returned = run.feed(ReplicaBlockBegins(APPLIED + 8))

    sent = [one for one in returned if isinstance(one, SendPlan)]
    assert [(one.plan.plan_id, one.apply_at_iteration) for one in sent] == [
        ("proof", APPLIED + 8),
        ("tuned", APPLIED + 12),
    ]
    run.pass_until(APPLIED + 16)  # it was this job's first proof block too


@pytest.mark.parametrize(("tuned", "ahead"), [(3, 2), (-1, 12)])
def test_a_block_of_another_replica_is_not_joined_too_late_or_under_a_plan_that_is_not_followed_yet(
    tuned: int, ahead: int
) -> None:
    run = JobRun().following(plan())
    run.pass_until(APPLIED + tuned)

    assert run.feed(ReplicaBlockBegins(run.job.reports.last_index + ahead)) == ()


@pytest.mark.parametrize(
    ("rules", "target"),
    [
        (JobRules(proof_iterations=0), PerformanceTarget()),
        (member_rules(JobRules()), PerformanceTarget()),
        (JobRules(), PerformanceTarget(straggler_time_s=1.5)),
    ],
)
def test_no_proof_block_runs_in_a_member_or_at_a_straggler_pace(rules: JobRules, target: PerformanceTarget) -> None:
    run = JobRun(rules, target).following(plan())

    run.pass_until(60)


def test_a_plan_without_clocks_has_no_proof_block() -> None:
    run = JobRun().following(ClockPlan("tuned", PlanPurpose.TUNED))

    run.pass_until(60)


def test_a_due_proof_block_waits_until_a_new_plan_is_in_force() -> None:
    run = JobRun().following(plan())
    run.pass_until(APPLIED + 7)
    run.decide(plan("better"))

    assert run.sent[-1].apply_at_iteration == 23
    assert run.first(SendPlan) == 23


def test_each_iteration_of_a_proof_block_but_the_first_updates_the_baseline() -> None:
    run = JobRun().following(plan())
    assert run.first(SendPlan) == 21
    sizes = []
    for _ in range(22, 30):
        run.pass_one()
        assert run.job.baseline is not None
        sizes.append(run.job.baseline.num_iterations)

    before = sizes[0]
    assert sizes == [before, before, before, before + 1, before + 2, before + 3, before + 3, before + 3]


def test_an_answer_of_the_present_baseline_sends_no_plan() -> None:
    run = JobRun().asked()

    assert kinds(run.decide(baseline_plan())) == ["RecordPhase"]
    assert run.job.phase is JobPhase.TUNED


def test_two_plans_in_one_iteration_are_followed_one_after_the_other() -> None:
    run = JobRun().asked()
    run.decide(plan())

    run.feed(ControlLost("worker gone"))

    assert [one.apply_at_iteration for one in run.sent] == [APPLIED, APPLIED + 1]


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
