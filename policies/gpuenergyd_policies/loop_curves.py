"""Belief about what a plain loop saves by running slower: curves that are possible, weighed by what was measured.

Relative to full speed, energy is a function of the slowdown, whichever lever slows the GPUs. A loop of share k of its
time that scales with the clock, with a voltage that rises above a knee, has

    r = k / (k + slowdown)                                              clock, relative to that at full speed
    energy = static * (1 + slowdown) + constant + dynamic * (v(r) / v(1))^2         static + constant + dynamic = 1

The parameters are drawn from the ranges of published curves. Full speed shows only the power, which tells the static
share; so the possible curves differ much. Where other clocks or power limits were measured, each curve counts as much
as it is probable given the measurements, and what no curve explains is added between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Cost = Callable[[FloatArray, FloatArray], FloatArray]
"""What a policy minimizes, from times and energies relative to full speed; arrays of one shape."""

SLOWDOWNS: FloatArray = np.concatenate([np.linspace(0.0, 0.1, 41), np.linspace(0.11, 0.5, 27)])
"""Slowdowns of the points of all curves."""
_NUM_CURVES = 1500
_LEAST_SCALING_SHARE, _LEAST_COMPUTING_SHARE, _COMPUTING_CHANCE = 0.03, 0.6, 0.4
"""Of the time, the share that scales with the clock: uniform from 0.6 where a loop computes, else log-uniform.

Matrix products have 0.8 to 1. Loops that wait for memory, data or the host have less: of the public sweeps of power
limits (ml-energy/zeus, 218 trainings on four GPU models) half save more than 5 % by 1 % more time.
"""
_KNEES, _VOLTAGES = (0.52, 0.80), (1.18, 1.42)
"""Ranges of fits to published curves of V100, A100, A40 and RTX 3080 Ti: clock of the knee and voltage at the top."""
_STATIC_W, _STATIC_OF_LIMIT, _STATIC_SIGMA = 50.0, 0.14, 0.4
"""Static power of a GPU: fits give 32 to 90 W, or 0.07 to 0.26 of the power limit; spread of the logarithm."""
_MOST_STATIC_SHARE = 0.7
_MOST_CONSTANT_SHARE = 0.5
"""Of the energy of work that does not scale with the clock, such as that of memory traffic, at most so much is constant
(assumed)."""
_AT_LIMIT_RATIO, _AT_LIMIT_CHANCE, _CAPPED_CHANCE, _LEAST_CAPPED_CLOCK = 0.93, 0.5, 0.2, 0.78
"""A GPU at its power limit runs below its highest clock, where the voltage is lower already."""
_LOWEST_CLOCK = 0.5
_LEAST_CURVES = 60.0
"""Effective number of curves below which the measurements count less: no possible curve explains them all."""
_UNEXPLAINED_RATIO = 0.004
"""Standard error of a possible curve: it is not quite that of any GPU."""
_LEAST_SLOWDOWN = 0.0005
"""At which settings count that were measured as fast as full speed."""
_LATE_SIGMAS = 1.5
_SLOPE_OVER = 0.002
_ENDS = (0.05, 0.95)


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """Slowdown and energy of a setting relative to full speed, with their standard errors."""

    slowdown_ratio: float
    energy_ratio: float
    slowdown_error: float
    energy_error: float


@dataclass(frozen=True, slots=True)
class Steps:
    """What keeps a policy from using exactly the permitted slowdown."""

    clock_ratio: float = 0.0
    """Distance of two neighbouring clocks."""
    time_ratio: float = 0.0
    """Distance in time of two settings, whatever the clock."""
    time_sigma: float = 0.0
    """Scatter of iteration times: a setting that is slower by so much may be taken for fast enough."""


@dataclass(frozen=True, slots=True)
class LoopAtFullSpeed:
    """What full speed shows of a loop."""

    power_w: float
    """Mean power of one GPU."""
    power_limit_w: float | None = None
    """Of one GPU; None if unknown."""
    working_share: float = 1.0
    """Share of an iteration outside phases that are known to wait."""


@dataclass(frozen=True, slots=True)
class SavingBelief:
    """Median of a saving and the ends of its 90 % interval, as ratios."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class LoopCurves:
    """Possible curves of a loop and their weights, which add up to 1."""

    energies: FloatArray
    """Energy relative to full speed, shape (curves, SLOWDOWNS)."""
    scaling: FloatArray
    """Share of the time that scales with the clock."""
    weights: FloatArray
    seed: int = 0

    def saving(
        self, slowdown_ratio: float, *, steps: Steps, energy_error: float = 0.0, cost: Cost | None = None
    ) -> SavingBelief:
        """Return what the loop saves if it may be slower by a ratio, at least `cost` if there is one.

        `energy_error` is the standard error of the energy at full speed.
        """
        random, count = np.random.default_rng(self.seed), len(self.weights)
        permitted = slowdown_ratio + _LATE_SIGMAS * steps.time_sigma * random.uniform(0, 1, count)
        step = np.maximum(np.maximum(steps.clock_ratio * self.scaling, steps.time_ratio), 1e-6)
        permitted = np.floor(permitted / step) * step
        times = np.broadcast_to(1 + SLOWDOWNS, self.energies.shape)
        found = _at(self.energies, permitted)
        prices = self.energies if cost is None else cost(times, self.energies)
        prices_at = found if cost is None else cost(1 + permitted, found)
        within = np.where(permitted[:, None] >= SLOWDOWNS, prices, np.inf)
        best, rows = np.argmin(within, axis=1), np.arange(count)
        energies = np.where(within[rows, best] < prices_at, self.energies[rows, best], found)
        savings = 1 - energies + energy_error * random.standard_normal(count)
        low, middle, high = _quantiles(savings, self.weights, (_ENDS[0], 0.5, _ENDS[1]))
        return SavingBelief(middle, low, high)


