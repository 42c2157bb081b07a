"""Live skill of this host's forecasts: each forecast is kept until its day has passed, then compared with the values.

Only forecasts issued at that time are compared; the naive forecasts use the data that was known then.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, ForecastSkill, HourlySeries

HOURS = 24
KEPT_ORIGINS = 28 * 24
LEAST_ORIGINS = 24
"""Minimum number of compared forecasts for a skill to be reported."""
_WEEK_HOURS = 168
_NUM_ERRORS = 3
"""Number of errors per forecast: at 1 h, at 6 h, and the mean over 24 h."""

_Errors = tuple[float, float, float]


@dataclass(slots=True)
class LiveSkill:
    """Forecasts waiting for measured values, and the errors of the forecasts compared already."""

    _waiting: dict[datetime, tuple[float, ...]] = field(default_factory=dict)
    _compared_errors: deque[tuple[_Errors, tuple[_Errors, ...]]] = field(
        default_factory=lambda: deque(maxlen=KEPT_ORIGINS)
    )

    def add(self, forecast: CarbonForecast) -> None:
        """Add a forecast of at least one day; only the first one of an hour is kept."""
        values = tuple(hour.carbon_intensity_g_per_kwh for hour in forecast.hours[:HOURS])
        is_whole = len(values) == HOURS and all(
            hour.target_at == forecast.issued_at + k * HOUR for k, hour in enumerate(forecast.hours[:HOURS])
        )
        if is_whole:
            self._waiting.setdefault(forecast.issued_at, values)

    def update(self, history: HourlySeries) -> None:
        """Compare the forecasts whose day is known; drop forecasts that still cannot be compared a week later."""
        for issued_at in sorted(self._waiting):
            if issued_at + HOURS * HOUR > history.end_at:
                break
            compared = _compared(self._waiting[issued_at], issued_at, history)
            if compared is not None:
                self._compared_errors.append(compared)
            if compared is not None or issued_at < history.end_at - timedelta(days=7):
                del self._waiting[issued_at]

    def skill(self) -> ForecastSkill | None:
        """Return the skill over the last 28 days; None with too few forecasts."""
        if len(self._compared_errors) < LEAST_ORIGINS:
            return None
        ours = [sum(errors[k] for errors, _ in self._compared_errors) for k in range(_NUM_ERRORS)]
        num_naive = len(self._compared_errors[0][1])
        best = [
            min(sum(naive[n][k] for _, naive in self._compared_errors) for n in range(num_naive))
            for k in range(_NUM_ERRORS)
        ]
        ratios = [1.0 - a / b if b > 0 else 0.0 for a, b in zip(ours, best, strict=True)]
        return ForecastSkill(ratios[0], ratios[1], ratios[2], num_origins=len(self._compared_errors))


def _compared(
    values: Sequence[float], issued_at: datetime, history: HourlySeries
) -> tuple[_Errors, tuple[_Errors, ...]] | None:
    first = history.index_of(issued_at)
    if first < _WEEK_HOURS:
        return None
    seen = history.values[first - _WEEK_HOURS : first + HOURS]
    if not all(map(math.isfinite, seen)):
        return None
    week, truth = seen[:_WEEK_HOURS], seen[_WEEK_HOURS:]
    means = [sum(week[k::24]) / 7 for k in range(HOURS)]
    naive = ([week[-1]] * HOURS, week[-24:], week[:24], means)
    return _errors(values, truth), tuple(_errors(each, truth) for each in naive)


def _errors(values: Sequence[float], truth: Sequence[float]) -> _Errors:
    off = [abs(value - true) for value, true in zip(values, truth, strict=True)]
    return off[0], off[5], sum(off) / len(off)
