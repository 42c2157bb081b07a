"""Carbon intensities with what they mean, forecasts of them, grams, and what to believe when the source is silent.

An intensity is never a bare number: average and marginal, life-cycle and direct, measured and estimated values
are different quantities, kept apart here and never summed together.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from gpuenergyd.errors import CarbonDataError, CarbonSourceError

JOULES_PER_KWH = 3.6e6
GRAMS_PER_POUND = 453.59237
MAX_AVERAGE_G_PER_KWH = 2000.0
MAX_MARGINAL_G_PER_KWH = 3000.0
"""No grid on record reaches these: a larger value is a wrong unit or a broken reply."""
HOUR = timedelta(hours=1)


class SignalKind(StrEnum):
    """Which question an intensity answers."""

    AVERAGE = "average"
    MARGINAL = "marginal"


class EmissionFactor(StrEnum):
    """What counts as an emission of a power plant."""

    LIFECYCLE = "lifecycle"
    DIRECT = "direct"
    OPERATIONAL = "operational"


class SampleStatus(StrEnum):
    """How a value came about, best first."""

    MEASURED = "measured"
    ESTIMATED = "estimated"
    FORECAST = "forecast"
    STATIC = "static"


_BELIEF = {status: rank for rank, status in enumerate(SampleStatus)}


@dataclass(frozen=True, slots=True)
class CarbonSignal:
    """Which quantity a series of intensities is, and who says so; values of two signals are never mixed."""

    zone: str
    source: str
    kind: SignalKind = SignalKind.AVERAGE
    factor: EmissionFactor = EmissionFactor.LIFECYCLE


@dataclass(frozen=True, slots=True)
class IntensitySample:
    """The intensity from `valid_from_at` until before `valid_to_at`."""

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
        CarbonSourceError: it is no number, negative, or larger than any grid's.
    """
    limit = MAX_MARGINAL_G_PER_KWH if kind is SignalKind.MARGINAL else MAX_AVERAGE_G_PER_KWH
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
        shown = "null" if value is None else f"{value!r:.40}"
        raise CarbonSourceError(f"carbon intensity {shown} is no number from 0 to {limit:g} g/kWh ({kind})")
    return float(value)


def grams(energy_j: float, carbon_intensity_g_per_kwh: float) -> float:
    """Return the emissions of an amount of energy."""
    return energy_j / JOULES_PER_KWH * carbon_intensity_g_per_kwh


@dataclass(frozen=True, slots=True)
class HourlySeries:
    """An hourly signal without gaps in its stamps; an hour of which nothing is known holds NaN.

    The signal is a carbon intensity in g/kWh, or a price or any other cost per energy that `unit` names.
    """

    zone: str
    first_hour_at: datetime
    values: tuple[float, ...]
    unit: str = "g/kWh"

    def __post_init__(self) -> None:
        first = self.first_hour_at
        if first.utcoffset() != timedelta(0) or (first.minute, first.second, first.microsecond) != (0, 0, 0):
            raise CarbonDataError(f"first hour {first} must be a full hour in UTC")

    @property
    def end_at(self) -> datetime:
        """The end of the last hour."""
        return self.first_hour_at + len(self.values) * HOUR

    def index_of(self, instant: datetime) -> int:
        """Return the position of the hour that holds an instant; it may lie outside the series."""
        return (instant - self.first_hour_at) // HOUR

    def until(self, instant: datetime) -> "HourlySeries":
        """Return only what was complete at an instant: a replay sees nothing later."""
        num_known = min(len(self.values), max(0, self.index_of(instant)))
        return HourlySeries(self.zone, self.first_hour_at, values=self.values[:num_known], unit=self.unit)


def hourly_series(zone: str, samples: Iterable[IntensitySample]) -> HourlySeries | None:
    """Return hourly means, weighted by time, each from the best status known of an instant; None without samples.

    An hour of which less than half is known holds NaN.
    """
    best: dict[datetime, IntensitySample] = {}
    for sample in samples:
        known = best.get(sample.valid_from_at)
        if known is None or _BELIEF[sample.status] <= _BELIEF[known.status]:
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
    return HourlySeries(zone, first, values=tuple(values))


@dataclass(frozen=True, slots=True)
class ForecastHour:
    """One hour ahead: the expected intensity, and the values below which it stays with 10 % and 90 % probability."""

    target_at: datetime
    carbon_intensity_g_per_kwh: float
    low_g_per_kwh: float
    high_g_per_kwh: float


@dataclass(frozen=True, slots=True)
class ForecastSkill:
    """How much smaller the mean absolute error is than the best naive forecast's; 0.3 is 30 % smaller.

    Naive forecasts are: persistence, yesterday, a week ago, and the same hour's mean over 7 days.
    """

    skill_1h_ratio: float
    skill_6h_ratio: float
    skill_24h_mean_ratio: float
    num_origins: int


