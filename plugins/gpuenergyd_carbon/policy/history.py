"""Hourly carbon intensities with filled gaps, and features of the hours before a forecast.

Origins are indices into the history: at origin o the newest known value is o - 1, and column 0 of a target is hour o.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries

Array = NDArray[np.float64]
Origins = NDArray[np.int64]

DAY_HOURS = 24
WEEK_DAYS = 7
WEEK_HOURS = WEEK_DAYS * DAY_HOURS
NUM_TARGET_HOURS = 3 * DAY_HOURS
_A_MONDAY_AT = datetime(2024, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class FilledHistory:
    """A history without gaps."""

    first_hour_at: datetime
    values: Array

    def part(self, begin: int, end: int) -> "FilledHistory":
        """Return the hours from `begin` until before `end`."""
        return FilledHistory(self.first_hour_at + begin * HOUR, self.values[begin:end])

    def hours_at(self, origins: Origins) -> Origins:
        """Return the hour of each origin, counted in UTC from midnight of a Monday."""
        hours: Origins = (self.first_hour_at - _A_MONDAY_AT) // HOUR + origins
        return hours


def filled_history(series: HourlySeries) -> FilledHistory | None:
    """Return a history whose gaps hold the value of the day before, otherwise the last one; None without values.

    It begins with the first known value and ends with the series, whose last hours may be unknown.
    """
    values = np.array(series.values, dtype=float)
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return None
    values = values[known[0] :]
    for k in np.flatnonzero(~np.isfinite(values)):
        values[k] = values[k - DAY_HOURS] if k >= DAY_HOURS else values[k - 1]
    return FilledHistory(series.first_hour_at + int(known[0]) * HOUR, values)


def targets(values: Array, origins: Origins, num_hours: int = NUM_TARGET_HOURS) -> Array:
    """Return the true values after each origin, one row per origin."""
    truth: Array = values[origins[:, None] + np.arange(num_hours)]
    return truth


def weekdays(hours: Origins) -> Array:
    """Return one column per day of the week, from hours since a Monday."""
    return np.eye(WEEK_DAYS)[hours // DAY_HOURS % WEEK_DAYS]


def weeks_before(values: Array, origins: Origins) -> Array:
    """Return the 168 values before each origin, oldest first; origins are >= 168."""
    weeks: Array = values[origins[:, None] + np.arange(-WEEK_HOURS, 0)]
    return weeks


def same_hour_means(values: Array, origins: Origins, num_hours: int = NUM_TARGET_HOURS) -> Array:
    """Return the mean of each target's hour of day over the 7 days before each origin; origins are >= 168."""
    days = weeks_before(values, origins).reshape(len(origins), WEEK_DAYS, DAY_HOURS).mean(axis=1)
    return np.tile(days, (1, -(-num_hours // DAY_HOURS)))[:, :num_hours]
