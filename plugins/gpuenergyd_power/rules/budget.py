"""The power budget in force on a host, determined from the settings, the last request and the schedule.

A request replaces the budget of the settings until it ends or is cleared. Its fallback, for the time after its end, can
only lower the budget of the settings. Entries of a schedule may overlap, and can only lower what the settings or a
request permit: the smallest budget in force applies.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from gpuenergyd.core.policy_api.power import MAX_BUDGET_W

MAX_REASON_CHARS = 200


class BudgetSource(StrEnum):
    """Where a power budget comes from."""

    SETTING = "setting"
    REQUEST = "request"
    SCHEDULE = "schedule"
    FALLBACK = "fallback"
    """The fallback of a request that has ended."""


@dataclass(frozen=True, slots=True)
class ScheduledBudget:
    """A budget of a schedule, in force from `start_at` until just before `end_at`."""

    start_at: datetime
    end_at: datetime
    budget_w: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PowerBudget:
    """Limit of a host's mean power over a second: its GPUs plus the assumed power of the rest of the host."""

    budget_w: float
    source: BudgetSource
    reason: str = ""
    end_at: datetime | None = None
    """When the budget ends; None if it lasts until it is changed."""
    fallback: tuple[ScheduledBudget, ...] = ()
    """For a request, budgets for the time after its end, which can only lower the budget of the settings."""

    def is_of_use(self, now_at: datetime) -> bool:
        """Return whether it limits power now or later."""
        return self.end_at is None or max((self.end_at, *(part.end_at for part in self.fallback))) > now_at


def budget_problem(budget_w: float) -> str | None:
    """Return what is wrong with a budget in watts, with the valid range; None if it is valid."""
    if math.isfinite(budget_w) and 0 < budget_w <= MAX_BUDGET_W:
        return None
    return f"{budget_w:g} W: valid are finite values above 0 up to {MAX_BUDGET_W:g}"


def budget_in_force(
    configured_w: float | None, requested: PowerBudget | None, schedule: Sequence[ScheduledBudget], now_at: datetime
) -> PowerBudget | None:
    """Return the budget in force at an instant, None if there is none.

    Args:
        configured_w: the budget of the settings, in watts.
        requested: the budget of the last request; after its end, only its fallback applies.
        schedule: entries in any order, which may overlap.
        now_at: the instant.
    """
    found = _in_force(schedule, BudgetSource.SCHEDULE, now_at)
    if requested is not None and (requested.end_at is None or now_at < requested.end_at):
        found.append(requested)
    else:
        if configured_w is not None:
            found.append(PowerBudget(configured_w, BudgetSource.SETTING, "power_budget_w of the settings"))
        if requested is not None:
            found += _in_force(requested.fallback, BudgetSource.FALLBACK, now_at)
    return min(found, key=lambda budget: budget.budget_w, default=None)


def _in_force(entries: Sequence[ScheduledBudget], source: BudgetSource, now_at: datetime) -> list[PowerBudget]:
    return [
        PowerBudget(entry.budget_w, source, entry.reason, entry.end_at)
        for entry in entries
        if entry.start_at <= now_at < entry.end_at
    ]
