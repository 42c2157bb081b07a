"""How good the forecasts of this very host have been: each is kept until its day has come, then compared.

Nothing is forecast anew with hindsight: what counts is what was said at the time, against what anyone could have said
then without a model.
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
"""Fewer forecasts that came due say nothing."""
_WEEK_HOURS = 168
_FIGURES = 3
"""Errors at 1 h, at 6 h, and the mean over 24 h."""

_Errors = tuple[float, float, float]


@dataclass(slots=True)
class LiveSkill:
    """Forecasts that wait for their truth, and the errors of those that have met it."""

    _waiting: dict[datetime, tuple[float, ...]] = field(default_factory=dict)
    _met: deque[tuple[_Errors, tuple[_Errors, ...]]] = field(default_factory=lambda: deque(maxlen=KEPT_ORIGINS))

    def issued(self, forecast: CarbonForecast) -> None:
        """Keep a forecast of at least a day; the first of its hour counts."""
        values = tuple(hour.carbon_intensity_g_per_kwh for hour in forecast.hours[:HOURS])
        is_whole = len(values) == HOURS and all(
            hour.target_at == forecast.issued_at + k * HOUR for k, hour in enumerate(forecast.hours[:HOURS])
        )
        if is_whole:
            self._waiting.setdefault(forecast.issued_at, values)

    def update(self, history: HourlySeries) -> None:
        """Compare what has come due; hours that never became known are given up a week later."""
        for issued_at in sorted(self._waiting):
            if issued_at + HOURS * HOUR > history.end_at:
                break
            compared = _compared(self._waiting[issued_at], issued_at, history)
            if compared is not None:
                self._met.append(compared)
            if compared is not None or issued_at < history.end_at - timedelta(days=7):
                del self._waiting[issued_at]

    def skill(self) -> ForecastSkill | None:
        """Return the skill over the last 28 days; None while there is too little to judge."""
        if len(self._met) < LEAST_ORIGINS:
            return None
        ours = [sum(errors[k] for errors, _ in self._met) for k in range(_FIGURES)]
        num_naive = len(self._met[0][1])
        best = [min(sum(naive[n][k] for _, naive in self._met) for n in range(num_naive)) for k in range(_FIGURES)]
        ratios = [1.0 - a / b if b > 0 else 0.0 for a, b in zip(ours, best, strict=True)]
        return ForecastSkill(ratios[0], ratios[1], ratios[2], num_origins=len(self._met))


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
