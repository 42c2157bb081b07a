"""Carbon fields of a job's status: target, budget, emissions and savings."""

from dataclasses import replace
from datetime import datetime
from typing import Any

from gpuenergyd.core.carbon.account import JobCarbon, job_carbon
from gpuenergyd.daemon.carbon.accounts import JobAccount
from gpuenergyd.daemon.carbon.budget import JobBudget
from gpuenergyd.daemon.carbon.feed import CarbonFeed
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.quantities.energy_use import EnergyUse


def carbon_of(
    feed: CarbonFeed, runner: RunningJob, job: JobAccount, *, host_power_w: float, pue: float
) -> JobCarbon | None:
    """Return the emissions of a job's tuned iterations, at the intensities known now; None without such iterations."""
    if not job.slots:
        return None
    baseline = runner.job.baseline
    slots = []
    for hour_at, slot in sorted(job.slots.items()):
        intensity = feed.intensity_of_hour(hour_at)
        slots.append(replace(slot, carbon_intensity_g_per_kwh=None if intensity is None else pue * intensity))
    full_speed = None
    if baseline is not None and baseline.energy_j is not None:
        full_speed = (baseline.iteration_time_s, baseline.energy_j)
    return job_carbon(slots, job.frontier, host_power_w=host_power_w, baseline=full_speed)


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
    savings = carbon.savings if carbon is not None else None
    return {
        "carbon_g": use.carbon_g,
        "estimated_carbon_g": use.estimated_carbon_g,
        "priced_j": use.priced_j,
        "unpriced_j": use.unpriced_j,
        "assumed_host_j": use.assumed_host_j,
        "tuned_carbon_g": savings.actual_g if savings is not None else None,
        "saved_by_plan_g": carbon.saved_by_plan_g if carbon is not None else None,
        "saved_by_frontier_g": savings.saved_by_frontier_g if savings is not None else None,
        "saved_by_timing_g": savings.saved_by_timing_g if savings is not None else None,
        "host_power_w": carbon.host_power_w if carbon is not None else None,
        "pue": pue,
    }
