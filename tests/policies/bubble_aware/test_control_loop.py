"""The control loop in virtual time: real job state machine and policy, simulated pipeline."""

from itertools import pairwise
from statistics import median

import pytest

from gpuenergyd.core.job.messages import (
    ControlLost,
    JobPhase,
    LeaseGpus,
    RecordPhase,
    RestoreGpus,
    SendPlan,
    TargetChanged,
)
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.job.time_account import AccountRules
from gpuenergyd.core.pipeline.graph import one_forward_one_backward
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose, RankClocks
from gpuenergyd.core.policy_api.policy import ClockPolicy, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import a100_stages
from tests.support.remembered_plans import RememberedBubbleAware

IMBALANCE = (1.0, 0.93, 1.0, 1.10)


def training(policy: ClockPolicy, **overrides: object) -> VirtualTraining:
    return VirtualTraining(one_forward_one_backward(4, 8), a100_stages(IMBALANCE), policy, **overrides)  # type: ignore[arg-type]


def tuned_medians(run: VirtualTraining) -> tuple[float, float]:
    """Return (saving, slowdown) of the plan in force against the baseline."""
    assert run.job.baseline is not None
    assert run.job.baseline.energy_j is not None
    plan_id = run.job.current_plan.plan_id
    rows = [(t, e) for t, e, p in run.history if p == plan_id][1:]
    return (
        1 - median(e for _, e in rows) / run.job.baseline.energy_j,
        median(t for t, _ in rows) / run.job.baseline.iteration_time_s - 1,
    )


def test_bubble_aware_saves_energy_at_the_same_speed() -> None:
    run = training(RememberedBubbleAware())

    run.run(90)

    saving, slowdown = tuned_medians(run)
    assert run.job.phase is JobPhase.TUNED
    assert saving > 0.14
    assert slowdown < 0.001


@pytest.mark.thorough
def test_bubble_aware_holds_up_under_noise_and_uneven_switch_latency() -> None:
    run = training(RememberedBubbleAware(), noise_ratio=0.003, latency_spread_ratio=0.5, seed=3)

    run.run(60)

    saving, slowdown = tuned_medians(run)
    assert saving > 0.14
    assert slowdown < 0.005


def test_prediction_and_bound_agree_with_measurements() -> None:
    run = training(RememberedBubbleAware())

    run.run(66)

    predicted = run.job.current_plan.predicted
    assert predicted is not None
    assert predicted.lower_bound_j is not None
    measured_j = run.history[-1][1]
    assert predicted.energy_j == pytest.approx(measured_j, rel=0.015)
    assert predicted.lower_bound_j <= min(predicted.energy_j, measured_j)
    assert predicted.iteration_time_s == pytest.approx(run.history[-1][0], rel=0.002)


@pytest.mark.thorough
def test_a_permitted_slowdown_saves_more_and_is_not_exceeded() -> None:
    run = training(RememberedBubbleAware(), max_slowdown_ratio=0.05)

    run.run(60)

    saving, slowdown = tuned_medians(run)
    assert saving > 0.18
    assert slowdown < 0.053


class _Forgetful:
    """A policy host that is restarted after every answer."""

    def next_plan(self, view: JobView) -> ClockPlan:
        return BubbleAware().next_plan(view)


@pytest.mark.thorough
def test_bubble_aware_keeps_no_state() -> None:
    remembering, forgetting = training(BubbleAware()), training(_Forgetful())

    remembering.run(40)
    forgetting.run(40)

    assert forgetting.history == remembering.history


@pytest.mark.thorough
def test_a_pipeline_slower_than_predicted_is_corrected_to_the_target() -> None:
    run = training(RememberedBubbleAware(), slow_factor_when_tuned=1.012)

    run.run(90)

    _, slowdown = tuned_medians(run)
    assert slowdown < 0.004
    assert sum(p.purpose is PlanPurpose.TUNED for p in run.job.knowledge.plans.kept) > 1


class _Reckless:
    """A policy that slows everything down without saving energy."""

    def next_plan(self, view: JobView) -> ClockPlan:
        clock = view.gpus[0].supported_sm_clocks_mhz[40]
        number = view.num_issued()
        ranks = tuple(
            RankClocks(r, (clock,) * len(order), (ClockChange(order[0], 0.0, clock),))
            for r, order in enumerate(view.schedule.orders)
        )
        last = view.issued_plans[-1] if view.issued_plans else None
        if last is not None and last.purpose is PlanPurpose.TUNED:
            return last
        return ClockPlan(f"reckless-{number}", PlanPurpose.TUNED, ranks)


RICH = AccountRules(first_income_s=1000.0)
"""For what the guard does about slow plans, however many."""


def fallbacks(run: VirtualTraining) -> list[int]:
    """Return the iterations from which the job ran at full speed after a fault."""
    return [
        c.apply_at_iteration
        for c in run.commands
        if isinstance(c, SendPlan) and c.plan.plan_id.startswith("full-speed")
    ]


