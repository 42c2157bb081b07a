"""The option flattest of the bubble-aware policy in virtual time: less swing in the same time, predicted in figures."""

from statistics import median

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.power_swing import SwingFigure
from gpuenergyd.errors import UsageError
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from tests.policies.bubble_aware.test_control_loop import training
from tests.policies.bubble_aware.test_reordering import Ran
from tests.policies.bubble_aware.test_reordering import training as reorderable
from tests.support.remembered_plans import RememberedBubbleAware


@pytest.mark.thorough
def test_the_flattest_plan_swings_less_in_the_same_time_and_hardly_more_energy() -> None:
    found = []
    for policy in (RememberedBubbleAware(), BubbleAware(flattest="true")):
        run = training(policy, max_slowdown_ratio=0.06)
        run.run(45)
        assert run.job.phase is JobPhase.TUNED
        plan = run.job.current_plan
        swing_w = plan.figure(SwingFigure.BAND_RMS)
        peak_w, trough_w = plan.figure(SwingFigure.PEAK), plan.figure(SwingFigure.TROUGH)
        assert swing_w is not None
        assert peak_w is not None
        assert trough_w is not None
        assert 0 < trough_w < peak_w
        assert 0 < swing_w < peak_w - trough_w
        rows = run.history[-6:]
        found.append((swing_w, median(t for t, _, _ in rows), median(e for _, e, _ in rows)))
    (usual_w, usual_s, usual_j), (flat_w, flat_s, flat_j) = found
    assert flat_w < usual_w
    assert flat_s <= 1.003 * usual_s
    assert flat_j <= 1.006 * usual_j


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flat": "true"}, "no option 'flat'; valid are flattest and trials"),
        ({"flattest": "3"}, "flattest = 3: must be true or"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        BubbleAware(**options)


@pytest.mark.thorough
def test_a_job_that_allows_other_orders_swings_less_by_far_in_the_flattest_of_them() -> None:
    ran = Ran(reorderable(allow=True, policy=BubbleAware(flattest="true")))
    in_1f1b = None
    while not ran.is_tuned_in_order:
        assert len(ran.rows) < 160
        ran.run(1)
        plan = ran.training.job.current_plan
        if plan.purpose is PlanPurpose.TUNED and not plan.orders:
            in_1f1b = plan
    assert in_1f1b is not None
    ran.run_until_in_order()
    in_order = ran.training.job.current_plan

    before_w, after_w = (plan.figure(SwingFigure.BAND_RMS) for plan in (in_1f1b, in_order))
    assert before_w is not None
    assert after_w is not None
    assert after_w**2 < 0.8 * before_w**2
    saving_ratio, slowdown_ratio = ran.compared(is_split=True)
    assert saving_ratio > 0.2
    assert slowdown_ratio < 0.005
