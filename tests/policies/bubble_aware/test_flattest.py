"""The option flattest of the bubble-aware policy in virtual time: less swing in the same time, predicted in figures."""

from statistics import median

import pytest

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.pipeline.power_swing import SwingFigure
from gpuenergyd.errors import UsageError
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from tests.policies.bubble_aware.test_control_loop import training
from tests.support.remembered_plans import RememberedBubbleAware


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
