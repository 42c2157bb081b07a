"""The life of a job, event by event."""

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from gpuenergyd.core.job.job import TRANSITIONS
from gpuenergyd.core.job.messages import ControlLost, Event, JobPhase, PlanDecided, PolicyFailed, RecordPhase, SendPlan
from gpuenergyd.core.job.rules import JobRules, member_rules
from gpuenergyd.core.pipeline.graph import gpipe
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose, RankClocks
from gpuenergyd.core.pipeline.switching import SwitchLatency, constant_latency
from gpuenergyd.core.policy_api.policy import BaselineView, GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import JobError
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from tests.support.job_run import SCHEDULE, WORK, joined, new_job

PLANS = (ClockPlan("a", PlanPurpose.TRIAL), ClockPlan("b", PlanPurpose.TUNED), ClockPlan("c", PlanPurpose.TUNED))


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


def view(generation: int = 0) -> JobView:
    return JobView(
        "j", gpipe(1, 1), (), PerformanceTarget(), BaselineView(1.0, None, 10), (), PLANS,
        generation=generation, num_dropped_plans={PlanPurpose.TUNED: 5, PlanPurpose.BASELINE: 1},
    )  # fmt: skip


def test_the_view_counts_dropped_plans_too() -> None:
    assert view().num_issued() == 9
    assert view().num_issued(PlanPurpose.TUNED) == 7
    assert view().num_issued(PlanPurpose.TRIAL) == 1
    assert view().num_issued(PlanPurpose.BASELINE) == 1


def test_a_plan_id_carries_the_generation() -> None:
    assert [view(generation).plan_id("tuned-1") for generation in (0, 1, 2)] == ["tuned-1", "tuned-1@2", "tuned-1@3"]


def test_by_default_a_view_permits_clocks_and_has_no_latencies() -> None:
    assert view().can_set_clocks
    assert (view().communication_latency_s, view().launch_gap_s) == (0.0, 0.0)
    assert GpuView("GPU-0", "A100", (1410,), 0.25).switch_latency == constant_latency(0.25)


def gpu(k: int, host: str, *, num_gpus: int = 1, num_host_gpus: int = 0) -> GpuView:
    return GpuView(f"GPU-{k}", "A100", (1410,), 0.01, num_gpus=num_gpus, host=host, num_host_gpus=num_host_gpus)


@pytest.mark.parametrize(
    ("gpus", "num_calls"),
    [
        ([gpu(0, "a"), gpu(1, "a")], [1, 1]),  # nothing is known of others
        ([gpu(0, "a", num_host_gpus=2), gpu(1, "a", num_host_gpus=2)], [1, 1]),  # the host is this job's alone
        ([gpu(0, "a", num_host_gpus=1), gpu(1, "a", num_host_gpus=8)], [4, 4]),  # others joined since the first rank
        ([gpu(0, "a", num_gpus=2, num_host_gpus=5), gpu(1, "b", num_host_gpus=1)], [5, 1]),  # each host by itself
        ([gpu(0, "", num_host_gpus=3), gpu(1, "", num_host_gpus=3)], [2, 2]),  # rounded up
    ],
)
def test_driver_calls_are_counted_over_all_jobs_of_a_host(gpus: list[GpuView], num_calls: list[int]) -> None:
    latencies = replace(view(), gpus=tuple(gpus)).switch_latencies

    assert [latency.num_calls for latency in latencies] == num_calls
    assert [latency.host for latency in latencies] == [own.host for own in gpus]
    assert {latency.raise_s for latency in latencies} == {0.01}


def test_by_default_a_baseline_has_no_spread() -> None:
    assert BaselineView(1.0, None, 10).iteration_sigma_s == 0.0