def possible_curves(loop: LoopAtFullSpeed, *, seed: int = 0) -> LoopCurves:
    """Return the curves that are possible after a run at full speed."""
    random, count = np.random.default_rng(seed), _NUM_CURVES
    waiting = np.exp(random.uniform(np.log(_LEAST_SCALING_SHARE), 0.0, count))
    computing = random.uniform(_LEAST_COMPUTING_SHARE, 1.0, count)
    scaling = np.where(random.uniform(0, 1, count) < _COMPUTING_CHANCE, computing, waiting) * loop.working_share
    knee, top = random.uniform(*_KNEES, count), random.uniform(*_VOLTAGES, count)
    static_w = _STATIC_W if loop.power_limit_w is None else _STATIC_OF_LIMIT * loop.power_limit_w
    static = static_w * np.exp(_STATIC_SIGMA * random.standard_normal(count)) / max(loop.power_w, 1.0)
    static = np.minimum(static, _MOST_STATIC_SHARE)
    constant = (1 - static) * (1 - scaling) * random.uniform(0, _MOST_CONSTANT_SHARE, count)
    is_at_limit = loop.power_limit_w is not None and loop.power_w > _AT_LIMIT_RATIO * loop.power_limit_w
    is_capped = random.uniform(0, 1, count) < (_AT_LIMIT_CHANCE if is_at_limit else _CAPPED_CHANCE)
    full_speed = np.where(is_capped, random.uniform(_LEAST_CAPPED_CLOCK, 1.0, count), 1.0)[:, None]

    clocks = np.maximum(full_speed * scaling[:, None] / (scaling[:, None] + SLOWDOWNS), _LOWEST_CLOCK)
    times = 1 + scaling[:, None] * (full_speed / clocks - 1)
    volts = _voltage(clocks, knee[:, None], top[:, None]) / _voltage(full_speed, knee[:, None], top[:, None])
    dynamic = (1 - static - constant)[:, None]
    energies = static[:, None] * times + constant[:, None] + dynamic * np.square(volts)
    return LoopCurves(energies, scaling, np.full(count, 1 / count), seed)


def weighed(curves: LoopCurves, points: Sequence[MeasuredPoint]) -> LoopCurves:
    """Return the curves with the weights that measured points give them, moved towards the points."""
    points = [own for own in points if own.slowdown_ratio <= SLOWDOWNS[-1]]
    if not points:
        return curves
    count = len(curves.weights)
    at = np.array([max(own.slowdown_ratio, _LEAST_SLOWDOWN) for own in points])
    measured = np.array([own.energy_ratio for own in points])
    errors = np.array([[own.slowdown_error, own.energy_error] for own in points])
    seen = np.stack([_at(curves.energies, np.full(count, x)) for x in at], axis=1)
    after = np.stack([_at(curves.energies, np.full(count, x + _SLOPE_OVER)) for x in at], axis=1)
    slopes = (after - seen) / _SLOPE_OVER
    variance = np.square(slopes * errors[:, 0]) + np.square(errors[:, 1]) + _UNEXPLAINED_RATIO**2
    misfit = np.sum(np.square(measured - seen) / variance + np.log(variance), axis=1)
    weights = _tempered(misfit - misfit.min())
    moved = _moved(curves.energies, seen, measured, variance, at)
    return LoopCurves(moved, curves.scaling, weights, curves.seed)


def _tempered(misfit: FloatArray) -> FloatArray:
    """Return weights of an effective number that is large enough."""
    share = 1.0
    while True:
        weights = np.exp(-0.5 * share * misfit)
        weights /= weights.sum()
        if 1 / float(np.sum(np.square(weights))) >= _LEAST_CURVES:
            return np.asarray(weights, dtype=np.float64)
        share *= 0.7


def _moved(
    energies: FloatArray, seen: FloatArray, measured: FloatArray, variance: FloatArray, at: FloatArray
) -> FloatArray:
    """Return curves that are moved towards the points, by the share of each misfit that is no error of measurement."""
    order = np.argsort(at)
    share = _UNEXPLAINED_RATIO**2 / variance
    moves = (share * (measured - seen))[:, order]
    places = np.concatenate([[0.0], at[order]])
    moved = energies.copy()
    basis = np.stack([np.interp(SLOWDOWNS, places, np.eye(len(places))[k]) for k in range(1, len(places))])
    return np.asarray(moved + moves @ basis, dtype=np.float64)


def _at(energies: FloatArray, slowdowns: FloatArray) -> FloatArray:
    """Return the energy of each curve at its slowdown, interpolated."""
    index = np.clip(np.searchsorted(SLOWDOWNS, slowdowns, side="right") - 1, 0, len(SLOWDOWNS) - 2)
    share = np.clip((slowdowns - SLOWDOWNS[index]) / (SLOWDOWNS[index + 1] - SLOWDOWNS[index]), 0.0, 1.0)
    rows = np.arange(len(energies))
    return np.asarray((1 - share) * energies[rows, index] + share * energies[rows, index + 1], dtype=np.float64)


def _voltage(clock: FloatArray, knee: FloatArray, top: FloatArray) -> FloatArray:
    return np.asarray(1 + (top - 1) * np.maximum(0.0, clock - knee) / (1 - knee), dtype=np.float64)


def _quantiles(values: FloatArray, weights: FloatArray, shares: Sequence[float]) -> tuple[float, ...]:
    order = np.argsort(values)
    below = np.cumsum(weights[order]) - 0.5 * weights[order]
    return tuple(float(np.interp(share, below, values[order])) for share in shares)
