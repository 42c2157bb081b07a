"""The present carbon intensity, and the fallback when the source is unavailable."""

import math
from dataclasses import dataclass
from datetime import datetime

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, HourlySeries, IntensityBasis


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
