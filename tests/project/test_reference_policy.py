"""The reference policy of the examples: short, on public interfaces only, and it saves energy in the permitted time."""

import ast
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from statistics import fmean, median

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.schedules import dualpipe_v, interleaved, zero_bubble_h1
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.testing import SimulatedJob, job_view, pipeline_profile
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, a100_stages
from tests.support.reference_policy import PACKAGE, ReferencePolicy
from tests.support.virtual_loop import VirtualLoop

SOURCE = PACKAGE / "reference_policy.py"
PIPELINE = one_forward_one_backward(4, 8)
UNEVEN = (1.0, 0.9, 1.0, 1.1)
LOOP = Schedule("loop", 1, ((Instruction(0, InstructionKind.F, 0),),))
NUM_BASELINE, NUM_LAST = 12, 30
LATE_RATIO = 0.005
NUM_MEASURED_PLANS = 4


def uneven_pipeline(
    max_slowdown_ratio: float = 0.0, *, scale: float = 1.0, slow_factor_when_tuned: float = 1.0
) -> VirtualTraining:
    """Return a noisy pipeline whose last stage is the slowest."""
    return VirtualTraining(
        PIPELINE, a100_stages(UNEVEN, scale=scale), ReferencePolicy(), max_slowdown_ratio=max_slowdown_ratio,
        noise_ratio=0.002, energy_noise_ratio=0.01, slow_factor_when_tuned=slow_factor_when_tuned,
    )  # fmt: skip


@cache
def trained(permitted_ratio: float = 0.0, *, scale: float = 1.0) -> VirtualTraining:
    """Return an uneven pipeline after a hundred iterations, which no test continues."""
    run = uneven_pipeline(permitted_ratio, scale=scale)
    run.run(100)
    return run


def plain_loop(max_slowdown_ratio: float) -> VirtualTraining:
    """Return a loop of one instruction per iteration."""
    work = {(0, InstructionKind.F): A100Work(0.05, 0.25, 0.25)}
    return VirtualTraining(
        LOOP, work, ReferencePolicy(), max_slowdown_ratio=max_slowdown_ratio, noise_ratio=0.002, energy_noise_ratio=0.01
    )


def change_ratios(run: VirtualTraining) -> tuple[float, float]:
    """Return how much the last iterations differ from full speed, in time and energy."""
    full_speed, last = run.history[2:NUM_BASELINE], run.history[-NUM_LAST:]
    last_s, full_speed_s = (median(time_s for time_s, _, _ in own) for own in (last, full_speed))
    last_j, full_speed_j = (fmean(energy_j for _, energy_j, _ in own) for own in (last, full_speed))
    return last_s / full_speed_s - 1, last_j / full_speed_j - 1


def clocks_mhz(plan: ClockPlan) -> set[int | None]:
    return {clock for rank in plan.ranks for clock in rank.sm_clocks_mhz}


# --- what it is ---


def test_it_has_at_most_300_lines_and_few_constants() -> None:
    text = SOURCE.read_text(encoding="utf-8")
    assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    constants = [node for node in assigned if isinstance(node.value, ast.Constant)]

    assert len(text.splitlines()) <= 300
    assert len(constants) <= 5


def test_it_imports_public_interfaces_only() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    public = ("policy_api", "pipeline", "measurement")

    own = [name for name in imported if name.startswith("gpuenergyd")]
    assert own
    assert [name for name in own if not name.startswith(tuple(f"gpuenergyd.core.{room}." for room in public))] == []


# --- what it saves ---


@pytest.mark.parametrize(("permitted_ratio", "least_saving_ratio"), [(0.0, 0.13), (0.05, 0.18)])
def test_an_uneven_pipeline_saves_energy_in_the_permitted_time(
    permitted_ratio: float, least_saving_ratio: float
) -> None:
    run = trained(permitted_ratio)

    slower_ratio, energy_ratio = change_ratios(run)
    assert run.job.phase is JobPhase.TUNED
    assert slower_ratio <= permitted_ratio + LATE_RATIO
    assert energy_ratio <= -least_saving_ratio


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_time_account_can_pay_what_it_costs(scale: float) -> None:
    run = trained(scale=scale)

    account, full_speed_s = run.job.account, median(time_s for time_s, _, _ in run.history[2:NUM_BASELINE])
    assert account is not None
    assert account.cost_s <= account.income_s
    assert sum(time_s - full_speed_s for time_s, _, _ in run.history) <= account.income_s


def test_the_first_plan_is_not_late_and_later_ones_save_more() -> None:
    job = SimulatedJob(PIPELINE, pipeline_profile(PIPELINE, scales=UNEVEN))

    job.run_policy(ReferencePolicy(), 60)

    under = {plan.plan_id: [o for o in job.observations if o.plan_id == plan.plan_id][-1] for plan in job.plans}
    baseline, *tuned = under.values()
    assert len(tuned) == NUM_MEASURED_PLANS + 1
    assert tuned[0].iteration_time_s == pytest.approx(baseline.iteration_time_s)
    assert max(own.iteration_time_s for own in tuned) <= (1 + LATE_RATIO) * baseline.iteration_time_s
    energies_j = [own.energy_j or 0.0 for own in (baseline, *tuned)]
    assert energies_j[0] > energies_j[1] > energies_j[2]
    assert energies_j[-1] == min(energies_j)


