"""Optimal use of a slowdown budget: exact plans over hours, and a controller that cannot exceed the budget.

Theory of operation. With speed x = 1/T and power P(x) = E(1/x)/T + host power, N iterations in slots of length D_t
with intensities c_t cost

    minimise  sum c_t P(x_t) D_t   subject to  sum x_t D_t = N,   x_slow <= x_t <= x_fast.

P is piecewise linear and convex on the lower hull of the measured points, so this is a continuous knapsack problem:
start all slots at x_slow, sort the pieces (slot, hull segment) by c_t times slope, and add them until the work is done.
Convexity keeps the segments of one slot in order. One piece is used partially; its slot alternates between two adjacent
points. No solver is needed and the optimum is exact.

The controller replans in every slot with the newest forecast. It then raises the speed if necessary, so that full speed
afterwards can finish the remaining work. By induction the deadline is met for any forecast.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.carbon.speed_curve import speed_points

Array = NDArray[np.float64]

SLOT_S = 3600.0
MAX_SIGNAL = 1e6
"""Largest plausible intensity or price; larger values are errors of the source."""


@dataclass(frozen=True, slots=True)
class SpeedHull:
    """Lower convex hull of power over speed, slowest first: all optimal operating points and mixtures."""

    speeds_per_s: Array
    powers_w: Array

    @property
    def slopes_j(self) -> Array:
        """Energy of one more iteration in each segment; it increases from segment to segment."""
        slopes: Array = np.diff(self.powers_w) / np.diff(self.speeds_per_s)
        return slopes

    @property
    def full_speed_per_s(self) -> float:
        """Iterations per second at the fastest point."""
        return float(self.speeds_per_s[-1])

    def power_w(self, speed_per_s: Array | float) -> Array:
        """Return the power at a speed, mixing the two points around it."""
        return np.asarray(np.interp(speed_per_s, self.speeds_per_s, self.powers_w))

    def limited_to(self, full_speed_per_s: float) -> "SpeedHull":
        """Return the hull of a job whose speed is limited by a straggler or a power cap."""
        limit = float(np.clip(full_speed_per_s, self.speeds_per_s[0], self.speeds_per_s[-1]))
        kept = self.speeds_per_s < limit
        return SpeedHull(
            np.append(self.speeds_per_s[kept], limit), np.append(self.powers_w[kept], float(self.power_w(limit)))
        )

    def mix(self, speed_per_s: float) -> tuple[tuple[float, float], ...]:
        """Return the iteration times that average to a speed, with their shares of the slot's time, fastest first."""
        times_s = 1.0 / self.speeds_per_s
        position = float(np.interp(speed_per_s, self.speeds_per_s, np.arange(len(times_s))))
        nearest = round(position)
        if abs(position - nearest) < 1e-9:
            return ((float(times_s[nearest]), 1.0),)
        slower, share = int(position), position % 1.0
        return ((float(times_s[slower + 1]), share), (float(times_s[slower]), 1.0 - share))


def speed_hull(points: Sequence[tuple[float, float]], host_power_w: float = 0.0) -> SpeedHull:
    """Return the hull of `(iteration_time_s, energy_j)` points, without duplicate and dominated points.

    Points slower than the one of least energy (host energy included) are dominated too.

    Raises:
        CarbonDataError: no point is left, or a value is not a positive finite number.
    """
    curve = speed_points(points, host_power_w)
    return SpeedHull(np.array([x for x, _ in curve]), np.array([p for _, p in curve]))


def plan_slots(hull: SpeedHull, intensities: Array, slot_lengths_s: Array, num_iterations: float) -> Array:
    """Return the speeds of least cost that finish the work in these slots.

    All slots run at full speed if even that is too slow for the work, and at the slowest point if that is fast enough.
    Negative intensities are treated as zero.
    """
    slowest = float(hull.speeds_per_s[0])
    speeds = np.full(len(intensities), slowest)
    need = num_iterations - slowest * float(slot_lengths_s.sum())
    widths = np.diff(hull.speeds_per_s)
    if need <= 0 or not len(widths):
        return speeds
    costs = (np.maximum(intensities, 0.0)[:, None] * hull.slopes_j).ravel()
    capacities = (slot_lengths_s[:, None] * widths).ravel()
    order = np.argsort(costs, kind="stable")
    filled = np.cumsum(capacities[order])
    last = int(np.searchsorted(filled, need))
    if last >= len(order):
        return np.full(len(intensities), hull.full_speed_per_s)
    taken = np.zeros(len(order))
    taken[order[:last]] = 1.0
    taken[order[last]] = 1.0 - (filled[last] - need) / capacities[order[last]]
    speeds += (taken.reshape(len(intensities), -1) * widths).sum(axis=1)
    return speeds


def repaired(forecast: Array, fallback: Array) -> Array:
    """Return the forecast, with missing or implausible values replaced by those of the fallback."""
    result = fallback.copy()
    given = np.asarray(forecast, dtype=float)[: len(result)]
    usable = (given >= 0) & (given <= MAX_SIGNAL)
    result[: len(given)][usable] = given[usable]
    usable = (result >= 0) & (result <= MAX_SIGNAL)
    level = float(result[usable].mean()) if usable.any() else 1.0
    return np.where(usable, result, level)


def next_speed(
    hull: SpeedHull,
    forecast: Array,
    fallback: Array,
    slot_lengths_s: Array,
    remaining_iterations: float,
    *,
    full_speed_per_s: float | None = None,
) -> float:
    """Return the speed of the present slot, such that full speed can finish the remaining work in time.

    The slots are the rest of the present hour and the following ones up to the deadline. Forecast errors cost carbon
    but never time; the fallback has a value for every slot. `full_speed_per_s` is the measured full speed, if it
    differs from the hull's fastest point.
    """
    fastest = hull.full_speed_per_s if full_speed_per_s is None else full_speed_per_s
    expected = repaired(forecast, fallback)
    wanted = float(plan_slots(hull, expected, slot_lengths_s, remaining_iterations)[0])
    return clamped_speed(wanted, slot_lengths_s, remaining_iterations, fastest)


def clamped_speed(
    wanted_per_s: float, slot_lengths_s: Array, remaining_iterations: float, fastest_per_s: float
) -> float:
    """Return the wanted speed, raised if full speed could not finish the remaining work in the later slots."""
    now_s = float(slot_lengths_s[0])
    needed_now = remaining_iterations - fastest_per_s * float(slot_lengths_s[1:].sum())
    return max(wanted_per_s, min(fastest_per_s, needed_now / now_s))
