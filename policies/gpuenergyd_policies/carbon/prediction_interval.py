"""The 95 % interval of a forecast, from the errors of the forecasts before it, adapted to its own recent coverage.

Theory of operation. Errors grow and shrink with the variation of the grid, and large errors follow large errors. So an
interval is made in three steps. Its *scale* is a geometric mean of the last week's standard deviation and of the recent
absolute errors. Its *margins* are the quantiles, hour by hour ahead, of three months of errors in units of the scale at
their time; a quantile of 2.5 % needs that many independent days. Its *factor* follows coverage, by day ahead: after a
day with more than 5 % of its hours outside, the next interval is wider, after a day with fewer it is narrower. That is
the proportional part of conformal PID control (Angelopoulos, Candes and Tibshirani 2023) on the logarithm of the width,
and like adaptive conformal inference (Gibbs and Candes 2021) it keeps coverage near its target whatever the errors do.

The factor is no state: it is computed from the recorded forecasts of the same hour of the day, oldest first, each as
soon as all hours of its day ahead have passed. Thus a restart changes nothing. Until enough errors are known, usual
quantiles of other zones stand in for the margins, with the weight of a week of own errors.
"""

from dataclasses import dataclass

import numpy as np

from gpuenergyd_policies.carbon.features import NUM_TARGET_HOURS, WEEK_HOURS, Array, Origins

INTERVAL_RATIO = 0.95
_TAIL_RATIOS = ((1.0 - INTERVAL_RATIO) / 2.0, (1.0 + INTERVAL_RATIO) / 2.0)
LEAST_ORIGINS = 48
"""Forecasts whose first day is over before their errors count."""
_USUAL_WEIGHT_DAYS = 7.0
_WIDENING_RATIO = 1.05
"""Grids change: quantiles of the last three months, taken as they are, contain 94 % of the hours after them."""
_USUAL_HOURS = (1, 2, 3, 6, 12, 24, 48, 72)
_USUAL_MARGINS = (0.41, 0.64, 0.8, 1.15, 1.45, 1.8, 2.2, 2.35)
"""97.5 % quantiles of the absolute errors of the pooled prior alone, in standard deviations of the week before: mean of
eleven years of eight zones (CarbonCast's and Electricity Maps' public traces, 2021 to 2024)."""
_WEEK_SHARE = 0.3
"""Exponent of the week's standard deviation in the scale; the rest is that of recent errors."""
_ERROR_HALF_LIFE_HOURS = 240.0
_ADAPTATION_GAINS = (0.7, 0.4, 0.2)
"""By day ahead, the change of the factor's logarithm per share of hours outside. The first is the largest of those
tried with which intervals did not become wider on average than without; the later days' coverage is known later."""
_MAX_LOG_FACTOR = 1.2
"""Bounds the factor to 0.3 to 3.3."""


@dataclass(frozen=True, slots=True)
class _Past:
    """Recorded forecasts whose first day is over, and what was known when each was issued."""

    origins: Origins
    errors: Array
    """By hour ahead; NaN where the hour has not passed."""
    spreads: Array
    """Standard deviation of the week before."""
    scales: Array


def prediction_interval(
    values: Array, origin: int, predicted: Array, *, recorded_origins: Origins, recorded: Array
) -> tuple[Array, Array]:
    """Return the lower and upper bound of each forecast hour, in the unit of the values.

    Args:
        values: the history, hour by hour.
        origin: the hour in which the forecast is issued; no value from it on is used.
        predicted: the forecast of the next hours.
        recorded_origins: hours in which earlier forecasts were issued, in order, each at least a week into the history.
        recorded: those forecasts, one row of 72 hours each, made without knowledge of their hours.
    """
    spread = float(values[max(0, origin - WEEK_HOURS) : origin].std()) if origin else 0.0
    usual = np.interp(np.arange(1, NUM_TARGET_HOURS + 1), _USUAL_HOURS, _USUAL_MARGINS)
    low, high = -usual * spread, usual * spread
    is_due = recorded_origins <= origin - 24
    num_due = int(is_due.sum())
    if num_due >= LEAST_ORIGINS:
        past, scale = _past(values, origin, spread, recorded_origins[is_due], recorded[is_due])
        own_low, own_high = _own_quantiles(past)
        num_days = num_due / 24.0
        own = _WIDENING_RATIO * num_days / (num_days + _USUAL_WEIGHT_DAYS)
        rest = _USUAL_WEIGHT_DAYS / (num_days + _USUAL_WEIGHT_DAYS)
        factors = _factors(past, origin, own * own_low, own * own_high, rest * usual)
        low = factors * (own * own_low * scale + rest * low)
        high = factors * (own * own_high * scale + rest * high)
    num_hours = len(predicted)
    return np.maximum(predicted + low[:num_hours], 0.0), predicted + high[:num_hours]


