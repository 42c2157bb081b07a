"""Interface of policies that choose the target of a job, for example by the grid's carbon intensity."""

from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gpuenergyd.core.carbon.intensity import CarbonForecast, HourlySeries, IntensityBasis
from gpuenergyd.core.policy_api.policy import BaselineView, FrontierPoint
from gpuenergyd.core.policy_api.target import PerformanceTarget


class TargetPolicy(Protocol):
    """Chooses the iteration time target of one job, several times an hour. Entry point: `gpuenergyd.targets`.

    A policy may also have `explain(view) -> TargetDecision`, which is then called instead; `status` shows its reason.
    """

    def next_target(self, view: "TargetView") -> PerformanceTarget:
        """Return the target from now on."""
        ...


@dataclass(frozen=True, slots=True)
class TargetView:
    """Everything known about a job for choosing its target: slowdown budget, progress and the signal to follow.

    `frontier` holds the job's points, or those of uniform clocks if it has no pipeline; it is empty while unknown.
    `active_time_s` is the time of finished iterations without checkpoints, evaluation, data stalls and waits for a
    straggler, because only slowdown chosen by a policy is charged to the budget.
    """

    job_id: str
    now_at: datetime
    max_slowdown_ratio: float
    baseline: BaselineView
    num_iterations_done: int
    active_time_s: float
    frontier: tuple[FrontierPoint, ...] = ()
    num_iterations_total: int | None = None
    deadline_at: datetime | None = None
    history: HourlySeries | None = None
    """Carbon intensity, price or another cost per energy, up to now."""
    forecast: CarbonForecast | None = None
    full_speed_time_s: float | None = None
    """Recently measured iteration time at full speed, under power caps if any; None if only the baseline is known."""
    straggler_time_s: float | None = None
    current_target_time_s: float | None = None
    """Last target chosen by this policy; small changes do not justify a new plan."""
    host_power_w: float = 0.0
    window_s: float = 72 * 3600.0
    """Period of the slowdown budget for jobs of unknown length."""


@dataclass(frozen=True, slots=True)
class TargetDecision:
    """Target with its reason and basis."""

    target: PerformanceTarget
    reason: str
    basis: IntensityBasis
    intensity: float | None
    """Current value of the signal, in its own unit."""
    overrun_s: float = 0.0
    """Time by which the job misses its budget even at full speed, due to stragglers, power caps or lost time."""
