"""A job as a target policy sees it, and its targets as phrases and times."""

from datetime import datetime

from gpuenergyd.core.carbon.grid_clock import GridClock
from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast
from gpuenergyd.core.carbon.slowdown_account import SlowdownAccount
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetView
from gpuenergyd.daemon.carbon.budget import JobBudget, view_deadline
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.daemon.processes.carbon_queries import TargetReply
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.settings import Settings


def host_power_w(settings: Settings, runner: RunningJob) -> float:
    """Return the power assumed for the job's hosts, not counting their GPUs."""
    return settings.carbon_host_power_w * runner.job.ranks.num_hosts


def frontier_of(reply: TargetReply | PolicyFailure) -> tuple[tuple[float, float], ...]:
    """Return the frontier of a reply; empty after a failure."""
    return () if isinstance(reply, PolicyFailure) else reply.frontier


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
