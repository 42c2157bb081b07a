"""What is asked of a replay of past traces and what it answers; the machinery behind is found by entry point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gpuenergyd.core.carbon.intensity import CarbonForecast, ForecastSkill, HourlySeries

Choice = float | tuple[tuple[float, float], ...]
"""What a slot runs at: an iteration time in seconds, or a mix of `(iteration_time_s, share of the slot)`."""


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """Jobs that start in the past and see, at every hour, only what was known then.

    `starts_at` names the jobs of each zone; a zone it does not name gets `num_starts` hours drawn with `seed` from
    those after `train_until_at` that leave room for the whole job.
    """

    traces: tuple[HourlySeries, ...]
    frontier: tuple[tuple[float, float], ...]
    """`(iteration_time_s, energy_j)`: noisy and dominated points may be among them."""
    train_until_at: datetime
    max_slowdown_ratio: float = 0.025
    job_hours: float = 72.0
    num_starts: int = 240
    seed: int = 1
    starts_at: Mapping[str, tuple[datetime, ...]] | None = None
    host_power_w: float = 0.0
    history_days: int | None = None
    """Let the forecaster see only so many days at any moment, as after an installation; None: all."""
    want_forecasts: bool = False


@dataclass(frozen=True, slots=True)
class ReplayMethod:
    """What one way of looking ahead achieves with the same controller and the same jobs; ratios of full-speed grams."""

    name: str
    saving_ratio: float
    captured_ratio: float
    """Share of what a perfect forecast adds to the constant point; may be negative."""
    worst_job_ratio: float
    """Worst single job's saving beyond the constant point of the same time."""
    time_used_ratio_max: float
    """Time used over time permitted, the worst job's: never above 1."""
    mean_slowdown_ratio: float


@dataclass(frozen=True, slots=True)
class ReplayedJob:
    """One job as it was run: one choice for each hour from its start."""

    start_at: datetime
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True)
class IssuedForecasts:
    """All forecasts of a zone, one row for each hour from `first_issued_at`; column 0 is the hour that begins then."""

    first_issued_at: datetime
    rows: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class ZoneReplay:
    """What timing was worth in one zone, what was captured of it, and how good the forecasts were."""

    zone: str
    num_jobs: int
    constant_saving_ratio: float
    oracle_saving_ratio: float
    timing_gain_ratio: float
    achieved_saving_ratio: float
    captured_ratio: float
    time_used_ratio_max: float
    skill: ForecastSkill
    methods: tuple[ReplayMethod, ...]
    """The forecast and, beside it, yesterday's values, the 7-day mean, Chase's rule and a perfect forecast."""
    refit_s_max: float
    forecast_s_max: float
    jobs: tuple[ReplayedJob, ...]
    forecasts: IssuedForecasts | None = None
    notes: tuple[str, ...] = ()
    """What a reader must know to judge the figures."""


class Replay(Protocol):
    """Lives past traces again. Entry point: `gpuenergyd.carbon`, name `backtest`."""

    def __call__(self, request: ReplayRequest) -> Sequence[ZoneReplay]:
        """Return one result for each trace, in order.

        Raises:
            CarbonDataError: a trace, the frontier or a start that cannot be used; the message says which.
        """
        ...


class Forecast(Protocol):
    """Says what comes. Entry point: `gpuenergyd.carbon`, name `forecast`."""

    def __call__(self, history: HourlySeries, *, num_hours: int = 24) -> CarbonForecast:
        """Return the forecast issued at the end of the history, with quantiles and its skill on that history.

        Raises:
            CarbonDataError: the history holds no value.
        """
        ...


@dataclass(frozen=True, slots=True)
class TimingValue:
    """What following the grid could have saved lately, known in hindsight; ratios of full-speed grams.

    No forecast reaches it: it says before a job starts whether timing is worth the trouble in a zone.
    """

    constant_saving_ratio: float
    """What running slower evenly saves: the same at any hour."""
    timing_gain_ratio: float
    """What a perfect choice of hours adds."""
    max_slowdown_ratio: float
    job_hours: float
    num_jobs: int
    num_days: int
    is_frontier_assumed: bool
    """No job has shown its frontier yet: that of a small simulated pipeline stands in."""


class TimingValueEstimator(Protocol):
    """Says what timing can be worth. Entry point: `gpuenergyd.carbon`, name `timing-value`."""

    def __call__(
        self,
        history: HourlySeries,
        *,
        frontier: tuple[tuple[float, float], ...] = (),
        max_slowdown_ratio: float = 0.025,
        job_hours: float = 72.0,
        host_power_w: float = 0.0,
    ) -> TimingValue | None:
        """Return what timing could have added over the last 30 days; None where too little is known to say."""
        ...
