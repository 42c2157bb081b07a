"""Power against speed: the points of a time-energy frontier worth running or mixing, slowest first.

An iteration of time T and energy E has speed 1/T and power E/T. Alternating between two points gives the power on the
line between them, so only the lower convex hull matters. Points slower than the one of least energy never pay off.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

from gpuenergyd.errors import CarbonDataError

SpeedPoint = tuple[float, float]
"""Iterations per second, and power in W."""


def speed_points(
    points: Sequence[tuple[float, float]], host_power_w: float = 0.0, *, until_least_energy: bool = True
) -> tuple[SpeedPoint, ...]:
    """Return the convex hull of `(iteration_time_s, energy_j)` points, without duplicate and dominated ones.

    Points slower than the one of least energy (host energy included) are dropped too. With `until_least_energy` False,
    only points slower than the one of least power are dropped.

    Raises:
        CarbonDataError: no point is left, or a value is not a positive finite number.
    """
    for time_s, energy_j in points:
        if not (math.isfinite(time_s) and time_s > 0 and math.isfinite(energy_j) and energy_j > 0):
            raise CarbonDataError(f"frontier point T={time_s} s, E={energy_j} J: both must be finite and > 0")
    if not points:
        raise CarbonDataError("the frontier has no points; at least one (T in s, E in J) is required")
    if not (math.isfinite(host_power_w) and host_power_w >= 0):
        raise CarbonDataError(f"host power {host_power_w} W must be a finite number >= 0")
    candidates: list[SpeedPoint] = []
    for x, p in sorted((1.0 / time_s, energy_j / time_s + host_power_w) for time_s, energy_j in points):
        if candidates and x - candidates[-1][0] <= 1e-12 * x:  # of equal speeds the cheaper one
            candidates[-1] = (x, min(p, candidates[-1][1]))
        else:
            candidates.append((x, p))
    hull: list[SpeedPoint] = []
    for x, p in candidates:
        while len(hull) >= 2 and _is_above(hull[-2], hull[-1], (x, p)):
            hull.pop()
        hull.append((x, p))
    first = min(range(len(hull)), key=lambda k: hull[k][1] / (hull[k][0] if until_least_energy else 1.0))
    return tuple(hull[first:])


def power_at(curve: Sequence[SpeedPoint], speed_per_s: float) -> float:
    """Return the power at a speed, interpolated between two points; beyond the ends, that of the end point."""
    above = bisect_left(curve, (speed_per_s, -math.inf))
    if above == 0:
        return curve[0][1]
    if above == len(curve):
        return curve[-1][1]
    (slow, slow_w), (fast, fast_w) = curve[above - 1], curve[above]
    return slow_w + (fast_w - slow_w) * (speed_per_s - slow) / (fast - slow)


def _is_above(a: SpeedPoint, b: SpeedPoint, c: SpeedPoint) -> bool:
    """Return whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
