"""Requested budgets: hostile values are refused, and the last one survives a restart until it is over."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpuenergyd.errors import UsageError
from gpuenergyd_power.messages import FallbackBudget, PowerBudgetRequest
from gpuenergyd_power.requested import RequestFile, requested_budget
from gpuenergyd_power.rules.budget import BudgetSource, PowerBudget, budget_in_force

NOW = datetime.now(tz=UTC)


@pytest.mark.parametrize(
    ("request_", "wrong"),
    [
        (PowerBudgetRequest(-5.0), "power_budget_w = -5 W"),
        (PowerBudgetRequest(0.0), "power_budget_w = 0 W"),
        (PowerBudgetRequest(math.nan), "power_budget_w = nan W"),
        (PowerBudgetRequest(math.inf), "power_budget_w = inf W"),
        (PowerBudgetRequest(1e12), "power_budget_w = 1e+12 W"),
        (PowerBudgetRequest(1000.0, -1.0), "lifetime_s = -1"),
        (PowerBudgetRequest(1000.0, 0.0), "lifetime_s = 0"),
        (PowerBudgetRequest(1000.0, math.nan), "lifetime_s = nan"),
        (PowerBudgetRequest(1000.0, 1e300), "lifetime_s = 1e+300"),
        (PowerBudgetRequest(None, 60.0), "lifetime_s without power_budget_w"),
        (PowerBudgetRequest(1000.0, reason="two\nlines"), "one printable line"),
        (PowerBudgetRequest(None, fallback=(FallbackBudget(5.0, 0.0, 1.0),)), "fallback without power_budget_w"),
        (PowerBudgetRequest(1000.0, fallback=(FallbackBudget(5.0, 0.0, 1.0),)), "fallback without lifetime_s"),
        (PowerBudgetRequest(1000.0, 60.0, fallback=(FallbackBudget(-5.0, 0.0, 1.0),)), "power_budget_w = -5 W"),
        (PowerBudgetRequest(1000.0, 60.0, fallback=(FallbackBudget(5.0, 1.0, 1.0),)), "the end must be after"),
        (PowerBudgetRequest(1000.0, 60.0, fallback=(FallbackBudget(5.0, math.nan, 1.0),)), "begin_s = nan"),
        (PowerBudgetRequest(1000.0, 60.0, fallback=(FallbackBudget(5.0, 0.0, 1e300),)), "end_s = 1e+300"),
        (PowerBudgetRequest(1000.0, 60.0, fallback=(FallbackBudget(5.0, 0.0, 1.0),) * 65), "at most 64 are valid"),
        (PowerBudgetRequest(1000.0, reason="x" * 201), "at most 200 characters"),
    ],
)
def test_an_impossible_request_is_refused_in_one_line(request_: PowerBudgetRequest, wrong: str) -> None:
    with pytest.raises(UsageError) as refused:
        requested_budget(request_, NOW)
    assert wrong in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_request_holds_for_its_lifetime_and_survives_a_restart(tmp_path: Path) -> None:
    file = RequestFile(tmp_path / "power-budget.json")
    assert file.read() is None
    budget = requested_budget(PowerBudgetRequest(1500.0, 86_400.0, "event"), NOW)
    assert budget == PowerBudget(1500.0, BudgetSource.REQUEST, "event", NOW + timedelta(days=1))
    assert file.save(budget) is None
    assert file.read() == budget
    assert file.save(PowerBudget(1500.0, BudgetSource.REQUEST, "", NOW - timedelta(hours=1))) is None
    assert file.read() is None
    assert requested_budget(PowerBudgetRequest(None), NOW) is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"budget": 5}', b"\xff" * 100, b"[" * 70_000])
def test_a_damaged_file_is_no_budget(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "power-budget.json"
    path.write_bytes(content)
    assert RequestFile(path).read() is None


def test_a_file_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    problem = RequestFile(tmp_path / "missing" / "power-budget.json").save(None)
    assert problem is not None
    assert "cannot be saved" in problem


def test_what_holds_after_a_lease_survives_a_restart_too(tmp_path: Path) -> None:
    file = RequestFile(tmp_path / "power-budget.json")
    request = PowerBudgetRequest(1500.0, 1.0, "fleet", (FallbackBudget(900.0, -2.0, 3600.0),))
    budget = requested_budget(request, NOW - timedelta(minutes=5))
    assert budget is not None
    assert file.save(budget) is None
    saved = file.read()
    assert saved == budget
    in_force = budget_in_force(1200.0, saved, (), NOW)
    assert in_force is not None
    assert (in_force.budget_w, in_force.source) == (900.0, BudgetSource.FALLBACK)
    assert file.save(requested_budget(request, NOW - timedelta(hours=2))) is None
    assert file.read() is None
