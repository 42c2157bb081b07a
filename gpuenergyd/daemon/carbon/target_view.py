"""Input of target policies: a job's baseline, account and deadline, in grid time."""

from datetime import datetime

from gpuenergyd.core.carbon.grid_clock import GridClock
from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast
from gpuenergyd.core.carbon.slowdown_account import SlowdownAccount
from gpuenergyd.core.policy_api.policy import BaselineView, TargetView
from gpuenergyd.daemon.carbon.budget import JobBudget, view_deadline
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.daemon.settings import Settings


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
        host_power_w=settings.carbon_host_power_w,
        window_s=settings.carbon_window_h * HOUR.total_seconds(),
    )
