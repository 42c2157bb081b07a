"""The life of a job, event by event."""

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from gpuenergyd.core.job.job import TRANSITIONS
from gpuenergyd.core.job.messages import (
    ControlLost,
    Event,
    JobPhase,
    PlanDecided,
    PolicyFailed,
    RecordPhase,
    SendPlan,
)
from gpuenergyd.core.job.rules import JobRules, member_rules
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose, RankClocks
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.errors import JobError
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.job_run import SCHEDULE, WORK, joined, new_job


def test_every_event_has_a_transition_that_takes_it() -> None:
    taken = {event: get_type_hints(transition)["event"] for event, transition in TRANSITIONS.items()}

    assert taken == {event: event for event in get_args(Event)}


def test_a_job_warms_up_once_all_ranks_have_joined() -> None:
    job = new_job()

    assert job.handle(joined(1)) == ()
    assert job.handle(joined(0)) == (RecordPhase(JobPhase.WARMUP, "all ranks joined"),)


@pytest.mark.parametrize(("rank", "line"), [(-1, "has 2 ranks"), (2, "has 2 ranks"), (0, "already registered")])
def test_an_invalid_rank_is_refused_and_changes_nothing(rank: int, line: str) -> None:
    job = new_job()
    job.handle(joined(0))

    with pytest.raises(JobError, match=line):
        job.handle(joined(rank))
    assert job.handle(joined(1)) == (RecordPhase(JobPhase.WARMUP, "all ranks joined"),)


def test_orders_that_deadlock_are_refused() -> None:
    job = new_job()
    job.handle(joined(0))

    with pytest.raises(JobError, match="do not fit together"):
        job.handle(joined(1, order=SCHEDULE.orders[1][:3]))
    assert job.phase is JobPhase.JOINING


class _Asked:
    """Keeps what it is asked and answers nothing new."""

    def __init__(self) -> None:
        self.views: list[JobView] = []

    def next_plan(self, view: JobView) -> ClockPlan:
        self.views.append(view)
        order = view.schedule.orders
        return ClockPlan(
            "slow",
            PlanPurpose.TUNED,
            tuple(RankClocks(r, (1200,) * len(o), (ClockChange(o[0], 0.0, 1200),)) for r, o in enumerate(order)),
        )


def trained(policy: _Asked, thinking_iterations: int = 0) -> VirtualTraining:
    run = VirtualTraining(SCHEDULE, WORK, policy, thinking_iterations=thinking_iterations)
    run.run(16)
    return run


@pytest.mark.parametrize("answer", [PolicyFailed("late"), PlanDecided(ClockPlan("late", PlanPurpose.TUNED))])
def test_an_answer_to_a_question_from_before_a_fall_back_is_ignored(answer: PolicyFailed | PlanDecided) -> None:
    run = trained(_Asked(), thinking_iterations=10)
    job = run.job
    job.handle(ControlLost("the GPU worker died"))
    plans, faults = list(job.knowledge.plans.kept), job.faults.num_faults

    assert job.handle(answer) == ()
    assert list(job.knowledge.plans.kept) == plans
    assert job.faults.num_faults == faults
    assert job.phase is JobPhase.FALLBACK


def test_a_job_of_many_plans_keeps_the_last_epochs_and_their_iterations() -> None:
    always_proving = JobRules(first_proof_after=5, proof_budget_ratio=1.0, proof_distance_growth=1.0)
    run = VirtualTraining(SCHEDULE, WORK, _Asked(), max_slowdown_ratio=0.5, rules=always_proving)
    run.run(350)

    sent = [c.plan_epoch for c in run.commands if isinstance(c, SendPlan)]
    assert len(sent) > 70
    assert sent == list(range(1, len(sent) + 1))
    assert len(run.job.snapshot().knowledge.plans.id_of_epoch) <= 64 + 1, "and full speed without a plan"
    assert {plan_id for _, _, plan_id in run.history[-50:]} == {"slow", "proof"}


def test_a_slow_plan_is_found_after_any_time_at_full_speed() -> None:
    run = VirtualTraining(SCHEDULE, WORK, _Asked(), thinking_iterations=JobRules().max_observations + 20)
    run.run(JobRules().max_observations + 80)

    assert {plan_id for _, _, plan_id in run.history} > {"slow"}
    assert any(isinstance(c, RecordPhase) and c.phase is JobPhase.FALLBACK for c in run.commands)


def test_a_member_runs_no_proof_blocks_and_is_guarded_and_paid_by_its_leader() -> None:
    own = JobRules()
    part = member_rules(own)

    assert part.proof_iterations == 0
    assert not part.is_guarding
    names = ("proof_iterations", "is_guarding")
    assert replace(part, **{name: getattr(own, name) for name in names}) == own


def test_a_gpu_with_one_known_latency_has_it_for_every_change() -> None:
    gpu = joined(0).gpu

    assert gpu.switch_latency.late_s(900, 1410) == gpu.switch_latency.late_s(1410, 900) == 0.01
    known = SwitchLatency(0.02, 0.005)
    assert replace(gpu, switching=known).switch_latency == known