def _past(values: Array, origin: int, spread: float, origins: Origins, recorded: Array) -> tuple[_Past, float]:
    """Return the recorded forecasts with their errors and scales, and the scale of the present one."""
    hours = origins[:, None] + np.arange(NUM_TARGET_HOURS)
    errors = np.where(hours < origin, values[np.minimum(hours, origin - 1)] - recorded, np.nan)
    spreads = np.lib.stride_tricks.sliding_window_view(values[:origin], WEEK_HOURS)[origins - WEEK_HOURS].std(axis=1)
    sizes = np.abs(errors[:, :24]).mean(axis=1)
    weights = 0.5 ** ((origins[-1] - origins) / _ERROR_HALF_LIFE_HOURS)
    means = np.cumsum(weights * sizes) / np.cumsum(weights)
    known = np.searchsorted(origins, np.append(origins, origin) - 24, side="right") - 1
    recent = means[np.maximum(known, 0)]
    scales = np.append(spreads, spread) ** _WEEK_SHARE * recent ** (1.0 - _WEEK_SHARE)
    return _Past(origins, errors, spreads, scales[:-1]), float(scales[-1])


def _own_quantiles(past: _Past) -> tuple[Array, Array]:
    """Return the quantiles of the errors in units of the scale, by hour ahead: at most 0, at least 0."""
    # A time without variation says nothing of the relative size of an error.
    relative = past.errors / np.where(past.scales > 0, past.scales, np.inf)[:, None]
    lows, highs = np.empty(NUM_TARGET_HOURS), np.empty(NUM_TARGET_HOURS)
    for k in range(NUM_TARGET_HOURS):
        known = relative[np.isfinite(relative[:, k]), k]
        lows[k], highs[k] = np.quantile(known, _TAIL_RATIOS) if len(known) else (lows[k - 1], highs[k - 1])
    return np.minimum(lows, 0.0), np.maximum(highs, 0.0)


def _factors(past: _Past, origin: int, own_low: Array, own_high: Array, usual: Array) -> Array:
    """Return the factor of each hour ahead, from the days that have passed since the forecasts of this hour of day."""
    of_hour = np.flatnonzero((origin - past.origins) % 24 == 0)
    errors = past.errors[of_hour]
    scales, spreads = past.scales[of_hour, None], past.spreads[of_hour, None]
    lows, highs = own_low * scales - usual * spreads, own_high * scales + usual * spreads
    logarithms = np.zeros(len(_ADAPTATION_GAINS))
    for day, gain in enumerate(_ADAPTATION_GAINS):
        ahead = slice(24 * day, 24 * (day + 1))
        for error, low, high in zip(errors[:, ahead], lows[:, ahead], highs[:, ahead], strict=True):
            if np.isnan(error).any():
                continue
            factor = np.exp(logarithms[day])
            missed = float(((error < factor * low) | (error > factor * high)).mean())
            changed = logarithms[day] + gain * (missed - (1.0 - INTERVAL_RATIO))
            logarithms[day] = min(max(changed, -_MAX_LOG_FACTOR), _MAX_LOG_FACTOR)
    return np.repeat(np.exp(logarithms), 24)


assert len(_USUAL_HOURS) == len(_USUAL_MARGINS)
assert _USUAL_HOURS[-1] == NUM_TARGET_HOURS == 24 * len(_ADAPTATION_GAINS)
