"""Requests and results of replays of past traces, forecasts and timing values; implemented by plugins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gpuenergyd.core.carbon.intensity import CarbonForecast, ForecastSkill, HourlySeries

Choice = float | tuple[tuple[float, float], ...]
"""Operating point of a slot: an iteration time in seconds, or a mix of `(iteration_time_s, share of the slot)`."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Replay of jobs on past traces without look-ahead.

    `starts_at` lists the start of each job by zone; other zones get `num_starts` random hours (seed `seed`) after
    `train_until_at` that leave room for the whole job.
    """

    traces: tuple[HourlySeries, ...]
    frontier: tuple[tuple[float, float], ...]
    """Points `(iteration_time_s, energy_j)`; noisy and dominated points are allowed."""
    train_until_at: datetime
    max_slowdown_ratio: float = 0.025
    job_hours: float = 72.0
    num_starts: int = 240
    seed: int = 1
    starts_at: Mapping[str, tuple[datetime, ...]] | None = None
    host_power_w: float = 0.0
    history_days: int | None = None
    """Length of the history that the forecaster sees, as after an installation; None for all."""
    want_forecasts: bool = False


@dataclass(frozen=True, slots=True)
class ReplayMethod:
    """Result of one forecast method with the same controller and jobs; ratios refer to full-speed emissions."""

    name: str
    saving_ratio: float
    captured_ratio: float
    """Share of the timing gain of a perfect forecast; may be negative."""
    worst_job_ratio: float
    """Lowest saving of a job in addition to that of a constant slowdown of equal time; may be negative."""
    time_used_ratio_max: float
    """Ratio of used to permitted time of the worst job; never above 1."""
    mean_slowdown_ratio: float


@dataclass(frozen=True, slots=True)
class ReplayedJob:
    """Replayed job: one operating point for each hour from its start."""

    start_at: datetime
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class IssuedForecasts:
    """Forecasts of a zone, one row per hour from `first_issued_at`; column 0 is the hour of issue."""

    first_issued_at: datetime
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ZoneReplay:
    """Result of one zone: timing gain, captured share and skill of the forecasts."""

    zone: str
    num_jobs: int
    constant_saving_ratio: float
    oracle_saving_ratio: float
    timing_gain_ratio: float
    achieved_saving_ratio: float
    captured_ratio: float
    time_used_ratio_max: float
    skill: ForecastSkill
    interval_coverage_ratio: float | None
    """Share of each next day's hours inside the 95 % interval issued at its beginning."""
    methods: tuple[ReplayMethod, ...]
    """The forecast, yesterday's values, the 7-day mean, Chase's rule and a perfect forecast."""
    refit_s_max: float
    forecast_s_max: float
    jobs: tuple[ReplayedJob, ...]
    forecasts: IssuedForecasts | None = None
    notes: tuple[str, ...] = ()
    """Remarks that are needed to interpret the figures."""


class Replay(Protocol):
    """Replays past traces. Entry point: `gpuenergyd.carbon`, name `backtest`."""

    def __call__(self, request: ReplayRequest) -> Sequence[ZoneReplay]:
        """Return one result for each trace, in order.

        Raises:
            CarbonDataError: a trace, the frontier or a start is unusable; the message names it.
        """
        ...


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
    """Recent upper bound of the savings from carbon timing, with perfect forecast; ratios of full-speed emissions.

    No forecast reaches it; it shows before a job starts whether timing is worthwhile in a zone.
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
