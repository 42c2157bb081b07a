"""A saving comes with how sure it is; too few iterations give no interval rather than a narrow one."""

import random
from datetime import UTC, datetime

import pytest

from gpuenergyd.core.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.report.savings import saving_interval, slowdown_interval
from gpuenergyd.store import IterationRow

AT = datetime(2026, 3, 1, tzinfo=UTC)


def rows(
    energies_j: list[float | None], purpose: PlanPurpose, *, is_regular: bool = True, time_s: float = 1.0
) -> list[IterationRow]:
    plan_id = BASELINE_PLAN_ID if purpose is PlanPurpose.BASELINE else "plan-1"
    return [
        IterationRow(index, AT, time_s, energy_j, plan_id, purpose, is_regular)
        for index, energy_j in enumerate(energies_j)
    ]


def test_the_true_saving_lies_in_the_interval_about_as_often_as_claimed() -> None:
    noise = random.Random(5)
    hits = 0
    for _ in range(400):
        before = rows([noise.gauss(100.0, 2.0) for _ in range(15)], PlanPurpose.BASELINE)
        after = rows([noise.gauss(85.0, 2.0) for _ in range(15)], PlanPurpose.TUNED)
        interval = saving_interval(before + after)
        assert interval is not None
        hits += interval.low <= 0.15 <= interval.high

    assert 0.85 <= hits / 400 <= 0.99


def test_noise_free_iterations_leave_no_doubt() -> None:
    interval = saving_interval(rows([100.0] * 5, PlanPurpose.BASELINE) + rows([90.0] * 5, PlanPurpose.TUNED))

    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((0.1, 0.1))


def test_a_slowdown_is_positive_when_tuned_iterations_take_longer() -> None:
    before = rows([100.0] * 5, PlanPurpose.BASELINE)
    interval = slowdown_interval(before + rows([100.0] * 5, PlanPurpose.TUNED, time_s=1.02))

    assert interval is not None
    assert interval.low == pytest.approx(0.02)


@pytest.mark.parametrize(
    "tuned",
    [
        rows([90.0] * 3, PlanPurpose.TUNED),
        rows([90.0, 90.0, 90.0, None, None], PlanPurpose.TUNED),
        rows([90.0] * 9, PlanPurpose.TUNED, is_regular=False),
        rows([90.0] * 9, PlanPurpose.PROFILE),
    ],
    ids=["too few", "not measured", "irregular", "not tuned"],
)
def test_what_cannot_be_judged_has_no_interval(tuned: list[IterationRow]) -> None:
    assert saving_interval(rows([100.0] * 9, PlanPurpose.BASELINE) + tuned) is None
