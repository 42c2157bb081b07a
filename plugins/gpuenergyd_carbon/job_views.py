"""A job as a target policy and its status see it: view, budget, emissions, and targets as phrases and times."""

from dataclasses import replace
from datetime import datetime
from typing import Any

from gpuenergyd.core.carbon.account import JobCarbon, job_carbon, saving_fields
from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetView
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.quantities.energy_use import EnergyUse
from gpuenergyd_carbon.accounts import JobAccount
from gpuenergyd_carbon.budget import JobBudget, view_deadline
from gpuenergyd_carbon.feed import CarbonFeed
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.rules.slowdown_account import SlowdownAccount


def host_power_w(settings: Settings, runner: RunningJob) -> float:
    """Return the power assumed for the job's hosts, not counting their GPUs."""
    return settings.carbon_host_power_w * runner.job.ranks.num_hosts


def target_s(target: PerformanceTarget, baseline: BaselineView | None) -> float | None:
    """Return the iteration time permitted to the job itself, None for full speed."""
    if baseline is None or (target.permitted_time_s is None and not target.max_slowdown_ratio):
        return None
    return target.own.iteration_time_s(baseline.iteration_time_s)


def target_text(target: PerformanceTarget, reason: str) -> str:
    if target.permitted_time_s is None:
        return (
            f"target: full speed ({reason})"
            if not target.max_slowdown_ratio
            else f"target: constant slowdown ({reason})"
        )
    return f"target: {target.permitted_time_s:.4g} s per iteration ({reason})"


def target_view(
    settings: Settings,
    grid: GridClock,
    runner: RunningJob,
    baseline: BaselineView,
    account: SlowdownAccount,
    budget: JobBudget,
    forecast: CarbonForecast | None,
    now_at: datetime,
) -> TargetView:
    """Return the target policy's view of a job; times are grid time, which runs faster in a replay."""
    speed, target = grid.speed, runner.job.target
    end_at = view_deadline(budget, account, now_at)
    left = budget.num_iterations_left
    return TargetView(
        job_id=runner.job_id,
        now_at=grid.to_grid(now_at),
        max_slowdown_ratio=runner.job.description.target.max_slowdown_ratio,
        baseline=BaselineView(
            baseline.iteration_time_s * speed,
            None if baseline.energy_j is None else baseline.energy_j * speed,
            baseline.num_iterations,
            baseline.iteration_sigma_s * speed,
        ),
        num_iterations_done=account.num_iterations,
        active_time_s=account.active_s * speed,
        num_iterations_total=None if left is None else account.num_iterations + left,
        deadline_at=None if end_at is None else grid.to_grid(end_at),
        forecast=forecast,
        full_speed_time_s=baseline.iteration_time_s * (1.0 + account.drift_ratio(baseline.iteration_time_s)) * speed,
        straggler_time_s=None if target.straggler_time_s is None else target.straggler_time_s * speed,
        current_target_time_s=None if target.permitted_time_s is None else target.permitted_time_s * speed,
        host_power_w=host_power_w(settings, runner),
        window_s=settings.carbon_window_h * HOUR.total_seconds(),
    )


def carbon_of(
    settings: Settings, feed: CarbonFeed, runner: RunningJob, job: JobAccount, use: EnergyUse
) -> JobCarbon | None:
    """Return the emissions of a job's tuned iterations, at the intensities known now; None without such iterations."""
    if not job.slots:
        return None
    baseline, pue = runner.job.baseline, settings.pue
    slots = []
    for hour_at, slot in sorted(job.slots.items()):
        intensity = feed.intensities.value_at(hour_at)
        slots.append(replace(slot, carbon_intensity_g_per_kwh=None if intensity is None else pue * intensity))
    full_speed = None
    if baseline is not None and baseline.energy_j is not None:
        full_speed = (baseline.iteration_time_s, baseline.energy_j)
    used_w = use.host_power_w(len(runner.pids))
    host_w = host_power_w(settings, runner) if used_w is None else used_w
    return job_carbon(slots, job.frontier, host_power_w=host_w, baseline=full_speed)


def target_figures(
    settings: Settings, runner: RunningJob, job: JobAccount, budget: JobBudget | None, num_windows: int, now: datetime
) -> dict[str, Any]:
    """Return the status fields of a job's target and budget; unknown values are None."""
    decision = job.decision
    return {
        "policy": settings.target,
        "permitted_time_s": runner.job.target.permitted_time_s,
        "reason": decision.reason if decision is not None else job.trial_refusal or "the job has no tuned plan yet",
        "basis": decision.basis if decision is not None else None,
        "intensity": decision.intensity if decision is not None else None,
        "overrun_s": decision.overrun_s if decision is not None else None,
        "age_s": None if job.decided_at is None else (now - job.decided_at).total_seconds(),
        "budget_ratio": runner.job.description.target.max_slowdown_ratio,
        "slowdown_so_far_ratio": job.account.slowdown_ratio,
        "num_windows": num_windows,
        "num_full_speed_orders": job.num_full_speed_orders,
        "num_iterations_left": budget.num_iterations_left if budget is not None else None,
        "is_length_reached": budget is not None and not budget.is_planned,
        "deadline_at": budget.deadline_at if budget is not None else None,
        "length_basis": budget.basis if budget is not None else None,
        "trial_refusal": job.trial_refusal,
        "is_taken_over": job.is_taken_over,
        "num_frontier_points": len(job.frontier),
    }


def carbon_figures(use: EnergyUse, carbon: JobCarbon | None, pue: float) -> dict[str, Any]:
    """Return the status fields of a job's emissions, in total and of its tuned iterations.

    Unknown values are None.
    """
    return {
        "carbon_g": use.carbon_g,
        "estimated_carbon_g": use.estimated_carbon_g,
        "priced_j": use.priced_j,
        "unpriced_j": use.unpriced_j,
        "assumed_host_j": use.assumed_host_j,
        **saving_fields(carbon),
        "host_power_w": carbon.host_power_w if carbon is not None else None,
        "pue": pue,
    }
