"""The power budget in force: requests, the settings, and entries of a schedule that may overlap or be over."""

import math
from datetime import UTC, datetime, timedelta

import pytest

from gpuenergyd_power.rules.budget import BudgetSource, PowerBudget, ScheduledBudget, budget_in_force, budget_problem

NOW = datetime(2026, 11, 23, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def test_a_request_replaces_the_setting_until_it_is_over() -> None:
    asked = PowerBudget(2000.0, BudgetSource.REQUEST, "", NOW + HOUR)
    assert budget_in_force(1500.0, asked, (), NOW) == asked
    over = budget_in_force(1500.0, asked, (), NOW + HOUR)
    assert over is not None
    assert over.source is BudgetSource.SETTING
    assert budget_in_force(None, asked, (), NOW + HOUR) is None
    assert budget_in_force(None, None, (), NOW) is None


def test_of_overlapping_entries_the_least_counts_and_none_raises_the_budget() -> None:
    schedule = (
        ScheduledBudget(NOW - HOUR, NOW + HOUR, 1800.0, "evening"),
        ScheduledBudget(NOW, NOW + HOUR / 2, 1200.0, "event"),
        ScheduledBudget(NOW - 2 * HOUR, NOW, 10.0, "over"),
        ScheduledBudget(NOW + HOUR, NOW + 2 * HOUR, 10.0, "later"),
    )
    now = budget_in_force(1500.0, None, schedule, NOW)
    assert now is not None
    assert (now.budget_w, now.reason, now.source, now.end_at) == (
        1200.0,
        "event",
        BudgetSource.SCHEDULE,
        NOW + HOUR / 2,
    )
    after = budget_in_force(1500.0, None, schedule, NOW + HOUR / 2)
    assert after is not None
    assert after.budget_w == 1500.0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_impossible_budgets_are_named(bad: float) -> None:
    problem = budget_problem(bad)
    assert problem is not None
    assert "above 0 up to 1e+07" in problem
    assert budget_problem(1.0) is None


def test_a_fallback_lowers_the_setting_after_the_request_and_never_raises_it() -> None:
    fallback = (ScheduledBudget(NOW, NOW + 3 * HOUR, 900.0), ScheduledBudget(NOW, NOW + 2 * HOUR, 5000.0))
    asked = PowerBudget(2000.0, BudgetSource.REQUEST, "", NOW + HOUR, fallback)
    assert budget_in_force(1500.0, asked, (), NOW) == asked
    for after, expected_w in ((1, 900.0), (2, 900.0), (3, 1500.0)):
        found = budget_in_force(1500.0, asked, (), NOW + after * HOUR)
        assert found is not None
        assert found.budget_w == expected_w
    assert asked.is_of_use(NOW + 2 * HOUR)
    assert not asked.is_of_use(NOW + 3 * HOUR)
    assert PowerBudget(2000.0, BudgetSource.REQUEST).is_of_use(NOW + 9999 * HOUR)
