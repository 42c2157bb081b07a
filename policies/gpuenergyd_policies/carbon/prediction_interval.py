"""The 95 % interval of a forecast, from the errors of the forecasts before it.

Theory of operation. Errors grow and shrink with the variation of the grid: in units of the standard deviation of the
last week they are much the same from week to week, and at the beginning from zone to zone. An interval is the quantiles
of such relative errors over three months, hour by hour ahead, times the present week's standard deviation. Three months
hold about ninety independent days, and a quantile of 2.5 % needs them: with four weeks, intervals are too narrow. Until
they are known, usual quantiles of other zones stand in for them, with the weight of a week of own errors.
"""

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
    num_hours = len(predicted)
    spread = float(values[max(0, origin - WEEK_HOURS) : origin].std()) if origin else 0.0
    margins = np.interp(np.arange(1, num_hours + 1), _USUAL_HOURS, _USUAL_MARGINS)
    low, high = -margins, margins
    is_due = recorded_origins <= origin - 24
    if int(is_due.sum()) >= LEAST_ORIGINS:
        origins = recorded_origins[is_due]
        own_low, own_high = _own_quantiles(values, origin, origins, recorded[is_due, :num_hours])
        num_days = len(origins) / 24.0
        own_weight = num_days / (num_days + _USUAL_WEIGHT_DAYS)
        low = own_weight * _WIDENING_RATIO * own_low + (1.0 - own_weight) * low
        high = own_weight * _WIDENING_RATIO * own_high + (1.0 - own_weight) * high
    return np.maximum(predicted + low * spread, 0.0), predicted + high * spread


def _own_quantiles(values: Array, origin: int, origins: Origins, recorded: Array) -> tuple[Array, Array]:
    """Return the quantiles of the relative errors of recorded forecasts by hour ahead: at most 0, at least 0."""
    weeks = np.lib.stride_tricks.sliding_window_view(values[:origin], WEEK_HOURS)
    spreads = weeks[origins - WEEK_HOURS].std(axis=1)
    hours = origins[:, None] + np.arange(recorded.shape[1])
    errors = values[np.minimum(hours, origin - 1)] - recorded
    # A week without variation says nothing of the relative size of an error.
    errors /= np.where(spreads > 0, spreads, np.inf)[:, None]
    lows, highs = np.empty(recorded.shape[1]), np.empty(recorded.shape[1])
    for k in range(recorded.shape[1]):
        lows[k], highs[k] = np.quantile(errors[hours[:, k] < origin, k], _TAIL_RATIOS)
    return np.minimum(lows, 0.0), np.maximum(highs, 0.0)


assert len(_USUAL_HOURS) == len(_USUAL_MARGINS)
assert _USUAL_HOURS[-1] == NUM_TARGET_HOURS
