"""The 95 % interval of a forecast, from the errors of earlier forecasts, adapted to their recent coverage.

Theory of operation. Large errors follow large errors, so the *scale* of an interval is the recent mean absolute error.
Its *margins* are the 95 % quantiles, for each hour ahead, of three months of errors in units of the scale at their
time; a quantile in the tail needs that many independent days. Its *factor* follows coverage, by day ahead: after a day
with more than 5 % of its hours outside, the next interval is wider, after a day with fewer it is narrower. This is the
proportional part of conformal PID control (Angelopoulos, Candes and Tibshirani 2023) on the logarithm of the width.
Like adaptive conformal inference (Gibbs and Candes 2021) it keeps coverage near its target for any errors.

The factor is not stored: it is computed from the recorded forecasts of the same hour of day, oldest first, each as soon
as all hours of its day ahead have passed. A restart therefore changes nothing. Until enough errors are known, usual
margins of other zones are used, with the weight of one week of errors.
"""

import numpy as np

from gpuenergyd_carbon.policy.history import DAY_HOURS, NUM_TARGET_HOURS, WEEK_HOURS, Array, Origins, weeks_before

INTERVAL_RATIO = 0.95
LEAST_ORIGINS = NUM_TARGET_HOURS
"""Minimum number of forecasts whose first day has passed, before their errors are used."""
_ERROR_HALF_LIFE_HOURS = 10 * DAY_HOURS
_ADAPTATION_GAIN = 0.7
"""Change of the factor's logarithm per share of hours outside the interval."""


def prediction_interval(
    values: Array, origin: int, predicted: Array, *, recorded_origins: Origins, recorded: Array, usual_margins: Array
) -> tuple[Array, Array]:
    """Return the lower and upper bound of each forecast hour, in the unit of the values.

    Args:
        values: the history, hour by hour.
        origin: the hour in which the forecast is issued; no later value is used.
        predicted: the forecast of the next hours.
        recorded_origins: hours in which earlier forecasts were issued, in order, each at least a week into the history.
        recorded: those forecasts, one row of 72 hours each, made without knowledge of these hours.
        usual_margins: margins of other zones for each of 72 hours, in standard deviations of the week before.
    """
    is_due = recorded_origins <= origin - DAY_HOURS
    origins = recorded_origins[is_due]
    if len(origins) < LEAST_ORIGINS:
        spread = float(values[max(0, origin - WEEK_HOURS) : origin].std()) if origin else 0.0
        width = usual_margins * spread
    else:
        hours = origins[:, None] + np.arange(NUM_TARGET_HOURS)
        errors = np.abs(values[np.minimum(hours, origin - 1)] - recorded[is_due])
        errors[hours >= origin] = np.nan
        issued = np.append(origins, origin)
        scales = _scales(errors, origins, issued)[:, None]
        spreads = weeks_before(values, issued).std(axis=1, keepdims=True)
        # A time without errors gives no information about the relative size of an error.
        own = np.nanquantile(errors / np.where(scales > 0, scales, np.inf)[:-1], INTERVAL_RATIO, axis=0)
        own_weight = len(origins) / (len(origins) + WEEK_HOURS)
        widths = own_weight * own * scales + (1.0 - own_weight) * usual_margins * spreads
        is_same_hour = (origin - origins) % DAY_HOURS == 0
        width = widths[-1] * _factors(errors[is_same_hour], widths[:-1][is_same_hour])
    width = width[: len(predicted)]
    return np.maximum(predicted - width, 0.0), predicted + width


def _scales(errors: Array, origins: Origins, issued: Origins) -> Array:
    """Return the mean absolute error of the first day ahead, as known when each forecast was issued."""
    weights = 0.5 ** ((origins[-1] - origins) / _ERROR_HALF_LIFE_HOURS)
    means = np.cumsum(weights * errors[:, :DAY_HOURS].mean(axis=1)) / np.cumsum(weights)
    newest_known = np.searchsorted(origins, issued - DAY_HOURS, side="right") - 1
    scales: Array = means[np.maximum(newest_known, 0)]
    return scales


def _factors(errors: Array, widths: Array) -> Array:
    """Return the factor of each hour ahead, from the errors of one forecast per day; NaN means a future hour."""
    logarithms = np.zeros(NUM_TARGET_HOURS // DAY_HOURS)
    for error, width in zip(errors.reshape(-1, 3, DAY_HOURS), widths.reshape(-1, 3, DAY_HOURS), strict=True):
        missed = (error > np.exp(logarithms)[:, None] * width).mean(axis=1)
        has_passed = np.isfinite(error).all(axis=1)
        logarithms += np.where(has_passed, _ADAPTATION_GAIN * (missed - (1.0 - INTERVAL_RATIO)), 0.0)
    return np.repeat(np.exp(logarithms), DAY_HOURS)
