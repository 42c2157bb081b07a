"""Recent dynamics of a zone: an autoregression fitted to the last 168 hours, separately for each origin.

Theory of operation. Grids differ in the persistence of changes: where wind dominates, the trend of the last hours
predicts the next one well, elsewhere hardly. A model pooled over zones cannot represent that, but one week of data can:
least squares on the last hours and the same hours of the day before gives six coefficients, shrunk towards "the present
value plus half of yesterday's change". The sums of products are sliding sums over the history, so an origin costs one
solve of six equations.
"""

import numpy as np

from gpuenergyd_policies.carbon.features import WEEK_HOURS, Array, Origins, Shapes

NUM_DYNAMICS_HOURS = 24
_LAGS = (1, 2, 3, 24, 25, 26)
_START = np.array([1.0, 0.0, 0.0, 0.5, -0.5, 0.0])
_PENALTY_ROWS = 0.05
"""Weight of the shrinkage, in rows of data."""
_LARGEST_DEVIATIONS = 4.0
_CROSSED_HOURS = 6
_CROSSED_LAGS = (1, 24)


def dynamics_features(values: Array, origins: Origins, shapes: Shapes) -> Array:
    """Return the autoregression's 24 hours in units of `shapes`, and products of the first with its coefficients."""
    forecast, coefficients = dynamics_forecasts(values, origins)
    change = np.clip((forecast - shapes.level[:, None]) / shapes.spread[:, None] - shapes.naive[:, :24], -8.0, 8.0)
    coefficients = np.clip(coefficients, -2.0, 2.0)
    crossed = [
        change[:, :_CROSSED_HOURS] * coefficients[:, j : j + 1] for j in (_LAGS.index(lag) for lag in _CROSSED_LAGS)
    ]
    return np.concatenate([change, *crossed], axis=1)


def dynamics_forecasts(values: Array, origins: Origins) -> tuple[Array, Array]:
    """Return forecasts of 24 hours for each origin, in the unit of `values`, and coefficients; origins are >= 168."""
    if not len(origins):
        return np.zeros((0, NUM_DYNAMICS_HOURS)), np.zeros((0, len(_LAGS)))
    first = int(origins.min()) - WEEK_HOURS
    known = values[first : int(origins.max())]
    mean = float(known.mean())
    known, ends = known - mean, origins - first
    level = known[ends[:, None] + np.arange(-WEEK_HOURS, 0)].mean(axis=1)
    products = _products(known, ends, level)
    gram, cross = products[:, :-1, :-1], products[:, :-1, -1]
    size = gram[:, 0, 0] / (WEEK_HOURS - _LAGS[-1])
    diagonal = np.arange(len(_LAGS))
    penalised = gram.copy()
    penalised[:, diagonal, diagonal] += _PENALTY_ROWS * size[:, None] + 1e-9
    moved = np.linalg.solve(penalised, (cross - gram @ _START)[..., None])[..., 0]
    coefficients: Array = np.asarray(_START + moved, dtype=np.float64)
    limit = _LARGEST_DEVIATIONS * np.sqrt(np.maximum(products[:, -1, -1], 0.0) / (WEEK_HOURS - _LAGS[-1]))
    hours = np.zeros((len(origins), _LAGS[-1] + NUM_DYNAMICS_HOURS))
    hours[:, : _LAGS[-1]] = known[ends[:, None] + np.arange(-_LAGS[-1], 0)] - level[:, None]
    for k in range(_LAGS[-1], hours.shape[1]):
        step = sum(coefficients[:, j] * hours[:, k - lag] for j, lag in enumerate(_LAGS))
        hours[:, k] = np.clip(step, -limit, limit)
    return hours[:, _LAGS[-1] :] + (level + mean)[:, None], coefficients


def _products(known: Array, ends: Origins, level: Array) -> Array:
    """Return the sums of products of lagged and present values over each origin's week, centred on its level."""
    longest = _LAGS[-1]
    columns = [known[longest - lag : len(known) - lag] for lag in _LAGS] + [known[longest:]]
    num_rows = WEEK_HOURS - longest
    sums = [_sliding(column, ends - longest, num_rows) for column in columns]
    result = np.empty((len(ends), len(columns), len(columns)))
    for i, first in enumerate(columns):
        for j in range(i, len(columns)):
            product = _sliding(first * columns[j], ends - longest, num_rows)
            centred = product - level * (sums[i] + sums[j]) + num_rows * level**2
            result[:, i, j] = result[:, j, i] = centred
    return result


def _sliding(column: Array, ends: Origins, num_rows: int) -> Array:
    """Return the sums of the `num_rows` entries before each end."""
    total = np.concatenate([[0.0], np.cumsum(column)])
    result: Array = total[ends] - total[ends - num_rows]
    return result
