"""What a job takes and uses at each setting that is the same on all its GPUs: curves that are possible, and measured.

Theory of operation. A curve says time and energy of an iteration at every clock, relative to full speed. Of the time, a
share k scales with the clock, and the rest is partly hidden behind it; the voltage rises above a knee. At a real clock
that is exp(-d) of that at full speed,

    time = (1 - k + k * exp(p * d)) ** (1 / p)
    energy = static * time + constant + dynamic * (v(d) / v(0))^2         static + constant + dynamic = 1

each times a smooth deviation. A clock lock holds the real clock at its value, if that is below the clock at full speed;
a power limit lowers the real clock until the power, energy by time, meets it. So one curve predicts both.

The parameters are drawn from the ranges of published curves, which gives `_NUM_CURVES` possible ones. Full speed shows
only the power, which tells the static share and where limits bind. Measurements move each curve by what the curves have
in common with them (an ensemble Kalman filter: the update of a Gaussian process whose mean and covariance are those of
the curves). What is wanted is then a mean over the curves: an expected saving with its range, a cost, how probable it
is that a setting is fast enough, how much better than another it may be.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd_policies.uniform_probe import Setting

FloatArray = NDArray[np.float64]
Cost = Callable[[FloatArray, FloatArray], FloatArray]
"""What a policy minimizes, from times and energies relative to full speed; arrays of one shape."""

_NUM_CURVES, _LEAST_CURVES = 1000, 200
"""Possible curves, and the effective number of them that measurements leave at least."""
_LEAST_SCALING_SHARE, _LEAST_COMPUTING_SHARE, _COMPUTING_CHANCE = 0.02, 0.6, 0.4
"""Of the time, the share that scales with the clock: uniform from 0.6 where a loop computes, else log-uniform.

