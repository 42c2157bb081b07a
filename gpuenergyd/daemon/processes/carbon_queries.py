"""What the core asks the policy host about the grid: a forecast, what timing is worth, a job's target. One answer each.

Series travel with null for hours nobody knows: JSON has no NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import entry_points
from typing import Any

from gpuenergyd.core.carbon.intensity import CarbonForecast, HourlySeries, intensity_now
from gpuenergyd.core.carbon.replay import Forecast, TimingValue, TimingValueEstimator
from gpuenergyd.core.job.measured_frontier import measured_frontier
from gpuenergyd.core.policy_api.policy import ClockPolicy, FrontierPoint, JobView, TargetDecision, TargetView
from gpuenergyd.errors import UnknownPolicyError

CARBON_GROUP = "gpuenergyd.carbon"
FORECAST_HOURS = 72


@dataclass(frozen=True, slots=True)
class EncodedSeries:
    """An hourly series as it travels."""

    zone: str
    first_hour_at: datetime
    values: tuple[float | None, ...]
    unit: str

    @classmethod
    def of(cls, series: HourlySeries, last_hours: int | None = None) -> "EncodedSeries":
        """Return a series to send, or its last hours."""
        values = series.values if last_hours is None else series.values[-last_hours:]
        first_at = series.end_at - len(values) * (series.end_at - series.first_hour_at) / max(1, len(series.values))
        return cls(series.zone, first_at, tuple(v if math.isfinite(v) else None for v in values), series.unit)

    def series(self) -> HourlySeries:
        """Return what was sent."""
        values = tuple(math.nan if value is None else value for value in self.values)
        return HourlySeries(self.zone, self.first_hour_at, values=values, unit=self.unit)


@dataclass(frozen=True, slots=True)
class ForecastQuery:
    """What comes, from a history; with `timing_value_query`, also what timing could have been worth lately."""

    history: EncodedSeries
    timing_value_query: "TimingValueQuery | None" = None


@dataclass(frozen=True, slots=True)
class TimingValueQuery:
    """For which budget and frontier; without points one is assumed."""

    max_slowdown_ratio: float
    job_hours: float
    host_power_w: float
    frontier: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class ForecastReply:
    """A forecast, and what timing is worth where that was asked and can be said."""

    forecast: CarbonForecast
    timing_value: TimingValue | None = None


@dataclass(frozen=True, slots=True)
class TargetQuery:
    """A job's target; the host adds the frontier, which only its policy knows.

    `view` is by the grid's time, in which `time_scale` seconds pass in one second of the host.
    """

    target_policy: str
    view: TargetView
    history: EncodedSeries | None
    time_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class TargetReply:
    """The decision and the frontier it rests on, both by the host's time."""

    decision: TargetDecision
    frontier: tuple[tuple[float, float], ...]


def answer_forecast(question: ForecastQuery) -> ForecastReply:
    """Return what the installed machinery says.

    Raises:
        UnknownPolicyError: no installed package forecasts.
        GpuEnergyError: the history cannot be used.
    """
    history = question.history.series()
    forecast: Forecast = _machinery("forecast")
    expected = forecast(history, num_hours=FORECAST_HOURS)
    worth = None
    if question.timing_value_query is not None:
        timing_value_query: TimingValueEstimator = _machinery("timing-value")
        asked = question.timing_value_query
        worth = timing_value_query(
            history,
            frontier=asked.frontier,
            max_slowdown_ratio=asked.max_slowdown_ratio,
            job_hours=asked.job_hours,
            host_power_w=asked.host_power_w,
        )
    return ForecastReply(expected, worth)


def answer_target(
    target_policy: Any, question: TargetQuery, policy: ClockPolicy | None, job_view: JobView | None
) -> TargetReply:
    """Return the target policy's decision for a job, on the frontier that its clock policy knows."""
    points = frontier_of(policy, job_view)
    scale = question.time_scale
    scaled = tuple(FrontierPoint(p.iteration_time_s * scale, p.energy_j * scale, None) for p in points)
    history = question.history.series() if question.history is not None else None
    view = replace(question.view, frontier=scaled, history=history)
    explain: Callable[[TargetView], TargetDecision] | None = getattr(target_policy, "explain", None)
    if explain is not None:
        decision = explain(view)
    else:
        here = intensity_now(view.now_at, history, view.forecast)
        decision = TargetDecision(
            target_policy.next_target(view), question.target_policy, here.basis, here.carbon_intensity_g_per_kwh
        )
    target = decision.target
    unscaled = replace(
        target,
        permitted_time_s=None if target.permitted_time_s is None else target.permitted_time_s / scale,
        straggler_time_s=None if target.straggler_time_s is None else target.straggler_time_s / scale,
    )
    return TargetReply(
        replace(decision, target=unscaled, overrun_s=decision.overrun_s / scale),
        tuple((point.iteration_time_s, point.energy_j) for point in points),
    )


def frontier_of(policy: ClockPolicy | None, view: JobView | None) -> tuple[FrontierPoint, ...]:
    """Return what a job can run at: as its policy knows it, else as it was measured."""
    if view is None:
        return ()
    known: Callable[[JobView], tuple[FrontierPoint, ...]] | None = getattr(policy, "frontier", None)
    return known(view) if known is not None else measured_frontier(view)


def _machinery(name: str) -> Any:
    found = tuple(entry_points(group=CARBON_GROUP, name=name))
    if not found:
        raise UnknownPolicyError(f"no installed package offers {name!r} in {CARBON_GROUP}; gpuenergyd itself does")
    return found[0].load()
