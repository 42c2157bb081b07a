"""Forecasts and timing values of carbon intensity: what plugins of the group `gpuenergyd.carbon` implement."""

from dataclasses import dataclass
from typing import Protocol

from gpuenergyd.core.carbon.intensity import CarbonForecast, HourlySeries


class Forecast(Protocol):
    """Forecasts an hourly signal. Entry point: `gpuenergyd.carbon`, name `forecast`."""

    def __call__(self, history: HourlySeries, *, num_hours: int = 24) -> CarbonForecast:
        """Return the forecast issued at the end of the history, with 95 % intervals and its skill on that history.

        Raises:
            CarbonDataError: the history has no value.
        """
        ...


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


class TimingValueEstimator(Protocol):
    """Estimates the value of carbon timing. Entry point: `gpuenergyd.carbon`, name `timing-value`."""

    def __call__(
        self,
        history: HourlySeries,
        *,
        frontier: tuple[tuple[float, float], ...] = (),
        max_slowdown_ratio: float = 0.025,
        job_hours: float = 72.0,
        host_power_w: float = 0.0,
    ) -> TimingValue | None:
        """Return the value of timing over the last 30 days; None with too little history."""
        ...
