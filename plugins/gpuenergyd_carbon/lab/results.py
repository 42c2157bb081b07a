"""Request and results of a replay of past traces."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from gpuenergyd.core.carbon.intensity import ForecastSkill, HourlySeries

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
    """Length of the history that the forecaster sees, as shortly after an installation; None for all of it."""
    want_forecasts: bool = False


@dataclass(frozen=True, slots=True)
class ReplayMethod:
    """Result of one forecast method with the same controller and jobs; ratios refer to full-speed emissions."""

    name: str
    saving_ratio: float
    captured_ratio: float
    """Share of the timing gain of a perfect forecast; may be negative."""
    worst_job_ratio: float
    """Lowest saving of any job beyond that of a constant slowdown of equal time; may be negative."""
    time_used_ratio_max: float
    """Largest ratio of used to permitted time of any job; never above 1."""
    mean_slowdown_ratio: float


@dataclass(frozen=True, slots=True)
class ReplayedJob:
    """Replayed job: one operating point for each hour from its start."""

    start_at: datetime
    choices: tuple[Choice, ...]


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
    """Share of hours inside the 95 % interval that was issued at the start of their day."""
    methods: tuple[ReplayMethod, ...]
    """The forecast, yesterday's values, the 7-day mean, Chase's rule and a perfect forecast."""
    refit_s_max: float
    forecast_s_max: float
    jobs: tuple[ReplayedJob, ...]
    first_issued_at: datetime
    forecasts: tuple[tuple[float, ...], ...] = ()
    """One row per hour from `first_issued_at` on if they were wanted; column 0 is the hour of issue."""
    notes: tuple[str, ...] = ()
    """Remarks that are needed to interpret the figures."""
