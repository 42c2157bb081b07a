"""Spend a slowdown budget where it saves most: exact plans over hours, and a controller that cannot overdraw.

Theory of operation. With speed x = 1/T and power P(x) = E(1/x)/T + host power, N iterations in slots of length D_t
with intensities c_t cost

    minimise  sum c_t P(x_t) D_t   subject to  sum x_t D_t = N,   x_slow <= x_t <= x_fast.

P is piecewise linear and convex on the lower hull of the measured points, so the problem is a continuous knapsack:
start all slots at x_slow, sort the pieces (slot, hull segment) by c_t times slope, and take them until the work is
done. Convexity puts the segments of one slot in order by itself. One piece is taken in part; its slot mixes two
adjacent points in time. No solver is needed and the optimum is exact.

The controller plans anew in every slot with the forecast of that moment and then clamps: the chosen speed must leave
a rest that full speed can still finish. Whatever a forecast says, by induction the deadline is kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.carbon.speed_curve import speed_points

Array = NDArray[np.float64]

MAX_SIGNAL = 1e6
"""Above this no intensity and no price is a value; it is a broken reply."""
LATER_DISCOUNT = 0.05
"""How much less the signal is taken to be later than now, in standard deviations of what is expected.

Slack spent where the signal is known cannot be regretted. On five zones' traces of 2024 it adds up to half a point to
the captured share of an A40's power-limit curve and takes up to half a point from that of a pipeline's frontier.
"""


@dataclass(frozen=True, slots=True)
class SpeedHull:
    """The lower convex hull of power over speed, slowest first: the only points worth running or mixing."""

    speeds_per_s: Array
    powers_w: Array

    @property
    def slopes_j(self) -> Array:
        """Energy of one more iteration in each segment; it rises from segment to segment."""
        slopes: Array = np.diff(self.powers_w) / np.diff(self.speeds_per_s)
        return slopes

    @property
    def full_speed_per_s(self) -> float:
        """Iterations per second at the fastest point."""
        return float(self.speeds_per_s[-1])

    @property
    def min_time_s(self) -> float:
        """Iteration time at the fastest point."""
        return 1.0 / float(self.speeds_per_s[-1])

    def power_w(self, speed_per_s: Array | float) -> Array:
        """Return the power at a speed, mixing the two points around it."""
        return np.asarray(np.interp(speed_per_s, self.speeds_per_s, self.powers_w))

    def limited_to(self, full_speed_per_s: float) -> "SpeedHull":
        """Return the hull for a job that something else holds at or below a speed: a straggler, a power cap."""
        if full_speed_per_s >= self.full_speed_per_s:
            return self
        limit = max(full_speed_per_s, float(self.speeds_per_s[0]))
        kept = self.speeds_per_s < limit
        return SpeedHull(
            np.append(self.speeds_per_s[kept], limit), np.append(self.powers_w[kept], float(self.power_w(limit)))
        )

    def mix(self, speed_per_s: float) -> tuple[tuple[float, float], ...]:
        """Return the iteration times that make a speed, with their shares of the slot's time, fastest first."""
        speeds = self.speeds_per_s
        if speed_per_s >= speeds[-1]:
            return ((self.min_time_s, 1.0),)
        if speed_per_s <= speeds[0]:
            return ((1.0 / float(speeds[0]), 1.0),)
        above = int(np.searchsorted(speeds, speed_per_s, side="left"))
        slow, fast = float(speeds[above - 1]), float(speeds[above])
        share = (speed_per_s - slow) / (fast - slow)
        if share >= 1.0 - 1e-12:
            return ((1.0 / fast, 1.0),)
        return ((1.0 / fast, share), (1.0 / slow, 1.0 - share)) if share > 1e-12 else ((1.0 / slow, 1.0),)


