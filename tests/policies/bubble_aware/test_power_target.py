"""A pipeline under a power budget: its loop follows the time that it is given, and draws what its frontier says."""

from statistics import median

import pytest

from gpuenergyd.core.carbon.speed_curve import power_at, speed_points
from gpuenergyd.core.job.issued_plans import PROOF_PLAN_ID
from gpuenergyd.core.job.messages import JobPhase, PowerCutChanged, PowerTargetChanged
from tests.policies.bubble_aware.test_control_loop import training
from tests.support.remembered_plans import RememberedBubbleAware
from tests.support.thorough import thorough


@pytest.mark.thorough
@pytest.mark.parametrize("slowdown", [1.6, *thorough(1.12)])
def test_the_loop_follows_the_time_and_draws_the_predicted_power(slowdown: float) -> None:
    policy = RememberedBubbleAware()
    run = training(policy)
    run.run(60)
    assert run.job.phase is JobPhase.TUNED
    assert run.job.baseline is not None
    view = run.job.view()
    assert view is not None
    points = [(p.iteration_time_s, p.energy_j) for p in policy.power_frontier(view)]
    curve = speed_points(points, until_least_energy=False)
    slowest_s = 1 / curve[0][0]
    target_s = min(slowdown * run.job.baseline.iteration_time_s, slowest_s)
    num_before, plans_before = len(run.history), run.job.knowledge.plans.current.plan_id

    run.feed(PowerTargetChanged(target_s, "power budget of 1000 W"))
    run.run(30)

    assert run.job.phase is JobPhase.TUNED
    assert run.job.follows_power_target
    assert run.job.current_plan.plan_id != plans_before
    rows = run.history[num_before + 8 :]
    time_s, energy_j = median(t for t, _, _ in rows), median(e for _, e, _ in rows)
    assert 0.97 * target_s <= time_s <= 1.01 * target_s
    assert energy_j / time_s == pytest.approx(
        power_at(curve, 1 / target_s), rel=0.07
    )  # waits at low clocks need less than assumed
    assert not [plan for _, _, plan in rows if plan == PROOF_PLAN_ID]
    assert run.job.faults.num_faults == 0

    run.feed(PowerTargetChanged(None, "no power budget any more"))
    run.run(20)
    last_s = median(t for t, _, _ in run.history[-8:])
    assert last_s <= 1.01 * run.job.baseline.iteration_time_s


def test_iterations_under_a_cut_are_no_fault_of_the_plan() -> None:
    run = training(RememberedBubbleAware())
    run.run(60)
    plan_id = run.job.current_plan.plan_id
    run.slowdown_of = lambda _rank, iteration: 1.3 if 60 <= iteration < 80 else 1.0

    run.feed(PowerCutChanged(is_cut=True))
    run.run(20)
    assert run.job.phase is JobPhase.TUNED
    assert not run.job.observations[-1].is_regular
    run.feed(PowerCutChanged(is_cut=False))
    run.run(10)

    assert run.job.faults.num_faults == 0
    assert run.job.current_plan.plan_id == plan_id
    assert run.job.observations[-1].is_regular
