"""Remaining slowdown budget of a job, from its account, its registered length and the host's settings."""

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from gpuenergyd.core.job.job import Job
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.settings import Settings
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.rules.slowdown_account import SETTLING_ITERATIONS, Allowance, SlowdownAccount

TRIAL_COST_ITERATIONS = 3.0
"""Cost of the first trials, in full-speed iterations: 1.1 to 2.2 for the shipped policies, plus a margin."""
_TRIED_TWICE = 2.0
"""Across hosts, each trial runs for two iterations instead of one."""
_SAME_RATIO = 1e-6


@dataclass(frozen=True, slots=True)
class JobBudget:
    """A job's slowdown budget at one instant, in host time."""

    allowance: Allowance
    reserve_s: float
    num_iterations_left: int | None
    """None if the job's length is unknown or exceeded."""
    deadline_at: datetime | None
    basis: str
    """The known or assumed length of the job, as a phrase."""
    is_late: bool = False
    """Whether the deadline has passed."""
    is_overtime: bool = False
    """Whether the job has done more iterations than registered."""
    settling_iterations: int = SETTLING_ITERATIONS
    """Most iterations from a new target to the first iteration under its plan."""
    trial_cost_iterations: float = TRIAL_COST_ITERATIONS

    @property
    def is_planned(self) -> bool:
        """Whether slowdown is left to distribute over hours."""
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
    """Return the remaining budget of a job that has done `num_done` iterations.

    A job of unknown length keeps its budget within each window of `carbon_window_h`.
    """
    full_s, length = baseline.iteration_time_s, job.description.length
    ratio = job.description.target.max_slowdown_ratio
    deadline_at = length.deadline_at
    until_s = math.inf if deadline_at is None else (deadline_at - now_at).total_seconds()
    by = "" if deadline_at is None else f", to end by {deadline_at:%Y-%m-%d %H:%M} UTC"
    total = length.total_iterations(full_s)
    left = None if total is None else total - num_done
    length_text = "" if total is None else count_text(total, "iteration")

    def budget(allowance: Allowance, basis: str, *, is_late: bool = False, is_overtime: bool = False) -> JobBudget:
        return JobBudget(
            allowance,
            reserve_s=account.reserve_s(full_s, baseline.iteration_sigma_s, allowance.rest_s),
            num_iterations_left=None if is_overtime else left,
            deadline_at=deadline_at,
            basis=basis,
            is_late=is_late,
            is_overtime=is_overtime,
            settling_iterations=settling_iterations(job),
            trial_cost_iterations=TRIAL_COST_ITERATIONS * (_TRIED_TWICE if job.ranks.num_hosts > 1 else 1.0),
        )

    if until_s <= 0:
        return budget(Allowance(0.0, 0.0), f"deadline passed{by}: full speed", is_late=True)
    if left is not None and left <= 0:
        done = f"registered {length_text} done: constant slowdown from here on"
        return budget(Allowance(ratio, min(until_s, full_s)), done, is_overtime=True)
    if left is not None:
        hours = "" if length.num_iterations is not None else f"{length.hours:g} h, "
        return budget(Allowance(ratio, until_s, left * full_s), f"registered length: {hours}{length_text}{by}")
    window_s = settings.carbon_window_h * grid.hour_s
    left_s = min(window_s - account.active_s % window_s, until_s)
    return budget(
        Allowance(ratio, left_s), f"unknown length: budget kept in each window of {settings.carbon_window_h:g} h{by}"
    )


def settling_iterations(job: Job) -> int:
    """Return the most iterations from a new target to the first iteration under its plan.

    It takes longer for programs that launch GPU work ahead, and for hosts that first have to agree.
    """
    return SETTLING_ITERATIONS + job.reports.run_ahead


def is_overdrawing(
    account: SlowdownAccount, budget: JobBudget, target: PerformanceTarget, full_speed_time_s: float
) -> bool:
    """Return whether the job must go to full speed now to stay within its budget; a change takes some iterations."""
    return _is_too_slow(account, budget, target.own.iteration_time_s(full_speed_time_s), full_speed_time_s)


def trial_refusal(account: SlowdownAccount, budget: JobBudget, full_speed_time_s: float) -> str | None:
    """Return why a job may not run trials now, None if the usual cost fits into its remaining budget.

    A budget of zero is not charged for trials and permits them.
    """
    allowance = budget.allowance
    if allowance.budget_ratio <= 0:
        return None
    free_s = allowance.budget_ratio * (account.full_speed_s + allowance.rest_s) - account.excess_s - budget.reserve_s
    if allowance.work_s is not None:
        free_s = min(free_s, allowance.left_s - allowance.work_s - budget.reserve_s)
    cost = budget.trial_cost_iterations
    if free_s >= cost * full_speed_time_s:
        return None
    left = max(0.0, free_s / full_speed_time_s)
    return (
        f"no trials: the job is too short; trials cost the time of {count_text(cost, 'iteration')}"
        f" and the budget of {100 * allowance.budget_ratio:g} % leaves {left:.1f} ({budget.basis})"
    )


def is_unaffordable(
    account: SlowdownAccount, budget: JobBudget, iteration_time_s: float, full_speed_time_s: float
) -> bool:
    """Return whether more iterations of this duration would exceed the budget; never for a budget of zero."""
    is_charged = budget.allowance.budget_ratio > 0
    return is_charged and _is_too_slow(account, budget, iteration_time_s, full_speed_time_s)


def _is_too_slow(
    account: SlowdownAccount, budget: JobBudget, iteration_time_s: float, full_speed_time_s: float
) -> bool:
    """Return whether full speed would not make up for iterations of this duration until a change takes effect."""
    longest_s = account.longest_time_s(
        full_speed_time_s,
        allowance=budget.allowance,
        slot_s=budget.settling_iterations * iteration_time_s,
        reserve_s=budget.reserve_s,
    )
    return iteration_time_s > max(longest_s, full_speed_time_s) * (1.0 + _SAME_RATIO)


def view_deadline(budget: JobBudget, account: SlowdownAccount, now_at: datetime) -> datetime | None:
    """Return the deadline for a target policy: the job's, or the end of its budgeted time if the work is known."""
    allowance = budget.allowance
    if allowance.work_s is None or budget.deadline_at is None:
        return budget.deadline_at
    within_s = allowance.work_s + allowance.budget_ratio * (account.full_speed_s + allowance.work_s) - account.excess_s
    return min(budget.deadline_at, now_at + timedelta(seconds=max(0.0, within_s)))