def speed_hull(points: Sequence[tuple[float, float]], host_power_w: float = 0.0) -> SpeedHull:
    """Return the hull of `(iteration_time_s, energy_j)` points; noisy, doubled and dominated ones drop out.

    Points slower than the one of least energy (host energy included) are never worth running and drop out too.

    Raises:
        CarbonDataError: no point is left, or a value is not a positive finite number.
    """
    curve = speed_points(points, host_power_w)
    return SpeedHull(np.array([x for x, _ in curve]), np.array([p for _, p in curve]))


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """The optimal speed of each slot, and the cost of one more iteration, the same in all slots not at a limit."""

    speeds_per_s: Array
    marginal_cost: float


def plan_slots(hull: SpeedHull, intensities: Array, slot_lengths_s: Array, num_iterations: float) -> SlotPlan:
    """Return the cheapest speeds that do the work in exactly these slots.

    More work than full speed can do gives full speed; less than the slowest point does gives the slowest. An
    intensity below zero counts as zero: energy that is given away is used at full speed.
    """
    slowest = float(hull.speeds_per_s[0])
    speeds = np.full(len(intensities), slowest)
    need = num_iterations - slowest * float(slot_lengths_s.sum())
    widths = np.diff(hull.speeds_per_s)
    if need <= 0 or not len(widths):
        return SlotPlan(speeds, 0.0)
    costs = (np.maximum(intensities, 0.0)[:, None] * hull.slopes_j).ravel()
    capacities = (slot_lengths_s[:, None] * widths).ravel()
    order = np.argsort(costs, kind="stable")
    filled = np.cumsum(capacities[order])
    last = int(np.searchsorted(filled, need))
    if last >= len(order):
        return SlotPlan(np.full(len(intensities), hull.full_speed_per_s), float(costs.max()))
    taken = np.zeros(len(order))
    taken[order[:last]] = 1.0
    taken[order[last]] = 1.0 - (filled[last] - need) / capacities[order[last]]
    speeds += (taken.reshape(len(intensities), -1) * widths).sum(axis=1)
    return SlotPlan(speeds, float(costs[order[last]]))


def plan_cost(hull: SpeedHull, speeds_per_s: Array, intensities: Array, slot_lengths_s: Array) -> float:
    """Return sum(c P D) in the unit of the intensity times joules."""
    return float((intensities * hull.power_w(speeds_per_s) * slot_lengths_s).sum())


def constant_speed(hull: SpeedHull, num_iterations: float, time_s: float) -> float:
    """Return the one speed that does the work in a given time, within what the hull offers."""
    return float(np.clip(num_iterations / time_s, hull.speeds_per_s[0], hull.speeds_per_s[-1]))


def repaired(forecast: Array, fallback: Array) -> Array:
    """Return a forecast as long as the fallback, whose values stand where the forecast has none that can be used."""
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
    """Return the speed of the slot that begins now; it leaves a rest that full speed can still finish in time.

    Args:
        hull: what the job can run at, as measured.
        forecast: intensity per slot; wrong, short, empty or absurd ones cost carbon, never time.
        fallback: a value for every slot, used where the forecast has none.
        slot_lengths_s: what is left of this slot, then the slots until the deadline.
        remaining_iterations: work to be done by then.
        full_speed_per_s: measured full speed, where it is not the hull's fastest point.
    """
    fastest = hull.full_speed_per_s if full_speed_per_s is None else full_speed_per_s
    expected = repaired(forecast, fallback)
    expected[1:] = np.maximum(0.0, expected[1:] - LATER_DISCOUNT * expected.std())
    wanted = float(plan_slots(hull, expected, slot_lengths_s, remaining_iterations).speeds_per_s[0])
    return clamped_speed(wanted, slot_lengths_s, remaining_iterations, fastest)


def clamped_speed(
    wanted_per_s: float, slot_lengths_s: Array, remaining_iterations: float, fastest_per_s: float
) -> float:
    """Return the wanted speed, raised as far as needed for full speed to finish the rest in the later slots."""
    if not math.isfinite(wanted_per_s):
        return fastest_per_s
    now_s = float(slot_lengths_s[0])
    owed_now = remaining_iterations - fastest_per_s * float(slot_lengths_s[1:].sum())
    return max(wanted_per_s, min(fastest_per_s, owed_now / now_s))
