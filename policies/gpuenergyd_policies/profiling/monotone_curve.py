"""Monotone cubic interpolation through few points: PCHIP with the slopes of Fritsch and Butland (1984).

The curve is that of scipy's `PchipInterpolator`. A fit evaluates hundreds of curves with half a dozen points each, and
scipy takes a millisecond to make one, these functions a few hundredths of that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MonotoneCurve:
    """A curve through points, with its slope at each; it is evaluated between the first and the last point only."""

    x: FloatArray
    y: FloatArray
    slopes: FloatArray

    @classmethod
    def through(cls, x: Sequence[float], y: Sequence[float]) -> "MonotoneCurve":
        """Return the curve through at least two points, with ascending `x`."""
        return cls(*(np.asarray(own, dtype=np.float64) for own in (x, y, _slopes(list(x), list(y)))))

    def at(self, x: FloatArray) -> FloatArray:
        """Return the values at arguments from the first to the last point."""
        left = np.clip(np.searchsorted(self.x, x, side="right") - 1, 0, len(self.x) - 2)
        width = self.x[left + 1] - self.x[left]
        share = (x - self.x[left]) / width
        rest = 1.0 - share
        low, high = self.y[left], self.y[left + 1]
        bent = (self.slopes[left] * width * rest - self.slopes[left + 1] * width * share) * share * rest
        smooth = share * share * (3.0 - 2.0 * share)
        return np.asarray(low + (high - low) * smooth + bent, dtype=np.float64)


def _slopes(x: list[float], y: list[float]) -> list[float]:
    """Return the slope at each point, such that the curve rises and falls only where the points do."""
    widths = [right - left for left, right in pairwise(x)]
    secants = [(high - low) / width for (low, high), width in zip(pairwise(y), widths, strict=True)]
    if len(secants) == 1:
        return [secants[0], secants[0]]
    inner = [_inner_slope(*own) for own in zip(widths[:-1], widths[1:], secants[:-1], secants[1:], strict=True)]
    return [
        _end_slope(widths[0], widths[1], secants[0], secants[1]),
        *inner,
        _end_slope(widths[-1], widths[-2], secants[-1], secants[-2]),
    ]


def _inner_slope(left_width: float, right_width: float, left: float, right: float) -> float:
    """Return the weighted harmonic mean of the secants on both sides; 0 at an extremum."""
    if left * right <= 0.0:
        return 0.0
    left_weight, right_weight = 2 * right_width + left_width, right_width + 2 * left_width
    return (left_weight + right_weight) / (left_weight / left + right_weight / right)


def _end_slope(width: float, next_width: float, secant: float, next_secant: float) -> float:
    """Return the slope of a parabola through three points, limited so that the curve stays monotone."""
    slope = ((2 * width + next_width) * secant - width * next_secant) / (width + next_width)
    if slope * secant <= 0.0:
        return 0.0
    if secant * next_secant <= 0.0 and abs(slope) > 3 * abs(secant):
        return 3 * secant
    return slope if math.isfinite(slope) else 0.0
