"""The last power budget requested by an administrator, on disk so that a daemon restart does not raise the power."""

import logging
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.wire.daemon_codec import decode, encode
from gpuenergyd_power.messages import PowerBudgetRequest
from gpuenergyd_power.rules.budget import BudgetSource, PowerBudget, ScheduledBudget, budget_problem
from gpuenergyd_power.schedule_file import checked_reason

log = logging.getLogger(__name__)

MAX_LIFETIME_S = 366 * 86_400.0
MAX_FALLBACKS = 64
_MAX_BYTES = 2**16


def requested_budget(request: PowerBudgetRequest, now_at: datetime) -> PowerBudget | None:
    """Return the budget of a request; None if it withdraws the last request.

    Raises:
        UsageError: a value is out of range.
    """
    reason = checked_reason(request.reason, "power budget")
    if request.power_budget_w is None:
        if request.lifetime_s is not None or request.fallback:
            key = "fallback" if request.lifetime_s is None else "lifetime_s"
            raise UsageError(f"{key} without power_budget_w: give both, or neither to withdraw the last request")
        return None
    if (problem := budget_problem(request.power_budget_w)) is not None:
        raise UsageError(f"power_budget_w = {problem}")
    end_at = None
    if request.lifetime_s is not None:
        if not 0 < request.lifetime_s <= MAX_LIFETIME_S:
            raise UsageError(f"lifetime_s = {request.lifetime_s:g}: valid are values above 0 up to {MAX_LIFETIME_S:g}")
        end_at = now_at + timedelta(seconds=request.lifetime_s)
    fallback = _fallback(request, now_at)
    return PowerBudget(request.power_budget_w, BudgetSource.REQUEST, reason, end_at, fallback)


def _fallback(request: PowerBudgetRequest, now_at: datetime) -> tuple[ScheduledBudget, ...]:
    """Return the budgets for the time after a request's lifetime.

    Raises:
        UsageError: a value is out of range.
    """
    if request.fallback and request.lifetime_s is None:
        raise UsageError("fallback without lifetime_s: a budget without an end needs none")
    if len(request.fallback) > MAX_FALLBACKS:
        raise UsageError(f"{len(request.fallback)} budgets in fallback; at most {MAX_FALLBACKS} are valid")
    found = []
    for part in request.fallback:
        if (problem := budget_problem(part.power_budget_w)) is not None:
            raise UsageError(f"fallback: power_budget_w = {problem}")
        if not -MAX_LIFETIME_S <= part.begin_s < part.end_s <= MAX_LIFETIME_S:
            raise UsageError(
                f"fallback: begin_s = {part.begin_s:g}, end_s = {part.end_s:g}: the end must be after the begin, both"
                f" within {MAX_LIFETIME_S:g} s of now"
            )
        begin_at, end_at = (now_at + timedelta(seconds=s) for s in (part.begin_s, part.end_s))
        found.append(ScheduledBudget(begin_at, end_at, part.power_budget_w, request.reason))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _SavedRequest:
    budget: PowerBudget | None


class RequestFile:
    """The file with the last request; file errors are logged, never raised."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> PowerBudget | None:
        """Return the saved budget; None if there is none or it cannot be used."""
        try:
            with self._path.open("rb") as file:
                saved = decode(file.read(_MAX_BYTES + 1), _SavedRequest, max_bytes=_MAX_BYTES).budget
        except FileNotFoundError:
            return None
        except (OSError, GpuEnergyError) as error:
            log.warning("cannot read the saved power budget: %s: %s", self._path, error)
            return None
        if saved is None or budget_problem(saved.budget_w) is not None:
            return None
        return saved if saved.is_of_use(datetime.now(tz=UTC)) else None

    def save(self, budget: PowerBudget | None) -> str | None:
        """Replace the file; return why that failed, or None."""
        try:
            replace_file(self._path, encode(_SavedRequest(budget)))
        except OSError as error:
            return f"the power budget cannot be saved for the next daemon: {self._path}: {error.strerror}"
        return None
