"""Carbon intensities, their forecasts, emissions in grams, and the fallback when the source is unavailable.

An intensity is never a bare number: average and marginal, life-cycle and direct, measured and estimated values are
different quantities and are never combined.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from gpuenergyd.errors import CarbonDataError, CarbonSourceError

JOULES_PER_KWH = 3.6e6
GRAMS_PER_POUND = 453.59237
MAX_AVERAGE_G_PER_KWH = 2000.0
MAX_MARGINAL_G_PER_KWH = 3000.0
"""Above all recorded values of any grid: a larger value has a wrong unit or comes from a broken reply."""
HOUR = timedelta(hours=1)


class SignalKind(StrEnum):
    """Average or marginal intensity."""

    AVERAGE = "average"
    MARGINAL = "marginal"


class EmissionFactor(StrEnum):
    """Scope of the emissions of a power plant."""

    LIFECYCLE = "lifecycle"
    DIRECT = "direct"
    OPERATIONAL = "operational"


class SampleStatus(StrEnum):
    """Origin of a value, best first."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    FORECAST = "forecast"
    STATIC = "static"


_STATUS_RANK = {status: rank for rank, status in enumerate(SampleStatus)}


@dataclass(frozen=True, slots=True)
class CarbonSignal:
    """Quantity and source of a series of intensities; values of two signals are never mixed."""

    zone: str
    source: str
    kind: SignalKind = SignalKind.AVERAGE
    factor: EmissionFactor = EmissionFactor.LIFECYCLE


@dataclass(frozen=True, slots=True)
class IntensitySample:
    """Intensity in the interval [`valid_from_at`, `valid_to_at`)."""

    valid_from_at: datetime
    valid_to_at: datetime
    carbon_intensity_g_per_kwh: float
    status: SampleStatus = SampleStatus.MEASURED

    def __post_init__(self) -> None:
        if self.valid_from_at.utcoffset() is None or self.valid_to_at.utcoffset() is None:
            raise CarbonDataError(f"interval {self.valid_from_at} to {self.valid_to_at} needs a time zone, e.g. UTC")
        if not self.valid_from_at < self.valid_to_at:
            raise CarbonDataError(f"interval {self.valid_from_at} to {self.valid_to_at} must end after it begins")


def checked_intensity(value: object, kind: SignalKind = SignalKind.AVERAGE) -> float:
    """Return a carbon intensity in g/kWh as a float.

    Raises:
        CarbonSourceError: the value is not a number, negative, or larger than any grid's.
    """
    limit = MAX_MARGINAL_G_PER_KWH if kind is SignalKind.MARGINAL else MAX_AVERAGE_G_PER_KWH
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        shown = "null" if value is None else f"{value!r:.40}"
        raise CarbonSourceError(f"carbon intensity {shown} is not a number from 0 to {limit:g} g/kWh ({kind})")
    return float(value)


def grams(energy_j: float, carbon_intensity_g_per_kwh: float) -> float:
    """Return the emissions of an amount of energy."""
    return energy_j / JOULES_PER_KWH * carbon_intensity_g_per_kwh


@dataclass(frozen=True, slots=True)
class HourlySeries:
    """Hourly signal without gaps; unknown hours are NaN.

    The signal is a carbon intensity in g/kWh, or a price or another cost per energy in the unit `unit`.
    """

    zone: str
    first_hour_at: datetime
    values: tuple[float, ...]
    unit: str = "g/kWh"
    is_fixed: bool = False
    """Whether the values are one constant set by the user instead of readings of the grid."""

    def __post_init__(self) -> None:
        first = self.first_hour_at
        if first.utcoffset() != timedelta(0) or (first.minute, first.second, first.microsecond) != (0, 0, 0):
            raise CarbonDataError(f"first hour {first} must be a full hour in UTC")

    @property
    def end_at(self) -> datetime:
        """End of the last hour."""
        return self.first_hour_at + len(self.values) * HOUR

    def index_of(self, instant: datetime) -> int:
        """Return the index of the hour that contains an instant; the index may be outside of the series."""
        return (instant - self.first_hour_at) // HOUR

    def until(self, instant: datetime) -> "HourlySeries":
        """Return the hours that were complete at an instant, for replays without look-ahead."""
        num_known = min(len(self.values), max(0, self.index_of(instant)))
        return replace(self, values=self.values[:num_known])


