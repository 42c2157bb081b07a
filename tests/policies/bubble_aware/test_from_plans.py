"""The policy `learning`: a plan right after the baseline, no profiling, better plans from what plans have shown."""

from statistics import mean

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import dependency_graph
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks
from gpuenergyd_sim.virtual_training.random_jobs import COMMUNICATION_LATENCY_S, TrueJob, random_job

NUM_BASELINE_ITERATIONS = 12


def regret_ratio(job: TrueJob, plan: ClockPlan) -> float:
    """Return the energy of a plan's clocks on the true tables above that of the best plan as fast as full speed."""
    truth = job.profile()
    graph = dependency_graph(job.schedule, communication_latency_s=COMMUNICATION_LATENCY_S)
    best = solve(graph, truth, deadline_s=baseline(graph, truth).iteration_time_s)
    clock_of = {
        instruction: clock or job.clocks_mhz[0]
        for rank in plan.ranks
        for instruction, clock in zip(job.schedule.orders[rank.pp_rank], rank.sm_clocks_mhz, strict=True)
    }
    return evaluate_clocks(graph, truth, [clock_of[i] for i in graph.instructions]).energy_j / best.energy_j - 1


def test_the_first_plan_follows_the_baseline_and_later_ones_are_near_the_best() -> None:
    job = random_job(3006)
    run = job.training(BubbleAware(), JobRules())
    issued: dict[str, ClockPlan] = {}
    for _ in range(40):
        run.run(1)
        issued.setdefault(run.job.current_plan.plan_id, run.job.current_plan)

    assert all(plan.purpose is not PlanPurpose.TRIAL for plan in issued.values())
    plan_ids = [plan_id for _, _, plan_id in run.history]
    first = next(k for k, plan_id in enumerate(plan_ids) if plan_id == "tuned-1")
    assert first <= NUM_BASELINE_ITERATIONS + 3
    tuned_s = [time_s for time_s, _, plan_id in run.history if (plan_id or "").startswith("tuned")]
    assert mean(tuned_s) < 1.01 * mean(time_s for time_s, _, _ in run.history[2:NUM_BASELINE_ITERATIONS])
    last = [plan for plan in issued.values() if plan.purpose is PlanPurpose.TUNED][-1]
    assert regret_ratio(job, last) < 0.02
