"""Robust centre and spread of measurements, which a single outlier does not change."""

from collections.abc import Iterable
from statistics import median

NORMAL_PER_MAD = 1.4826
"""Ratio of standard deviation to median absolute deviation, for a normal distribution."""
MEDIAN_PER_MEAN_ERROR = 1.2533
"""Ratio of the standard errors of median and mean, for a normal distribution."""


def robust_sigma(distances: Iterable[float]) -> float:
    """Return the standard deviation of normally distributed values from their absolute distances to the median."""
    return NORMAL_PER_MAD * median(distances)


def weighted_median(values: Iterable[tuple[float, int]]) -> float | None:
    """Return the median of (value, weight) pairs, the mean of the two middle values if tied; None without any."""
    ordered = sorted((value, weight) for value, weight in values if weight > 0)
    total = sum(weight for _, weight in ordered)
    if not total:
        return None
    passed = 0
    for k, (value, weight) in enumerate(ordered):
        passed += weight
        if 2 * passed > total:
            return value
        if 2 * passed == total:
            return (value + ordered[k + 1][0]) / 2
    raise AssertionError
