"""Orders of operators: another policy, slowdown or a pause is in force within two iterations, and can be withdrawn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    AskPolicy,
    ControlLost,
    Event,
    JobPhase,
    OperatorOrdered,
    PolicyFailed,
    RestoreGpus,
    SendPlan,
)
from gpuenergyd.core.job.operator_orders import OperatorOrders
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.target import PerformanceTarget
from tests.support.job_run import APPLIED, FIRST_ASKED, JobRun, asked_view, kinds, plan

PAUSED, RESUMED = OperatorOrders(is_paused=True), OperatorOrders(is_paused=False)


def ordered(**orders: object) -> OperatorOrdered:
    return OperatorOrdered(OperatorOrders(**orders), "ordered by uid 0")  # type: ignore[arg-type]


def test_a_pause_restores_the_gpus_at_once_and_no_plan_follows() -> None:
    run = JobRun().following(plan())

    commands = run.feed(ordered(is_paused=True))

    assert kinds(commands) == ["SendPlan", "RestoreGpus", "RecordPhase"]
    assert (run.job.phase, run.job.phase_reason) == (JobPhase.PAUSED, "ordered by uid 0")
    assert run.job.last_activity == (JobPhase.PAUSED, "ordered by uid 0")
    run.answered_late()
    for _ in range(100):
        assert kinds(run.pass_one()) == []


def test_a_resumed_job_is_planned_after_the_next_iteration_at_full_speed() -> None:
    run = JobRun().following(plan())
    run.feed(ordered(is_paused=True))
    run.answered_late()
    for _ in range(10):
        run.pass_one()

    run.feed(ordered())

    assert run.job.phase is JobPhase.FALLBACK
    assert run.first(AskPolicy, limit=1)
    assert kinds(run.decide(plan("again"))) == ["LeaseGpus", "SendPlan", "RecordPhase"]
    assert run.sent[-1].apply_at_iteration - run.index <= 2


def test_a_job_that_was_given_up_is_tried_again_when_it_is_resumed() -> None:
    run = JobRun(JobRules(max_faults=0)).following(plan())
    run.fall()
    run.answered_late()
    run.feed(ordered(is_paused=True))
    run.pass_one()

    run.feed(ordered())
    run.first(AskPolicy, limit=5)

    assert not run.job.is_given_up


def test_a_pause_before_the_first_plan_lets_the_baseline_be_measured() -> None:
    run = JobRun()
    run.feed(ordered(is_paused=True))
    for _ in range(FIRST_ASKED + 1):
        run.pass_one()

    assert (run.job.phase, run.job.baseline is not None) == (JobPhase.PAUSED, True)
    assert run.job.control.question.is_open is False


def test_a_pause_while_the_policy_is_asked_discards_its_answer() -> None:
    run = JobRun().asked()

    run.feed(ordered(is_paused=True))

    assert run.decide(plan()) == ()
    assert run.job.phase is JobPhase.PAUSED


@pytest.mark.parametrize("fault", [ControlLost("no GPU worker"), PolicyFailed("broken")])
def test_a_paused_job_stays_paused_whatever_fails(fault: Event) -> None:
    run = JobRun().following(plan())
    run.feed(ordered(is_paused=True))
    run.answered_late()

    run.feed(fault)

    assert run.job.phase is JobPhase.PAUSED
    for _ in range(50):
        assert kinds(run.pass_one()) == []


def test_a_larger_slowdown_is_asked_for_at_once() -> None:
    run = JobRun().following(plan())
    run.pass_one()
    run.decide(plan())

    commands = run.feed(ordered(max_slowdown_ratio=0.1))

    assert asked_view(commands).view.target == PerformanceTarget(0.1)
    assert run.job.description.target == PerformanceTarget(0.1)


def test_a_smaller_slowdown_ends_a_plan_that_is_too_slow_without_waiting_for_the_policy() -> None:
    run = JobRun(target=PerformanceTarget(0.2)).following(plan(expected_s=1.15))
    run.pass_one(1.15)
    run.decide(plan(expected_s=1.15))

    commands = run.feed(ordered(max_slowdown_ratio=0.0))

    assert kinds(commands) == ["SendPlan", "AskPolicy"]
    assert run.sent[-1].plan.purpose is PlanPurpose.BASELINE
    assert run.sent[-1].apply_at_iteration - run.index <= 2


def test_another_policy_begins_with_the_baseline_and_no_plan_of_the_one_before() -> None:
    run = JobRun().following(plan())
    run.pass_one()
    run.decide(plan())

    commands = run.feed(ordered(policy="other"))

    assert kinds(commands) == ["SendPlan", "RestoreGpus", "RecordPhase", "AskPolicy"]
    view = asked_view(commands).view
    assert {o.plan_id for o in view.observations} == {"baseline"}
    assert (run.job.description.policy, view.generation) == ("other", 1)
    assert kinds(run.decide(plan("new"))) == ["LeaseGpus", "SendPlan", "RecordPhase"]


def test_the_saving_of_the_policy_before_stays_the_estimate_until_a_new_one_is_measured() -> None:
    run = JobRun().following(plan())
    for _ in range(60):
        run.pass_one(1.0, energy_j=100.0 if run.is_at_full_speed else 90.0)
        if run.job.control.question.is_open:
            run.decide(plan())
    before = run.job.estimate()

    run.feed(ordered(policy="other"))

    assert before is not None
    assert before.saving is not None
    assert run.job.estimate() == before


def test_released_orders_leave_the_job_as_it_was_registered() -> None:
    run = JobRun(target=PerformanceTarget(0.02)).following(plan())
    run.feed(ordered(policy="other", max_slowdown_ratio=0.3, priority=5))

    run.feed(ordered())

    description = run.job.description
    assert (description.policy, description.target, description.priority) == ("p", PerformanceTarget(0.02), 0)


def test_orders_survive_a_restart_of_the_daemon() -> None:
    run = JobRun(target=PerformanceTarget(0.02)).following(plan())
    run.feed(ordered(policy="other", max_slowdown_ratio=0.3, priority=5, is_paused=True))
    next_job = Job(run.job.description, run.job.rules)

    next_job.restore(run.job.snapshot())
    next_job.handle(ordered())

    assert (next_job.description.policy, next_job.description.target) == ("p", PerformanceTarget(0.02))
    assert next_job.phase is JobPhase.FALLBACK


def test_orders_for_values_that_hold_already_change_nothing() -> None:
    run = JobRun().following(plan())

    assert run.feed(ordered(policy="p", max_slowdown_ratio=0.0, is_paused=False)) == ()
    assert run.job.phase is JobPhase.TUNED


@given(st.lists(st.sampled_from(["pass", "slow", "decide", "fail", "pause", "resume", "slower", "faster", "policy"])))
def test_whatever_is_ordered_a_paused_job_runs_at_full_speed_and_a_resumed_one_is_planned(steps: list[str]) -> None:
    run = JobRun().following(plan())
    orders = OperatorOrders()
    changes = {
        "pause": PAUSED,
        "resume": RESUMED,
        "slower": OperatorOrders(max_slowdown_ratio=0.3),
        "faster": OperatorOrders(max_slowdown_ratio=0.0),
    }
    for number, step in enumerate(steps):
        if step in changes or step == "policy":
            orders = orders.followed_by(changes.get(step) or OperatorOrders(policy=f"p{number}"))
            commands = run.feed(OperatorOrdered(orders, step))
            if run.job.is_paused:
                assert not any(isinstance(one, AskPolicy) for one in commands)
                assert not run.job.current_plan.ranks
                assert any(isinstance(one, RestoreGpus) for one in commands) or not run.job.control.has_lease
        elif step in {"pass", "slow"}:
            commands = run.pass_one(1.3 if step == "slow" else 1.0)
            if run.job.is_paused:
                assert not any(isinstance(one, AskPolicy | SendPlan) for one in commands)
        elif run.job.control.question.is_open:
            run.feed(PolicyFailed("broken")) if step == "fail" else run.decide(plan(f"plan-{number}"))

    run.feed(OperatorOrdered(OperatorOrders(), "released"))
    for _ in range(400):
        run.pass_one()
        if run.job.control.question.is_open:
            run.decide(plan("last"))
        if run.job.phase is JobPhase.TUNED:
            break
    assert run.job.phase is JobPhase.TUNED
    assert run.index > APPLIED
