"""How long a job is profiled and what is kept of that."""

import pytest

from gpuenergyd.core.job.messages import (
    AskPolicy,
    JobPhase,
    PreviousRunFound,
    ProfilingPermissionChanged,
    RecordPhase,
    SendPlan,
    StoreRun,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.plan import ClockPlan, RankClocks, constant_clock_changes
from gpuenergyd.core.pipeline.reorder import split_in_place
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from tests.support.job_run import APPLIED, CLOCKS, PROFILING, SCHEDULE, JobRun, asked_view, kinds, plan

# --- profiling ---


def test_endless_profiling_is_a_fault_and_restarts_after_as_many_full_speed_iterations() -> None:
    run = JobRun(JobRules(max_profile_iterations=8)).asked()
    run.decide(plan("p-1", PROFILING))
    run.pass_until(APPLIED)
    for number in range(2, 9):
        run.pass_one()
        run.decide(plan(f"p-{number}", PROFILING))
    run.pass_one()

    assert run.job.phase_reason == "still profiling after 8 iterations"
    assert run.job.faults.num_faults == 1
    assert run.job.faults.retry_at_iteration == run.sent[-1].apply_at_iteration + 8
    for _ in range(40):
        commands = run.pass_one()
        if commands:
            break
    assert run.job.phase_reason == "profiling did not end: profiling again, from the beginning"
    assert asked_view(commands).view.generation == 1


def test_a_profiling_plan_is_relieved_after_three_iterations_without_an_answer() -> None:
    run = JobRun().asked()
    probe = plan("p-1", PROFILING)
    run.decide(probe)
    run.pass_until(APPLIED + 2)

    commands = run.pass_one()

    assert [one.plan.plan_id for one in commands if isinstance(one, SendPlan)] == ["proof"]
    assert run.sent[-1].plan.reason == "the policy has not answered yet"
    run.pass_until(APPLIED + 12)  # and once only
    again = run.decide(probe)
    assert kinds(again) == ["SendPlan"]
    assert run.sent[-1].plan is probe
    run.pass_one()
    assert run.decide(probe) == ()


def test_a_tuned_plan_stays_while_the_policy_takes_long() -> None:
    run = JobRun(JobRules(proof_iterations=0)).following(plan())

    run.pass_until(60)


def test_an_earlier_refusal_of_profiling_applies_when_the_policy_wants_to_profile() -> None:
    run = JobRun().asked()
    assert run.feed(ProfilingPermissionChanged("no budget")) == ()

    assert run.decide(plan("p-1", PROFILING)) == (RecordPhase(JobPhase.FALLBACK, "no budget"),)
    assert run.job.retry_in_iterations == 64
    run.feed(ProfilingPermissionChanged(None))
    run.first(AskPolicy)
    assert kinds(run.decide(plan("p-1", PROFILING))) == ["LeaseGpus", "SendPlan", "RecordPhase"]


def test_a_refusal_of_profiling_does_not_stop_the_trial_of_an_order_at_full_speed() -> None:
    run = JobRun().following(plan())
    run.pass_one()
    split = split_in_place(SCHEDULE).orders
    ranks = tuple(
        RankClocks(r, (CLOCKS[0],) * len(order), constant_clock_changes(order, CLOCKS[0]))
        for r, order in enumerate(split)
    )
    run.decide(ClockPlan("trial", PROFILING, ranks, orders=split))
    assert run.job.phase is JobPhase.PROFILING

    assert run.feed(ProfilingPermissionChanged("no budget")) == ()
    assert run.job.current_plan.plan_id == "trial"


def test_a_refusal_of_profiling_does_not_stop_a_tuned_plan() -> None:
    run = JobRun().following(plan())

    assert run.feed(ProfilingPermissionChanged("no budget")) == ()
    assert run.job.phase is JobPhase.TUNED


# --- what is kept ---


def test_the_profile_of_a_plan_is_stored_after_eight_iterations() -> None:
    run = JobRun(JobRules(proof_iterations=0))
    run.feed(PreviousRunFound(PreviousRun("earlier", (), (), figures=(("own", 1.0),))))
    run.following(plan())

    at = run.first(StoreRun)

    assert at == APPLIED + 7
    assert run.job.knowledge.plans.proven_id == "tuned"
    with pytest.raises(AssertionError, match="no StoreRun"):
        run.first(StoreRun, limit=30)


def test_a_stored_run_holds_its_profile_and_the_figures_of_its_plan() -> None:
    run = JobRun(JobRules(proof_iterations=0)).asked()
    run.decide(plan("p-1", PROFILING))
    run.pass_until(APPLIED)
    run.pass_one(energy_j=50.0)
    run.decide(plan())
    for _ in range(20):
        kept = [one for one in run.pass_one() if isinstance(one, StoreRun)]
        if kept:
            break

    assert kept[0].run is not None
    assert (kept[0].run.figures, len(kept[0].run.profile)) == ((("own", 7.0),), 1)
    assert {o.plan_id for o in kept[0].run.full_speed} == {"previous-full-speed"}


def test_profiling_iterations_without_an_answer_count_towards_the_limit() -> None:
    run = JobRun(JobRules(max_profile_iterations=2, relief_iterations=99)).asked()
    probe = plan("p-1", PROFILING)
    run.decide(probe)
    run.pass_until(APPLIED + 5)  # five of them, and one question open all the while
    run.decide(probe)

    assert "RestoreGpus" in kinds(run.pass_one())
    assert run.job.phase_reason == "still profiling after 6 iterations"