def hourly_series(zone: str, samples: Iterable[IntensitySample]) -> HourlySeries | None:
    """Return time-weighted hourly means, using the sample of best status for each interval; None without samples.

    An hour is NaN if samples cover less than half of it.
    """
    best: dict[datetime, IntensitySample] = {}
    for sample in samples:
        known = best.get(sample.valid_from_at)
        if known is None or _STATUS_RANK[sample.status] <= _STATUS_RANK[known.status]:
            best[sample.valid_from_at] = sample
    if not best:
        return None
    sums: dict[datetime, tuple[float, float]] = {}
    for sample in best.values():
        begin = sample.valid_from_at.astimezone(UTC)
        end = sample.valid_to_at.astimezone(UTC)
        while begin < end:
            hour = begin.replace(minute=0, second=0, microsecond=0)
            until = min(end, hour + HOUR)
            weight_s = (until - begin).total_seconds()
            total, known_s = sums.get(hour, (0.0, 0.0))
            sums[hour] = (total + weight_s * sample.carbon_intensity_g_per_kwh, known_s + weight_s)
            begin = until
    first, last = min(sums), max(sums)
    hours = [first + k * HOUR for k in range((last - first) // HOUR + 1)]
    values = [sums[hour][0] / sums[hour][1] if hour in sums and sums[hour][1] >= 1800.0 else math.nan for hour in hours]
    is_fixed = all(sample.status is SampleStatus.STATIC for sample in best.values())
    return HourlySeries(zone, first, values=tuple(values), is_fixed=is_fixed)


@dataclass(frozen=True, slots=True)
class ForecastHour:
    """Forecast of one hour: expected intensity with the bounds of its 95 % interval."""

    target_at: datetime
    carbon_intensity_g_per_kwh: float
    low_g_per_kwh: float
    high_g_per_kwh: float


@dataclass(frozen=True, slots=True)
class ForecastSkill:
    """Reduction of the mean absolute error relative to the best naive forecast; 0.3 is 30 % smaller.

    Naive forecasts are persistence, the same hour yesterday, the same hour a week ago, and the hour's 7-day mean.
    """

    skill_1h_ratio: float
    skill_6h_ratio: float
    skill_24h_mean_ratio: float
    num_origins: int


@dataclass(frozen=True, slots=True)
class CarbonForecast:
    """Forecast of a zone from `issued_at` on, with its model and recent skill."""

    zone: str
    issued_at: datetime
    model: str
    hours: tuple[ForecastHour, ...]
    unit: str = "g/kWh"
    skill: ForecastSkill | None = None
    """Skill over the last weeks; None while there is too little data."""

    def value_at(self, instant: datetime) -> float | None:
        """Return the expected value at an instant; None beyond the forecast."""
        for hour in self.hours:
            if hour.target_at <= instant < hour.target_at + HOUR:
                return hour.carbon_intensity_g_per_kwh
        return None


class IntensityBasis(StrEnum):
    """Basis of the current intensity, best first; `neutral` disables carbon timing."""

    FIXED = "fixed"
    LIVE = "live"
    FORECAST = "forecast"
    HISTORICAL_MEAN = "historical-mean"
    NEUTRAL = "neutral"

    @property
    def is_current(self) -> bool:
        """Whether the intensity is that of the current hour, instead of a substitute for a missing value."""
        return self in {IntensityBasis.FIXED, IntensityBasis.LIVE}


@dataclass(frozen=True, slots=True)
class StalenessRules:
    """Maximum age of each basis; beyond it the next basis is used."""

    live_max_age_s: float = 2 * 3600.0
    forecast_max_age_s: float = 24 * 3600.0
    history_max_age_s: float = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class IntensityNow:
    """Current intensity with its basis; the intensity is None with basis `neutral`."""

    carbon_intensity_g_per_kwh: float | None
    basis: IntensityBasis
    age_s: float | None
    """Time since the end of the newest known interval; None without one, and for a fixed value."""


def intensity_now(
    now_at: datetime,
    history: HourlySeries | None,
    forecast: CarbonForecast | None = None,
    *,
    rules: StalenessRules | None = None,
) -> IntensityNow:
    """Return the current intensity: the last value while fresh, else the forecast, else the mean of this hour of day.

    A history that ends in the future, because of a wrong clock, has age 0.
    """
    rules = rules or StalenessRules()
    values = history.values if history is not None else ()
    newest = next((k for k in range(len(values) - 1, -1, -1) if math.isfinite(values[k])), None)
    age_s = None
    if history is not None and newest is not None:
        if history.is_fixed:
            return IntensityNow(values[newest], IntensityBasis.FIXED, None)
        here = min(newest, max(0, history.index_of(now_at)))
        age_s = max(0.0, (now_at - (history.first_hour_at + (newest + 1) * HOUR)).total_seconds())
        if age_s <= rules.live_max_age_s:
            value = values[here] if math.isfinite(values[here]) else values[newest]
            return IntensityNow(value, IntensityBasis.LIVE, age_s)
    if forecast is not None and (now_at - forecast.issued_at).total_seconds() <= rules.forecast_max_age_s:
        expected = forecast.value_at(now_at)
        if expected is not None and math.isfinite(expected):
            return IntensityNow(expected, IntensityBasis.FORECAST, age_s)
    if history is not None and age_s is not None and age_s <= rules.history_max_age_s:
        mean = same_hour_mean(history, now_at)
        if mean is not None:
            return IntensityNow(mean, IntensityBasis.HISTORICAL_MEAN, age_s)
    return IntensityNow(None, IntensityBasis.NEUTRAL, age_s)


def same_hour_mean(history: HourlySeries, instant: datetime, num_days: int = 7) -> float | None:
    """Return the mean of the last `num_days` known values at an instant's hour of day; None if there is none."""
    index = history.index_of(instant)
    known = [v for v in reversed(history.values[(index % 24) :: 24]) if math.isfinite(v)][:num_days]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class CarbonSavings:
    """Savings in grams, separately for running slower at any hour (frontier) and for choosing the hours (timing).

    `saved_by_timing_g` may be negative.
    """

    actual_g: float
    full_speed_g: float
    """Emissions of the same work at the fastest plan, from the same start."""
    equal_time_constant_g: float
    """Emissions of the same work at one constant point with the same total time."""

    @property
    def saved_by_frontier_g(self) -> float:
        """Saving of a constant point with the same total time against full speed."""
        return self.full_speed_g - self.equal_time_constant_g

    @property
    def saved_by_timing_g(self) -> float:
        """Additional saving from choosing the hours."""
        return self.equal_time_constant_g - self.actual_g
