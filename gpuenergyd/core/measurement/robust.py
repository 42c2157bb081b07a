"""Robust spread of measurements: one disturbed value does not widen it."""

from collections.abc import Iterable
from statistics import median

_NORMAL_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def robust_sigma(distances: Iterable[float]) -> float:
    """Return the standard deviation of normally distributed values from their absolute distances to the median."""
    return _NORMAL_PER_MAD * median(distances)
