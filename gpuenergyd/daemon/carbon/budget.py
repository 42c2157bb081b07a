"""What a job may still spend: from its account, what its owner said of its length, and the host's settings."""

import math
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from gpuenergyd.core.carbon.grid_clock import GridClock
from gpuenergyd.core.carbon.slowdown_account import SETTLING_ITERATIONS, Allowance, SlowdownAccount
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.settings import Settings

PROFILING_COST_ITERATIONS = 3.0
"""What first profiling takes beyond full speed, in full-speed iterations: shipped policies 1.1 to 2.2, and some."""
_SAME_RATIO = 1e-6


@dataclass(frozen=True, slots=True)
class JobBudget:
    """One job's budget at one instant, by the host's time."""

    allowance: Allowance
    reserve_s: float
    num_iterations_left: int | None
    """None where nobody has said how long the job is, or it runs on beyond that."""
    deadline_at: datetime | None
    rests_on: str
    """What is known of the job's length, and what is assumed instead, in words."""
    is_late: bool = False
    """The deadline has passed."""
    is_overtime: bool = False
    """More iterations were done than the job was said to have."""

    @property
    def is_planned(self) -> bool:
        """Whether there is anything to distribute over hours."""
        return not self.is_late and not self.is_overtime


def job_budget(
    settings: Settings,
    grid: GridClock,
    job: Job,
    baseline: BaselineView,
    account: SlowdownAccount,
    *,
    num_done: int,
    now_at: datetime,
) -> JobBudget:
    """Return what a job may still spend that has done `num_done` iterations.

    A job whose owner has said nothing keeps its budget over windows of `carbon_window_h`, each of which has to balance.
    """
    full_s, length = baseline.iteration_time_s, job.description.length
    ratio = job.description.target.max_slowdown_ratio
    deadlines = [at for at in (length.deadline_at, _host_time(grid, settings.carbon_deadline_at)) if at is not None]
    deadline_at = min(deadlines, default=None)
    until_s = math.inf if deadline_at is None else (deadline_at - now_at).total_seconds()
    by = "" if deadline_at is None else f", to end by {deadline_at:%Y-%m-%d %H:%M} UTC"
    total = length.total_iterations(full_s)
    left = None if total is None else total - num_done

    def budget(allowance: Allowance, rests_on: str, *, is_late: bool = False, is_overtime: bool = False) -> JobBudget:
        rest_s = allowance.left_s if allowance.work_s is None else allowance.work_s
        return JobBudget(
            allowance,
            reserve_s=account.reserve_s(full_s, baseline.iteration_sigma_s, rest_s),
            num_iterations_left=None if is_overtime else left,
            deadline_at=deadline_at,
            rests_on=rests_on,
            is_late=is_late,
            is_overtime=is_overtime,
        )

    if until_s <= 0:
        return budget(Allowance(0.0, 0.0), f"the deadline has passed{by}: full speed", is_late=True)
    if left is not None and left <= 0:
        said = f"the {total} iterations that were said are done: the budget is granted evenly from here on"
        return budget(Allowance(ratio, min(until_s, full_s)), said, is_overtime=True)
    if left is not None:
        what = f"{total} iterations" if length.num_iterations is not None else f"{length.hours:g} h, {total} iterations"
        return budget(Allowance(ratio, until_s, left * full_s), f"said at registration: {what}{by}")
    window_s = settings.carbon_window_h * grid.hour_s
    left_s = min(window_s - account.active_s % window_s, until_s)
    return budget(
        Allowance(ratio, left_s), f"length unknown: assumed to last, balanced every {settings.carbon_window_h:g} h{by}"
    )


def is_overdrawing(
    account: SlowdownAccount, budget: JobBudget, target: PerformanceTarget, full_speed_time_s: float
) -> bool:
    """Return whether full speed has to be ordered now, since it takes some iterations until that is followed."""
    own_s = replace(target, straggler_time_s=None).iteration_time_s(full_speed_time_s)
    longest_s = account.longest_time_s(
        full_speed_time_s,
        allowance=budget.allowance,
        slot_s=SETTLING_ITERATIONS * own_s,
        reserve_s=budget.reserve_s,
    )
    return own_s > max(longest_s, full_speed_time_s) * (1.0 + _SAME_RATIO)


def profiling_refusal(account: SlowdownAccount, budget: JobBudget, full_speed_time_s: float) -> str | None:
    """Return why a job may not be profiled now, None where what that usually costs fits into the budget left to it.

    A budget of nothing is not charged for profiling, and forbids none.
    """
    allowance = budget.allowance
    if allowance.budget_ratio <= 0:
        return None
    left_s = allowance.left_s if allowance.work_s is None else allowance.work_s
    free_s = allowance.budget_ratio * (account.full_speed_s + left_s) - account.excess_s - budget.reserve_s
    if allowance.work_s is not None:
        free_s = min(free_s, allowance.left_s - allowance.work_s - budget.reserve_s)
    if free_s >= PROFILING_COST_ITERATIONS * full_speed_time_s:
        return None
    have = f"{max(0.0, free_s / full_speed_time_s):.1f} iterations' time"
    return (
        f"profiling is refused: the job is too short to pay it back; it takes about {PROFILING_COST_ITERATIONS:g}"
        f" iterations' time beyond full speed, and {100 * allowance.budget_ratio:g} % leave {have} ({budget.rests_on})"
    )


def is_unaffordable(
    account: SlowdownAccount, budget: JobBudget, iteration_time_s: float, full_speed_time_s: float
) -> bool:
    """Return whether going on as slowly as profiling does would overdraw a budget; one of nothing forbids nothing."""
    if budget.allowance.budget_ratio <= 0:
        return False
    longest_s = account.longest_time_s(
        full_speed_time_s,
        allowance=budget.allowance,
        slot_s=SETTLING_ITERATIONS * iteration_time_s,
        reserve_s=budget.reserve_s,
    )
    return iteration_time_s > max(longest_s, full_speed_time_s) * (1.0 + _SAME_RATIO)


def view_deadline(budget: JobBudget, account: SlowdownAccount, now_at: datetime) -> datetime | None:
    """Return when a target policy has to be done: by the deadline, and where the work is known, within its budget."""
    allowance = budget.allowance
    if allowance.work_s is None or budget.deadline_at is None:
        return budget.deadline_at
    within_s = allowance.work_s + allowance.budget_ratio * (account.full_speed_s + allowance.work_s) - account.excess_s
    return min(budget.deadline_at, now_at + timedelta(seconds=max(0.0, within_s)))


def _host_time(grid: GridClock, grid_at: datetime | None) -> datetime | None:
    return None if grid_at is None else grid.to_host(grid_at)
