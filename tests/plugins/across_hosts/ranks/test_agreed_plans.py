"""AgreedPlans: a plan is followed only inside its window and if the own daemon has installed it."""

import pytest

from gpuenergyd.client.plans import NO_PLAN, PlannedClocks, PreparedPlan
from gpuenergyd_across_hosts.ranks.agreed_plans import AgreedPlans
from gpuenergyd_across_hosts.rules.plan_windows import PlanWindow

CLOCKS = {("F", 0, 0): PlannedClocks(1200, 0, 0)}


def slice_of(plan_id: str, epoch: int = 1) -> PreparedPlan:
    return PreparedPlan(epoch, 0, CLOCKS, b"token", plan_id, full_speed_sm_clock_mhz=1410)


RELEASED = PreparedPlan(9, 0, {}, b"token", "untuned")


@pytest.fixture
def plans() -> AgreedPlans:
    """A plan, installed and agreed for iterations 5 to 9."""
    made = AgreedPlans()
    made.add([slice_of("a")])
    made.add_windows([PlanWindow("a", 5, 10)])
    return made


def followed(plans: AgreedPlans, iteration_index: int) -> tuple[str, bool, bool]:
    """Return the plan, whether it asks for clocks, and whether it asks for the highest."""
    plan = plans.plan_for(iteration_index)
    return plan.plan_id, bool(plan.clocks), plan.is_full_speed


def test_no_clock_is_requested_before_the_window_and_full_speed_after_it(plans: AgreedPlans) -> None:
    assert plans.plan_for(4) is NO_PLAN
    assert followed(plans, 5) == ("a", True, False)
    assert followed(plans, 9) == ("a", True, False)
    assert followed(plans, 10) == ("a", False, True)


def test_a_plan_with_a_window_that_is_not_installed_is_not_followed(plans: AgreedPlans) -> None:
    plans.add_windows([PlanWindow("b", 10, 20)])

    assert followed(plans, 9) == ("a", True, False)
    assert followed(plans, 10) == ("a", False, True)
    plans.add([slice_of("b", 2)])
    assert followed(plans, 11) == ("b", True, False)


def test_a_revoked_plan_is_dropped_at_once(plans: AgreedPlans) -> None:
    plans.plan_for(5)
    plans.drop("a")

    assert followed(plans, 6) == ("a", False, True)


def test_after_the_gpu_was_restored_no_clock_is_requested(plans: AgreedPlans) -> None:
    plans.plan_for(5)
    plans.add([RELEASED])

    assert plans.installed == {"untuned"}
    assert plans.plan_for(6) is NO_PLAN


def test_after_a_daemon_restart_old_windows_are_not_followed(plans: AgreedPlans) -> None:
    plans.plan_for(5)
    plans.clear()

    assert plans.installed == frozenset()
    assert plans.plan_for(6) is NO_PLAN
    plans.add([slice_of("a")])
    assert plans.plan_for(7) is NO_PLAN


def test_a_repeated_slice_is_ignored_and_only_the_newest_stay_installed(plans: AgreedPlans) -> None:
    plans.add([slice_of("a", 7)])
    assert plans.plan_for(5).plan_epoch == 1

    plans.add([slice_of(f"p{number}", number) for number in range(10)])
    plans.add_windows([PlanWindow("p0", 10, 20), PlanWindow("p9", 20, 30)])

    assert plans.installed == {f"p{number}" for number in range(2, 10)}
    assert followed(plans, 10) == ("a", False, True)
    assert followed(plans, 20) == ("p9", True, False)
