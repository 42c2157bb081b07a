"""How sure a saving is: the interval that chance alone leaves around a ratio of two medians."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

from gpuenergyd.core.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.store.queries import IterationRow

_Z_95 = 1.96
_IQR_OF_SIGMA = 1.349
_MEDIAN_OF_MEAN_ERROR = 1.2533
"""How much wider the standard error of a median is than that of a mean, for normal noise: sqrt(pi / 2)."""
_MIN_SAMPLES = 4


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a ratio lies with about 95 % confidence, taking iterations as independent."""

    low: float
    high: float


def saving_interval(iterations: Sequence[IterationRow]) -> Interval | None:
    """Return the interval around a job's energy saving; None when too little was measured."""
    change = _change(iterations, lambda row: row.energy_j)
    return None if change is None else Interval(-change.high, -change.low)


def slowdown_interval(iterations: Sequence[IterationRow]) -> Interval | None:
    """Return the interval around a job's slowdown; None when too little was measured."""
    return _change(iterations, lambda row: row.iteration_time_s)


def _change(iterations: Sequence[IterationRow], figure: Callable[[IterationRow], float | None]) -> Interval | None:
    """Return the interval around median(tuned) / median(baseline) - 1."""
    regular = [(row, value) for row in iterations if row.is_regular and (value := figure(row)) is not None]
    before = [value for row, value in regular if row.plan_id == BASELINE_PLAN_ID]
    after = [value for row, value in regular if row.plan_purpose is PlanPurpose.TUNED]
    if min(len(before), len(after)) < _MIN_SAMPLES:
        return None
    ratio = median(after) / median(before)
    error = ratio * math.hypot(_error_ratio(before), _error_ratio(after))
    return Interval(ratio - 1.0 - _Z_95 * error, ratio - 1.0 + _Z_95 * error)


def _error_ratio(values: Sequence[float]) -> float:
    """Return the standard error of a median as a share of it, from the middle half: outliers do not widen it."""
    low, _, high = quantiles(values, n=4)
    return _MEDIAN_OF_MEAN_ERROR * (high - low) / _IQR_OF_SIGMA / math.sqrt(len(values)) / median(values)