@pytest.mark.fault(45)
def test_the_guard_revokes_a_slow_plan_and_finally_disables_its_policy() -> None:
    run = training(_Reckless(), rules=JobRules(max_faults=2, account=RICH))

    run.run(90)

    assert run.job.is_given_up
    assert run.job.faults.num_faults == 3
    assert run.history[-1][0] == pytest.approx(run.job.baseline.iteration_time_s, rel=1e-6)  # type: ignore[union-attr]
    assert sum(isinstance(c, RestoreGpus) for c in run.commands) == 3


def test_each_fault_doubles_the_time_at_full_speed() -> None:
    run = training(_Reckless(), rules=JobRules(max_faults=4, fallback_iterations=5, account=RICH))

    run.run(140)

    begun = fallbacks(run)
    between = [later - earlier for earlier, later in pairwise(begun)]
    assert len(begun) == 5
    assert [later - earlier for earlier, later in pairwise(between)] == [5, 10, 20]


@pytest.mark.thorough
def test_a_job_whose_plans_are_slow_begins_again_within_the_budget() -> None:
    run = training(
        RememberedBubbleAware(),
        slow_factor_when_tuned=1.3,
        rules=JobRules(relearn_after_slow_plans=1, proof_iterations=0, account=AccountRules(first_income_s=6.0)),
    )

    run.run(110)

    reasons = [c.reason for c in run.commands if isinstance(c, RecordPhase)]
    assert "1 plan was slow: beginning again" in reasons
    assert "tuned-1@2" in {plan for _, _, plan in run.history}
    account = run.job.control.experiments.account
    assert account.cost_s <= account.income_s
    plan_ids = [c.plan.plan_id for c in run.commands if isinstance(c, SendPlan) and c.plan.plan_id != "proof"]
    assert len(set(plan_ids)) == len(plan_ids)
    view = run.job.view()
    assert view is not None
    kept = {o.plan_id or "" for o in view.observations}
    assert not any(plan_id.startswith(("profile", "tuned")) and "@" not in plan_id for plan_id in kept)


class _Endless:
    """A policy that never stops profiling."""

    def next_plan(self, view: JobView) -> ClockPlan:
        order = view.schedule.orders
        clock = view.gpus[0].supported_sm_clocks_mhz[10]
        ranks = (RankClocks(r, (clock,) * len(o), (ClockChange(o[0], 0.0, clock),)) for r, o in enumerate(order))
        return ClockPlan(view.plan_id(f"try-{view.num_issued()}"), PlanPurpose.TRIAL, tuple(ranks))


def test_profiling_clocks_are_released_while_a_policy_takes_long() -> None:
    run = training(_Endless(), thinking_iterations=9)

    run.run(150)

    assert run.job.baseline is not None
    usual_s = run.job.baseline.iteration_time_s
    profiling = [plan_id for _, _, plan_id in run.history if (plan_id or "").startswith("try")]
    slow = [plan_id for time_s, _, plan_id in run.history if time_s > 1.01 * usual_s]
    assert len(set(profiling)) > 5
    assert max(profiling.count(plan_id) for plan_id in set(profiling)) == 1
    # The iteration after a profiling plan begins at its clocks: that one may be slow too, and no other.
    assert len(slow) <= 2 * len(set(profiling))
    assert slow.count("proof") <= len(set(profiling))
    assert run.job.faults.num_faults == 0


class _Nonsense:
    def next_plan(self, view: JobView) -> ClockPlan:
        order = view.schedule.orders[0]
        return ClockPlan("absurd", PlanPurpose.TUNED, (RankClocks(0, (99,) * len(order)),))


@pytest.mark.fault(44)
def test_a_clock_that_does_not_exist_never_reaches_a_gpu() -> None:
    run = training(_Nonsense())

    run.run(20)

    assert not any(isinstance(c, SendPlan | LeaseGpus) for c in run.commands)
    assert "99" in run.job.phase_reason


@pytest.mark.fault(8)
def test_lost_control_reverts_to_full_speed_and_retries_later() -> None:
    run = training(RememberedBubbleAware())
    run.run(40)

    run.feed(ControlLost("the GPU worker died"))
    run.run(30)

    assert run.job.phase is JobPhase.TUNED
    assert sum(isinstance(c, LeaseGpus) for c in run.commands) == 2


@pytest.mark.thorough
def test_a_new_target_leads_to_a_new_plan() -> None:
    run = training(RememberedBubbleAware())
    run.run(60)
    before, _ = tuned_medians(run)

    run.feed(TargetChanged(PerformanceTarget(max_slowdown_ratio=0.10)))
    run.run(40)

    after, slowdown = tuned_medians(run)
    assert after > before + 0.03
    assert 0.05 < slowdown < 0.105