@dataclass(frozen=True, slots=True)
class CarbonForecast:
    """What is expected of a zone from `issued_at` on, by which model, and how good it has lately been."""

    zone: str
    issued_at: datetime
    model: str
    hours: tuple[ForecastHour, ...]
    unit: str = "g/kWh"
    skill: ForecastSkill | None = None
    """On live data of the last weeks; None while there is too little to judge."""

    def value_at(self, instant: datetime) -> float | None:
        """Return the value expected for the hour that holds an instant, None where the forecast does not reach."""
        for hour in self.hours:
            if hour.target_at <= instant < hour.target_at + HOUR:
                return hour.carbon_intensity_g_per_kwh
        return None


class IntensityBasis(StrEnum):
    """What the intensity of now rests on, best first; `neutral` means that timing is off."""

    LIVE = "live"
    FORECAST = "forecast"
    HISTORICAL_MEAN = "historical-mean"
    NEUTRAL = "neutral"


@dataclass(frozen=True, slots=True)
class StalenessRules:
    """How old what is known may be before the next basis is used."""

    live_max_age_s: float = 2 * 3600.0
    forecast_max_age_s: float = 24 * 3600.0
    history_max_age_s: float = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class IntensityNow:
    """The intensity that stands for now, and why that one; None on the basis `neutral`."""

    carbon_intensity_g_per_kwh: float | None
    basis: IntensityBasis
    age_s: float | None
    """Time since the newest known interval ended."""


def intensity_now(
    now_at: datetime,
    history: HourlySeries | None,
    forecast: CarbonForecast | None = None,
    *,
    rules: StalenessRules | None = None,
) -> IntensityNow:
    """Return the value to act on: the last one while fresh, then the forecast, then the same hour's mean, then none.

    A history that ends in the future is a wrong clock somewhere and counts as age 0.
    """
    rules = rules or StalenessRules()
    values = history.values if history is not None else ()
    newest = next((k for k in range(len(values) - 1, -1, -1) if math.isfinite(values[k])), None)
    age_s = None
    if history is not None and newest is not None:
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
    """Return the mean of the last known values at an instant's hour of day; None when there is none."""
    index = history.index_of(instant)
    known = [v for v in reversed(history.values[(index % 24) :: 24]) if math.isfinite(v)][:num_days]
    return sum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class CarbonSavings:
    """Two effects that are never lumped: running slower at any hour, and choosing the hours.

    `saved_by_timing_g` may be negative; it is then printed so.
    """

    actual_g: float
    full_speed_g: float
    """The same work at the fastest plan, from the same start."""
    equal_time_constant_g: float
    """The same work at one constant point that takes the same total time."""

    @property
    def saved_by_frontier_g(self) -> float:
        """What a constant point of the same total time saves against full speed."""
        return self.full_speed_g - self.equal_time_constant_g

    @property
    def saved_by_timing_g(self) -> float:
        """What choosing the hours saves on top of that."""
        return self.equal_time_constant_g - self.actual_g


@dataclass(frozen=True, slots=True)
class PricedEnergy:
    """Energy times intensity, with how much of the energy had an intensity of which status."""

    carbon_g: float
    priced_j: float
    unpriced_j: float
    """Energy in hours without any intensity: missing is never zero."""
    energy_j_by_status: tuple[tuple[SampleStatus, float], ...]


def price_energy(
    energy: Sequence[tuple[datetime, datetime, float]], samples: Sequence[IntensitySample]
) -> PricedEnergy:
    """Return the grams of `(begin, end, energy_j)` slots, each spread evenly over its time.

    Where several samples hold, the best status counts: measured, estimated, forecast, static; then the later one.
    """
    ordered = sorted(enumerate(samples), key=lambda item: (_BELIEF[item[1].status], -item[0]))
    carbon_g = priced_j = total_j = 0.0
    by_status = dict.fromkeys(SampleStatus, 0.0)
    for begin, end, energy_j in energy:
        total_j += energy_j
        open_parts = [(begin, end)]
        length_s = (end - begin).total_seconds()
        for _, sample in ordered:
            if not open_parts:
                break
            rest: list[tuple[datetime, datetime]] = []
            for part_begin, part_end in open_parts:
                low = max(part_begin, sample.valid_from_at)
                high = min(part_end, sample.valid_to_at)
                if low >= high:
                    rest.append((part_begin, part_end))
                    continue
                share_j = energy_j * (high - low).total_seconds() / length_s
                carbon_g += grams(share_j, sample.carbon_intensity_g_per_kwh)
                priced_j += share_j
                by_status[sample.status] += share_j
                rest += [(a, b) for a, b in ((part_begin, low), (high, part_end)) if a < b]
            open_parts = rest
    return PricedEnergy(
        carbon_g,
        priced_j,
        unpriced_j=max(0.0, total_j - priced_j),
        energy_j_by_status=tuple((status, energy_j) for status, energy_j in by_status.items() if energy_j > 0),
    )
