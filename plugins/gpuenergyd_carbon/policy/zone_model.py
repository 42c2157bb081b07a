"""A forecast model of one zone: a ridge regression that is updated with each new day in milliseconds.

Theory of operation. A ridge regression for all 72 target hours needs only two matrices: the sums of x x' and of x y'
over all origins. A new day is added to them, old days lose half their weight in a year, and a refit solves one linear
system. The regression minimises absolute rather than squared errors: the weight of an origin decreases with the model's
error there at the time when it is added. Penalties are relative to the size of each feature; otherwise they would
suppress the small features of a zone with little variation.
"""

import numpy as np

from gpuenergyd_carbon.policy.history import (
    DAY_HOURS,
    NUM_TARGET_HOURS,
    WEEK_HOURS,
    Array,
    FilledHistory,
    Origins,
    targets,
    weekdays,
    weeks_before,
)

HALF_LIFE_HOURS = 365 * DAY_HOURS
SEASON_HOURS = 400 * DAY_HOURS
"""Length of history from which the season is a feature; with less, it would act as a trend."""
_YEAR_HOURS = 365.2425 * DAY_HOURS
_ERROR_FLOOR_RATIO = 0.3
_CHUNK_HOURS = 2048


class ZoneModel:
    """A ridge regression on one zone's history; each update needs a longer history with the same beginning."""

    def __init__(self, *, with_season: bool) -> None:
        self._with_season = with_season
        self._next_origin = WEEK_HOURS
        self._gram, self._cross = np.zeros(()), np.zeros(())
        self._coefficients: Array | None = None
        self._mean_error = 0.0

    def update(self, history: FilledHistory, end: int) -> None:
        """Add every new origin whose targets are all before `end`."""
        for begin in range(self._next_origin, end - NUM_TARGET_HOURS + 1, _CHUNK_HOURS):
            origins = np.arange(begin, min(begin + _CHUNK_HOURS, end - NUM_TARGET_HOURS + 1))
            features, level = zone_features(history, origins, with_season=self._with_season)
            truth = targets(history.values, origins) / level
            weights = 0.5 ** ((origins[-1] - origins) / HALF_LIFE_HOURS)
            if self._coefficients is not None:
                errors = np.abs(truth - features @ self._coefficients)[:, :DAY_HOURS].mean(axis=1)
                self._mean_error = self._mean_error or max(float(errors.mean()), 1e-12)
                weights /= errors / self._mean_error + _ERROR_FLOOR_RATIO
            root = np.sqrt(weights)[:, None]
            weighted, fade = features * root, 0.5 ** (len(origins) / HALF_LIFE_HOURS)
            self._gram = fade * self._gram + weighted.T @ weighted  # the product with itself costs half
            self._cross = fade * self._cross + weighted.T @ (truth * root)
            self._next_origin = int(origins[-1]) + 1
            # The penalty of each coefficient equals one row of its feature's mean square, except for the constant.
            penalties = np.diag(self._gram) / self._gram[0, 0] + 1e-9
            penalties[0] = 0.0
            self._coefficients = np.asarray(np.linalg.solve(self._gram + np.diag(penalties), self._cross), float)

    def predict(self, history: FilledHistory, origins: Origins) -> Array:
        """Return 72 hours for each origin, in the unit of the history; at least one origin must have been added."""
        assert self._coefficients is not None
        features, level = zone_features(history, origins, with_season=self._with_season)
        result: Array = (features @ self._coefficients) * level
        return result


def zone_features(history: FilledHistory, origins: Origins, *, with_season: bool) -> tuple[Array, Array]:
    """Return the features of one zone's model, first column constant, and the level that normalises its targets.

    The last day and the calendar are multiplied by harmonics of the hour of day, so that coefficients can differ
    between 6 am and 6 pm; with a long history, the last hours and the mean day also by the season. Origins are >= 168.
    """
    week = weeks_before(history.values, origins)[:, ::-1]
    level = np.maximum(week.mean(axis=1, keepdims=True), 1e-9)
    week = week / level - 1.0
    month = history.values[np.maximum(origins[:, None] + np.arange(-4 * WEEK_HOURS, 0), 0)]
    hours = history.hours_at(origins)
    by_hour, by_season = _harmonics(hours / DAY_HOURS, 3), _harmonics(hours / _YEAR_HOURS, 2)
    calendar = np.concatenate([weekdays(hours)[:, 1:], by_season], axis=1) if with_season else weekdays(hours)[:, 1:]
    crossed = [block * column[:, None] for column in by_hour.T for block in (week[:, :DAY_HOURS], calendar)]
    if with_season:
        mean_day = week.reshape(len(origins), -1, DAY_HOURS).mean(axis=1)
        blocks = (week[:, : DAY_HOURS // 2], mean_day)
        crossed += [block * column[:, None] for column in _harmonics(hours / _YEAR_HOURS, 1).T for block in blocks]
    level_of_month = month.mean(axis=1, keepdims=True) / level - 1.0
    return np.concatenate([np.ones_like(level), by_hour, calendar, week, level_of_month, *crossed], axis=1), level


def _harmonics(turns: Array, num_orders: int) -> Array:
    angles = 2.0 * np.pi * turns[:, None] * np.arange(1, num_orders + 1)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
