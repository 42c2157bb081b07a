"""The policy `learning` starts from past jobs: near its last plan at once, and within the budget if they lie."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest

from gpuenergyd.core.job.messages import PastJobsFound, StoreCurves
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation, baseline, evaluate_clocks
from gpuenergyd_sim.virtual_training.random_jobs import COMMUNICATION_LATENCY_S, TrueJob, random_job
from tests.support.past_jobs import LEARNED_AT, LIES, changed

SEED = 3006
BUDGET_RATIO = 0.01
MAX_PLANS = 8


@dataclass(frozen=True)
class Run:
    """The true time and energy of each plan of a job, and what it left behind."""

    baseline: PlanEvaluation
    plans: tuple[PlanEvaluation, ...]
    stored: tuple[StoreCurves, ...]
    slowdown_ratio: float
    """Of all iterations since the first plan, as they were."""

    @property
    def saving_ratios(self) -> list[float]:
        """Energy saved by each plan."""
        return [1 - own.energy_j / self.baseline.energy_j for own in self.plans]

    @property
    def slowdown_ratios(self) -> list[float]:
        """Time of each plan above that at full speed."""
        return [own.iteration_time_s / self.baseline.iteration_time_s - 1 for own in self.plans]


def trained(job: TrueJob, past_jobs: Sequence[PastJob] = (), *, num_iterations: int = 75) -> Run:
    run = job.training(BubbleAware(), JobRules())
    run.feed(PastJobsFound(tuple(past_jobs)))
    issued: dict[str, ClockPlan] = {}
    for _ in range(num_iterations):
        run.run(1)
        issued.setdefault(run.job.current_plan.plan_id, run.job.current_plan)
    graph = dependency_graph(job.schedule, communication_latency_s=COMMUNICATION_LATENCY_S)
    truth, results = job.profile(), []
    for plan in (own for own in issued.values() if own.purpose is PlanPurpose.TUNED):
        clock_of = {
            instruction: clock or job.clocks_mhz[0]
            for rank in plan.ranks
            for instruction, clock in zip(job.schedule.orders[rank.pp_rank], rank.sm_clocks_mhz, strict=True)
        }
        results.append(evaluate_clocks(graph, truth, [clock_of[i] for i in graph.instructions]))
    first = next(k for k, (_, _, plan_id) in enumerate(run.history) if (plan_id or "").startswith("tuned"))
    at_full_speed = [time_s for time_s, _, _ in run.history[2:first]]
    since = [time_s for time_s, _, _ in run.history[first:]]
    return Run(
        baseline=baseline(graph, truth),
        plans=tuple(results),
        stored=tuple(own for own in run.commands if isinstance(own, StoreCurves)),
        slowdown_ratio=sum(since) / len(since) / (sum(at_full_speed) / len(at_full_speed)) - 1,
    )


@cache
def first_run() -> Run:
    return trained(random_job(SEED))


def left_behind(*, is_imported: bool = False) -> PastJob:
    """Return the first run as the daemon stores it, or as a file holds it, without the GPUs that it was measured on."""
    learned, gpu_uuids = first_run().stored[-1].learned, () if is_imported else ("GPU-0", "GPU-1")
    return PastJob("first-1", "first", LEARNED_AT, learned, is_imported, gpu_uuids)


def changed_job() -> TrueJob:
    """Return the job with other microbatches and measurements, under another name."""
    job = random_job(SEED)
    return replace(job, schedule=one_forward_one_backward(job.schedule.num_ranks, 12), seed=77)


@cache
def alone() -> Run:
    """Return the changed job's run without any past job."""
    return trained(changed_job())


@pytest.mark.thorough
def test_a_job_leaves_more_with_each_plan_and_the_last_one_once_more() -> None:
    stored = [own.learned for own in first_run().stored]

    assert 2 <= len(stored) <= MAX_PLANS + 1
    tried = [len({p.sm_clock_mhz for c in learned.curves for p in c.points}) for learned in stored]
    assert tried == sorted(tried)
    assert stored[-1].gpu_model_name == random_job(SEED).model.model_name


@pytest.mark.thorough
def test_a_changed_job_starts_near_its_last_plan_from_its_relative() -> None:
    known = trained(changed_job(), [left_behind()])

    assert known.saving_ratios[0] > known.saving_ratios[-1] - 0.01
    # Both first plans are as bold as draws from a belief permit, so equally good ones differ by their draws.
    assert known.saving_ratios[0] > alone().saving_ratios[0] - 0.002
    assert max(known.slowdown_ratios) <= BUDGET_RATIO


@pytest.mark.thorough
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_costs_no_more_than_the_budget_and_is_forgotten_within_eight_plans(lie: str) -> None:
    liars = [changed(left_behind(is_imported=True), LIES[lie], name=f"liar-{k}") for k in range(4)]

    deceived = trained(changed_job(), liars)

    assert max(deceived.slowdown_ratios) <= 2 * BUDGET_RATIO
    assert deceived.slowdown_ratio <= BUDGET_RATIO
    assert len(deceived.plans) <= MAX_PLANS
    assert deceived.saving_ratios[-1] > alone().saving_ratios[-1] - 0.01