def test_its_fit_predicts_the_energy_of_the_last_plan_better_than_that_of_the_first() -> None:
    run = trained()

    baseline_j = fmean(energy_j for _, energy_j, _ in run.history[2:NUM_BASELINE])
    errors = []
    for number in (1, NUM_MEASURED_PLANS):
        plan = run.job.knowledge.plans.by_id(f"tuned-0-{number}")
        assert plan is not None
        assert plan.predicted_saving is not None
        measured_j = fmean(energy_j for _, energy_j, plan_id in run.history if plan_id == plan.plan_id)
        errors.append(abs(plan.predicted_saving.ratio - (1 - measured_j / baseline_j)))
    assert errors[-1] < 0.01 < errors[0]


def test_a_plain_loop_saves_only_if_slowdown_is_permitted() -> None:
    at_full_speed, permitted = plain_loop(0.0), plain_loop(0.1)

    at_full_speed.run(60)
    permitted.run(100)

    slower_ratio, energy_ratio = change_ratios(permitted)
    assert not any(plan.ranks for plan in at_full_speed.job.knowledge.plans.kept)
    assert "no plan saves energy" in at_full_speed.job.phase_reason
    assert slower_ratio <= 0.1 + LATE_RATIO
    assert energy_ratio <= -0.1


def test_a_loop_that_waits_saves_at_the_same_speed() -> None:
    run = VirtualLoop(policy=ReferencePolicy(), noise_ratio=0.002, energy_noise_ratio=0.01)

    run.run(100)

    slower_ratio, energy_ratio = change_ratios(run)
    assert slower_ratio <= LATE_RATIO
    assert energy_ratio <= -0.025


def test_plans_that_are_late_do_not_stay() -> None:
    run = uneven_pipeline(slow_factor_when_tuned=1.03)

    run.run(200)

    slower_ratio, _ = change_ratios(run)
    assert slower_ratio <= LATE_RATIO
    assert "cheapest of 4 plans" in run.job.phase_reason


# --- what it promises ---


@pytest.mark.parametrize(
    "schedule",
    [gpipe(2, 4), interleaved(2, 4, 2), zero_bubble_h1(4, 8), dualpipe_v(2, 4), one_forward_one_backward(1, 4), LOOP],
    ids=lambda schedule: schedule.name,
)
def test_plans_of_any_schedule_fit_the_gpus_and_the_permitted_time(schedule: Schedule) -> None:
    offered_mhz = tuple(range(1410, 500, -45))
    job = SimulatedJob(
        schedule, pipeline_profile(schedule, scales=UNEVEN, sm_clocks_mhz=offered_mhz), max_slowdown_ratio=0.1
    )

    last = job.run_policy(ReferencePolicy(), 60)  # raises an error for a plan that does not fit

    after = job.observations[-1]
    assert last.purpose is PlanPurpose.TUNED
    assert after.iteration_time_s <= (1.1 + LATE_RATIO) * job.baseline.iteration_time_s
    assert (after.energy_j or 0.0) < 0.95 * (job.baseline.energy_j or 0.0)


def test_it_keeps_no_state_between_calls() -> None:
    kept, lost = SimulatedJob(PIPELINE), SimulatedJob(PIPELINE)

    policy = ReferencePolicy()
    for _ in range(60):
        kept.run(policy.next_plan(kept.view()))
        lost.run(ReferencePolicy().next_plan(lost.view()))

    assert kept.plans == lost.plans


@pytest.mark.parametrize(
    "view",
    [
        replace(SimulatedJob(PIPELINE, max_slowdown_ratio=0.1).view(), can_set_clocks=False),
        replace(SimulatedJob(PIPELINE, max_slowdown_ratio=0.1).view(), num_dp_ranks=2),
        SimulatedJob(PIPELINE, max_slowdown_ratio=0.1, measures_energy=False).view(),
        job_view(PIPELINE),
    ],
    ids=["no clocks", "replicas", "no energy", "no iterations"],
)
def test_it_stays_at_full_speed_where_it_cannot_plan(view: JobView) -> None:
    plan = ReferencePolicy().next_plan(view)

    assert plan.purpose is PlanPurpose.BASELINE
    assert plan.ranks == ()
    assert plan.reason.startswith("at full speed: ")


def test_a_new_target_gets_new_plans_and_an_old_one_its_plan_back() -> None:
    job = SimulatedJob(PIPELINE)
    found: list[Sequence[ClockPlan]] = []
    for ratio in (0.0, 0.1, 0.0):
        job.target = PerformanceTarget(max_slowdown_ratio=ratio)
        num_before = len(job.plans)
        job.run_policy(ReferencePolicy(), 60)
        found.append(job.plans[num_before:])

    assert [len(plans) for plans in found] == [NUM_MEASURED_PLANS + 1, NUM_MEASURED_PLANS + 1, 1]
    assert found[2][0] == found[0][-1]
    assert clocks_mhz(found[1][-1]) != clocks_mhz(found[0][-1])


def test_its_frontier_begins_at_full_speed_and_falls() -> None:
    job = SimulatedJob(PIPELINE)
    job.run_policy(ReferencePolicy(), 60)

    points = ReferencePolicy().frontier(job.view())

    times_s, energies_j = [own.iteration_time_s for own in points], [own.energy_j for own in points]
    assert times_s[0] == pytest.approx(job.baseline.iteration_time_s, rel=LATE_RATIO)
    assert times_s == sorted(times_s)
    assert energies_j == sorted(energies_j, reverse=True)
    assert ReferencePolicy().frontier(job_view(PIPELINE)) == ()
