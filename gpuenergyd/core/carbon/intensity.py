"""Carbon intensities, their forecasts, and emissions in grams.

An intensity is never a bare number: average and marginal, life-cycle and direct, measured and estimated values are
different quantities and are never combined.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from gpuenergyd.errors import CarbonDataError

JOULES_PER_KWH = 3.6e6
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