Matrix products have 0.8 to 1. Loops that wait for memory, data or the host have less: of the public sweeps of power
limits (ml-energy/zeus, 218 trainings on four GPU models) half save more than 5 % by 1 % more time.
"""
_KNEES, _VOLTAGES = (0.52, 0.80), (1.18, 1.42)
"""Ranges of fits to published curves of V100, A100, A40 and RTX 3080 Ti: clock of the knee and voltage at the top."""
_STATIC_W, _STATIC_OF_LIMIT, _STATIC_SIGMA, _MOST_STATIC_SHARE = 50.0, 0.14, 0.4, 0.7
"""Static power of a GPU: fits give 32 to 90 W, or 0.07 to 0.26 of the power limit; spread of the logarithm."""
_AT_LIMIT_RATIO, _AT_LIMIT_CHANCE, _CAPPED_CHANCE, _LEAST_CAPPED_CLOCK = 0.93, 0.5, 0.2, 0.78
"""A GPU at its power limit runs below its highest clock, where the voltage is lower already."""
_DEVIATION, _SCATTER, _ALIKE = 0.3, 0.12, 0.25
"""Deviation of the logarithms of time and energy from the formulas, as a ratio, and the logarithm of the ratio of two
settings over which it is alike. Under a power limit both scatter besides: in the public sweeps, limits that bind little
change them by several percent."""
_SOFTNESS = (0.003, 0.3)
"""Range of how gradually a power limit binds, as a ratio of power: at once where it is constant, long before its mean
reaches the limit where it comes in bursts (public sweeps of power limits)."""


@dataclass(frozen=True, slots=True)
class LoopAtFullSpeed:
    """What full speed shows of a loop."""

    power_w: float
    """Mean power of one GPU."""
    power_limit_w: float | None
    """Of one GPU; None if unknown."""
    working_share: float
    """Share of an iteration outside phases that are known to wait."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """Time and energy of a setting relative to full speed, with their standard errors."""

    time_ratio: float
    energy_ratio: float
    time_error: float
    energy_error: float


@dataclass(frozen=True, slots=True)
class Curves:
    """Possible times and energies at settings, relative to full speed."""

    settings: tuple[Setting, ...]
    logs: FloatArray
    """Natural logarithms, shape (curves, 2 * settings): of the times, then of the energies."""

    @property
    def times(self) -> FloatArray:
        """Relative times, shape (curves, settings)."""
        return np.exp(self.logs[:, : len(self.settings)])

    @property
    def energies(self) -> FloatArray:
        """Relative energies, shape (curves, settings)."""
        return np.exp(self.logs[:, len(self.settings) :])

    def are_within(self, longest_ratio: float, *, sigmas: float) -> set[Setting]:
        """Return the settings whose expected time is at most this, with so many standard errors to spare."""
        logs = self.logs[:, : len(self.settings)]
        is_within = logs.mean(axis=0) + sigmas * logs.std(axis=0) <= np.log(longest_ratio)
        return {setting for setting, own in zip(self.settings, is_within, strict=True) if own}

    def costs(self, cost: Cost | None) -> FloatArray:
        """Return the costs, shape (curves, settings); without a cost that is the energy."""
        return self.energies if cost is None else cost(self.times, self.energies)

    def savings(self, permitted: FloatArray, cost: Cost | None = None) -> FloatArray:
        """Return the energy that each curve saves by its setting of least cost that is no slower than permitted."""
        prices = np.where(self.times <= 1 + np.maximum(permitted, 0.0)[:, None], self.costs(cost), np.inf)
        return np.asarray(1 - self.energies[np.arange(len(prices)), np.argmin(prices, axis=1)])

    def given(self, points: Mapping[Setting, MeasuredPoint], *, full_speed: tuple[float, float]) -> "Curves":
        """Return the curves that measured points leave; `full_speed` are the errors of time and energy there."""
        known = [(self.settings.index(setting), own) for setting, own in points.items() if setting in self.settings]
        if not known:
            return self
        columns = [k for k, _ in known] + [k + len(self.settings) for k, _ in known]
        measured = np.log([own.time_ratio for _, own in known] + [own.energy_ratio for _, own in known])
        errors = np.array([own.time_error for _, own in known] + [own.energy_error for _, own in known])
        shared = np.kron(np.diag(np.square(full_speed)), np.ones((len(known), len(known))))
        noise = np.diag(np.square(errors)) + shared
        misfit = self.logs[:, columns] - measured
        chosen, share = _resampled(np.einsum("ij,ij->i", misfit @ np.linalg.inv(noise), misfit))
        logs, noise = self.logs[chosen], noise / (1 - share)
        spread = logs - logs.mean(axis=0)
        there = spread[:, columns]
        gain = np.linalg.solve(there.T @ there + len(logs) * noise, there.T @ spread)
        random = np.random.default_rng(len(known))
        drawn = measured + random.standard_normal(there.shape) @ np.linalg.cholesky(noise).T
        return replace(self, logs=logs + (drawn - logs[:, columns]) @ gain)


def _resampled(misfit: FloatArray) -> tuple[NDArray[np.intp], float]:
    """Return curves drawn by their likelihood to a power that leaves enough of them, and that power."""
    share = 0.5
    while True:
        weights = np.exp(-0.5 * share * (misfit - misfit.min()))
        weights /= weights.sum()
        if np.sum(np.square(weights)) <= 1 / _LEAST_CURVES:
            places = (np.arange(len(weights)) + 0.5) / len(weights)
            return np.minimum(np.searchsorted(np.cumsum(weights), places), len(weights) - 1), share
        share /= 2


@lru_cache(maxsize=3)
def possible_curves(settings: tuple[Setting, ...], loop: LoopAtFullSpeed, seed: int = 0) -> Curves:
    """Return the curves that are possible after a run at full speed, which is the first setting of each lever."""
    random, count = np.random.default_rng(seed), _NUM_CURVES

    def uniform(low: float, high: float) -> FloatArray:
        return random.uniform(low, high, (count, 1))

    def normal() -> FloatArray:
        return random.standard_normal((count, 1))

    def smooth(below: FloatArray, length: float) -> FloatArray:
        """Return draws of a Gaussian process of size 1 over settings."""
        alike = np.exp(-0.5 * np.square((below[:, None] - below) / length)) + 1e-6 * np.eye(len(below))
        return np.asarray(random.standard_normal((count, len(below))) @ np.linalg.cholesky(alike).T)

    computing = uniform(_LEAST_COMPUTING_SHARE, 1.0)
    waiting = np.exp(uniform(np.log(_LEAST_SCALING_SHARE), 0.0))
    scaling = np.where(uniform(0, 1) < _COMPUTING_CHANCE, computing, waiting) * loop.working_share
    knee, top, hidden = uniform(*_KNEES), uniform(*_VOLTAGES), uniform(1, 3)
    static_w = _STATIC_W if loop.power_limit_w is None else _STATIC_OF_LIMIT * loop.power_limit_w
    static = np.minimum(static_w * np.exp(_STATIC_SIGMA * normal()) / max(loop.power_w, 1.0), _MOST_STATIC_SHARE)
    constant = (1 - static) * (1 - scaling) * uniform(0, 0.5)
    is_at_limit = loop.power_limit_w is not None and loop.power_w > _AT_LIMIT_RATIO * loop.power_limit_w
    is_capped = uniform(0, 1) < (_AT_LIMIT_CHANCE if is_at_limit else _CAPPED_CHANCE)
    full_speed = np.where(is_capped, uniform(_LEAST_CAPPED_CLOCK, 1.0), 1.0)

    depths = np.linspace(0.0, 2.0, 100)
    times = np.log1p(scaling * np.expm1(hidden * depths)) / hidden
    volts = _voltage(full_speed * np.exp(-depths), knee, top) / _voltage(full_speed, knee, top)
    energies = np.log(static * np.exp(times) + constant + (1 - static - constant) * np.square(volts))
    powers = np.minimum.accumulate(energies - times, axis=1)
    softness = np.exp(uniform(*np.log(_SOFTNESS)))

    found = []
    for lever, group in groupby(settings, key=lambda setting: setting.lever):
        levels = np.array([float(setting.value) for setting in group])
        below = np.log(levels[0] / levels)
        if lever is Lever.CLOCKS:
            places = np.maximum(0.0, below + np.log(full_speed)) / depths[1]
        else:
            excess = softness * np.logaddexp(0, np.log(loop.power_w / levels) / softness)
            places = np.stack([_place(powers, excess[:, 0] - own) for own in excess.T], axis=1)
        logs = [_at(own, places) * np.exp(_DEVIATION * smooth(below, _ALIKE)) for own in (times, energies)]
        if lever is Lever.POWER_LIMITS:
            logs = [own + off - off[:, :1] for own in logs for off in [_SCATTER * smooth(below, _ALIKE / 2)]]
        found.append(logs)
    return Curves(settings, np.concatenate([part for half in zip(*found, strict=True) for part in half], axis=1))


def _place(falling: FloatArray, value: FloatArray) -> FloatArray:
    """Return where each falling curve reaches its value, in indices."""
    after = np.clip(np.sum(falling > value[:, None], axis=1), 1, falling.shape[1] - 1)
    rows = np.arange(len(falling))
    high, low = falling[rows, after - 1], falling[rows, after]
    return np.asarray(after - 1 + np.clip((high - value) / np.maximum(high - low, 1e-12), 0, 1))


def _at(values: FloatArray, places: FloatArray) -> FloatArray:
    """Return the values of each curve at its places, which are indices."""
    before = np.clip(places.astype(int), 0, values.shape[1] - 2)
    low, high = np.take_along_axis(values, before, axis=1), np.take_along_axis(values, before + 1, axis=1)
    return np.asarray(low + (places - before) * (high - low))


def _voltage(clock: FloatArray, knee: FloatArray, top: FloatArray) -> FloatArray:
    return np.asarray(1 + (top - 1) * np.maximum(0.0, clock - knee) / (1 - knee))
