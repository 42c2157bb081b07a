"""Forecasts and timing values, which the daemon has a policy host compute: query and reply."""

from dataclasses import dataclass

from gpuenergyd.core.carbon.intensity import CarbonForecast
from gpuenergyd.daemon.processes.target_queries import EncodedSeries

TASK = "carbon-forecast"


@dataclass(frozen=True, slots=True)
class TimingValue:
    """Upper bound of the recent savings from carbon timing, as ratios of full-speed emissions.

    The bound assumes a perfect forecast. It shows before a job starts whether timing is worthwhile in a zone.
    """

    constant_saving_ratio: float
    """Saving of a constant slowdown."""
    timing_gain_ratio: float
    """Additional saving of a perfect choice of hours."""
    max_slowdown_ratio: float
    job_hours: float
    num_jobs: int
    num_days: int
    is_frontier_assumed: bool
    """Whether the frontier is that of a small simulated pipeline, because no job has measured one yet."""


@dataclass(frozen=True, slots=True)
class TimingValueQuery:
    """Query for the value of timing: budget, job length and power of the host; a typical frontier is assumed."""

    max_slowdown_ratio: float
    job_hours: float
    host_power_w: float


@dataclass(frozen=True, slots=True)
class ForecastQuery:
    """Query for a forecast from a history, and optionally for the recent value of timing."""

    history: EncodedSeries
    timing_value: TimingValueQuery | None = None


@dataclass(frozen=True, slots=True)
class ForecastReply:
    """A forecast, and the value of timing if it was requested and can be computed."""

    forecast: CarbonForecast
    timing_value: TimingValue | None = None
