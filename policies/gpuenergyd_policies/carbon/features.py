"""Features of intensity histories, as known when a forecast is issued.

Origins are positions in the history: at origin o the newest known value is o - 1, and column 0 of a target is hour o.
`shape_features` contain neither time of day nor season nor level, only the shape of the last week, so that a model
trained on some zones applies to others; `zone_features` contain the calendar and are for models of one zone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries

Array = NDArray[np.float64]
Origins = NDArray[np.int64]

WEEK_HOURS = 168
NUM_TARGET_HOURS = 72
_DAYS_PER_YEAR = 365.2425


@dataclass(frozen=True, slots=True)
class FilledHistory:
    """A history without gaps; `is_filled` marks the hours whose value was unknown."""

    first_hour_at: datetime
    values: Array
    is_filled: NDArray[np.bool_]


def filled_history(series: HourlySeries) -> FilledHistory | None:
    """Return a history whose gaps hold the value of the day before, else the last one; None without values.

    It begins with the first known value and ends with the series, whose last hours may be unknown.
    """
    values = np.array(series.values, dtype=float)
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return None
    values = values[known[0] :]
    is_filled = ~np.isfinite(values)
    for k in np.flatnonzero(is_filled):
        values[k] = values[k - 24] if k >= 24 else values[k - 1]
    return FilledHistory(series.first_hour_at + int(known[0]) * HOUR, values, is_filled)


def targets(values: Array, origins: Origins, num_hours: int = NUM_TARGET_HOURS) -> Array:
    """Return the true values after each origin, one row per origin."""
    truth: Array = values[origins[:, None] + np.arange(num_hours)]
    return truth


def same_hour_means(values: Array, origins: Origins, num_hours: int = NUM_TARGET_HOURS) -> Array:
    """Return the mean of each target's hour of day over the 7 days before each origin; origins are >= 168."""
    week = values[origins[:, None] + np.arange(-WEEK_HOURS, 0)].reshape(len(origins), 7, 24).mean(axis=1)
    return np.tile(week, (1, -(-num_hours // 24)))[:, :num_hours]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The last week before each origin, normalised by level and spread."""

    features: Array
    naive: Array
    """The normalised 7-day mean of the same hour, which models correct."""
    level: Array
    spread: Array

    def to_intensity(self, predicted: Array) -> Array:
        """Return normalised predictions in the unit of the history."""
        return predicted * self.spread[:, None] + self.level[:, None]


def shape_features(history: FilledHistory, origins: Origins) -> Shapes:
    """Return the features of models for all zones; origins are >= 168."""
    week = history.values[origins[:, None] + np.arange(-WEEK_HOURS, 0)]
    level = week.mean(axis=1)
    spread = week.std(axis=1) + 1e-3 * level + 1e-9
    week = (week - level[:, None]) / spread[:, None]
    days = week.reshape(len(origins), 7, 24)
    variation = spread / np.maximum(level, 1e-9)
    by_day = days.mean(axis=1)
    features = np.concatenate(
        [
            week[:, -48:],
            week[:, 24:120].reshape(len(origins), 32, 3).mean(axis=2),
            week[:, :24],
            by_day,
            days.std(axis=1),
            np.log(np.maximum(variation, 1e-6))[:, None],
            np.minimum(variation, 1.5)[:, None],
            np.eye(7)[_weekdays(history, origins)],
        ],
        axis=1,
    )
    return Shapes(np.clip(features, -8.0, 8.0), np.tile(by_day, (1, 3)), level, spread)


def crossed_shape_features(features: Array) -> Array:
    """Return shape features with products by which a linear model can distinguish times of day.

    The time of day is the phase of the first two harmonics of the mean day, relative to the origin.
    """
    last, by_day, weekday = features[:, :48], features[:, 104:128], features[:, -7:]
    angle = 2j * np.pi * np.arange(24) / 24
    first = by_day @ np.exp(-angle) / 12
    second = by_day @ np.exp(-2 * angle) / 12
    phase = np.stack([first.real, first.imag, second.real, second.imag], axis=1)
    phase /= np.sqrt(1.0 + np.abs(first) ** 2)[:, None]
    variation = np.clip(features[:, -9:-8] + 1.0, -3.0, 2.0)
    crossed = [last[:, 24:] * phase[:, j : j + 1] for j in range(4)]
    one = np.ones((len(features), 1))
    return np.concatenate(
        [one, features, phase, *crossed, last[:, 36:] * variation, by_day * variation, weekday * variation], axis=1
    )


def zone_features(history: FilledHistory, origins: Origins, *, with_season: bool) -> tuple[Array, Array]:
    """Return the features of a model for one zone, first column constant, and the level that normalises its targets.

    The last day's values are multiplied by harmonics of the hour of day, so that coefficients can differ between 6 am
    and 6 pm; with a year or more of history also by harmonics of the season. Origins are >= 168.
    """
    num = len(origins)
    values = history.values
    week = values[origins[:, None] + np.arange(-WEEK_HOURS, 0)]
    level = np.maximum(week.mean(axis=1), 1e-9)
    day = week.reshape(num, 7, 24).mean(axis=1) / level[:, None] - 1.0
    week = week[:, ::-1] / level[:, None] - 1.0
    sums = np.concatenate([[0.0], np.cumsum(values)])
    month = np.minimum(origins, 4 * WEEK_HOURS)
    fortnight = np.maximum(origins[:, None] + np.arange(-2 * WEEK_HOURS, 24 - 2 * WEEK_HOURS), 0)
    far = [
        ((sums[origins] - sums[origins - month]) / month / level)[:, None] - 1.0,
        values[fortnight] / level[:, None] - 1.0,
    ]
    recent, older = week[:, :48], week[:, 48:].reshape(num, 40, 3).mean(axis=2)
    hour = (history.first_hour_at.hour + origins) % 24
    calendar = [np.eye(7)[_weekdays(history, origins)][:, 1:]]
    season = _harmonics(_year_share(history, origins), (1, 2))
    if with_season:
        calendar.append(season)
    daily = np.concatenate(calendar, axis=1)
    by_hour = _harmonics(hour / 24.0, (1, 2, 3))
    columns = [np.ones((num, 1)), _harmonics(hour / 24.0, (1, 2, 3, 4, 5)), daily, recent, older, *far]
    for j in range(by_hour.shape[1]):
        columns += [recent[:, :24] * by_hour[:, j : j + 1], daily * by_hour[:, j : j + 1]]
    if with_season:
        year = _harmonics(_year_share(history, origins), (1,))
        columns += [block * year[:, j : j + 1] for block in (recent[:, :12], day) for j in range(2)]
    return np.concatenate(columns, axis=1), level


def _harmonics(turns: Array, orders: Sequence[int]) -> Array:
    angles = 2.0 * np.pi * np.asarray(turns)[:, None] * np.array(orders)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def _weekdays(history: FilledHistory, origins: Origins) -> Origins:
    first = history.first_hour_at
    return ((origins + first.hour) // 24 + first.weekday()) % 7


def _year_share(history: FilledHistory, origins: Origins) -> Array:
    first = history.first_hour_at
    begin = first.timetuple().tm_yday - 1 + first.hour / 24.0
    share: Array = ((begin + origins / 24.0) / _DAYS_PER_YEAR) % 1.0
    return share
