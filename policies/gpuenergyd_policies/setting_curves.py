"""Time and energy of an iteration at each setting that is the same on all GPUs: many possible curves, and measurements.

Theory of operation. A *curve* is one guess of a loop's time and energy at every setting, relative to full speed. Where
a share k of the time scales with the clock, and the rest of the time is partly hidden behind it (p = 1: not at all, 3:
mostly), a real clock that is exp(-d) of the one at full speed gives

    time = (1 - k + k * exp(p * d)) ** (1 / p)
    energy = static * time + constant + dynamic * (voltage(d) / voltage(0)) ** 2     static + constant + dynamic = 1

A clock lock lowers the real clock to its value, if the clock at full speed is higher. A power limit lowers the real
clock until the power, energy by time, meets it. So one curve predicts both levers.

`possible_curves` draws the parameters of `_NUM_CURVES` curves from the ranges of published GPUs, and adds smooth random
deviations, because no GPU follows the formulas exactly. A run at full speed shows only the power; that tells the static
share of the energy, and which limits bind. `Curves.given` conditions the curves on measured settings. The first step
resamples the curves by their likelihood, as far as that leaves enough different ones. The second step is an ensemble
Kalman filter (Evensen 2003): it moves each curve towards the measurements, at all settings, by the covariance of the
curves. Whatever is wanted then is a statistic of the curves: an expected cost, a saving with its range, the probability
that a setting is fast enough.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd_policies.uniform_settings import Setting

FloatArray = NDArray[np.float64]
Cost = Callable[[FloatArray, FloatArray], FloatArray]
"""What a policy minimizes, from times and energies relative to full speed; arrays of one shape."""

_NUM_CURVES, _LEAST_CURVES = 1000, 200
"""Possible curves, and the effective number of them that resampling leaves at least."""
_LEAST_SCALING_SHARE, _LEAST_COMPUTING_SHARE, _COMPUTING_CHANCE = 0.02, 0.6, 0.4
"""Of the time, the share that scales with the clock: uniform from 0.6 where a loop computes, else log-uniform.

Matrix products have 0.8 to 1. Loops that wait for memory, data or the host have less: of the public sweeps of power
limits (ml-energy/zeus, 218 trainings on four GPU models) half save more than 5 % by 1 % more time.
"""
_EXPONENTS = (1.0, 3.0)
"""How much of the time that does not scale is hidden behind the time that does: exponent p of the time."""
_KNEES, _VOLTAGES = (0.52, 0.80), (1.18, 1.42)
"""Ranges of fits to published curves of V100, A100, A40 and RTX 3080 Ti: clock of the knee and voltage at the top."""
STATIC_W, _STATIC_OF_LIMIT, _STATIC_SIGMA, _MOST_STATIC_SHARE = 50.0, 0.14, 0.4, 0.7
"""Static power of a GPU: fits give 32 to 90 W, or 0.07 to 0.26 of the power limit; spread of the logarithm."""
_MOST_CONSTANT_SHARE = 0.5
"""Of the energy of work that does not scale with the clock, such as that of memory traffic, at most so much is constant
(assumed)."""
_AT_LIMIT_RATIO, _AT_LIMIT_CHANCE, _CAPPED_CHANCE, _LEAST_CAPPED_CLOCK = 0.93, 0.5, 0.2, 0.78
"""A GPU at its power limit runs below its highest clock, where the voltage is lower already."""
SUSTAINED_ERROR = 0.03
"""By how much the clock of an instruction is off that which its GPU sustains on average, as a logarithm."""
_SOFTNESS = (0.003, 0.3)
"""Range of how gradually a power limit binds, as a ratio of power: at once where the power is constant, long before the
mean reaches the limit where power comes in bursts (public sweeps of power limits)."""
_DEVIATION, _SCATTER, _ALIKE = 0.3, 0.06, 0.25
"""Deviation of the logarithms of time and energy from the formulas, as a ratio; scatter of both under power limits,
where the public sweeps change by several percent at limits that hardly bind; and the ratio of two settings, as a
logarithm, over which a deviation is alike."""
_MOST_DEPTH, _NUM_DEPTHS = 2.0, 100


class StandardErrors(NamedTuple):
    """Standard errors of a measured time and energy, relative to full speed."""

    time: float
    energy: float


@dataclass(frozen=True, slots=True)
class LoopAtFullSpeed:
    """What full speed shows of a loop."""

    power_w: float
    """Mean power of one GPU."""
    power_limit_w: float | None
    """Of one GPU; None if unknown."""
    working_share: float
    """Share of an iteration outside phases that are known to wait."""
    sustained_ratio: float
    """Clock that its GPUs sustain at their power limits, as a share of the highest one; 1: not known to be held."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """Time and energy of a setting relative to full speed."""

    time_ratio: float
    energy_ratio: float
    errors: StandardErrors


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

    def fast_enough(self, longest_ratio: float, *, sigmas: float) -> set[Setting]:
        """Return the settings whose expected time is at most this, with so many standard errors to spare."""
        logs = self.logs[:, : len(self.settings)]
        is_within = logs.mean(axis=0) + sigmas * logs.std(axis=0) <= np.log(longest_ratio)
        return {setting for setting, is_one in zip(self.settings, is_within, strict=True) if is_one}

    def costs(self, cost: Cost | None) -> FloatArray:
        """Return the costs, shape (curves, settings); without a cost that is the energy."""
        return self.energies if cost is None else cost(self.times, self.energies)

    def savings(self, permitted_ratios: FloatArray, cost: Cost | None = None) -> FloatArray:
        """Return the energy that each curve saves at its setting of least cost within its permitted slowdown."""
        is_permitted = self.times <= 1 + np.maximum(permitted_ratios, 0.0)[:, None]
        chosen = np.argmin(np.where(is_permitted, self.costs(cost), np.inf), axis=1)
        return np.asarray(1 - self.energies[np.arange(len(chosen)), chosen])

    def given(self, points: Mapping[Setting, MeasuredPoint], *, full_speed: StandardErrors) -> "Curves":
        """Return the curves that measured points leave.

        `full_speed` are the errors of time and energy at full speed, which all relative measurements share.
        """
        known = [(self.settings.index(setting), point) for setting, point in points.items() if setting in self.settings]
        if not known:
            return self
        columns = [k for k, _ in known] + [k + len(self.settings) for k, _ in known]
        measured = np.log([point.time_ratio for _, point in known] + [point.energy_ratio for _, point in known])
        own_errors = [point.errors.time for _, point in known] + [point.errors.energy for _, point in known]
        shared = np.kron(np.diag(np.square(full_speed)), np.ones((len(known), len(known))))
        noise = np.asarray(np.diag(np.square(own_errors)) + shared, float)

        misfit = self.logs[:, columns] - measured
        chosen, used_share = _resampled(np.einsum("ij,ij->i", misfit @ np.linalg.inv(noise), misfit))
        return replace(self, logs=_moved(self.logs[chosen], columns, measured, noise / (1 - used_share)))


def _resampled(misfits: FloatArray) -> tuple[NDArray[np.intp], float]:
    """Return the indices of curves drawn by a power of their likelihood, and that power: at most 0.5.

    `misfits` are minus twice the logarithms of the likelihoods. The power is low enough to leave `_LEAST_CURVES`.
    """
    power = 0.5
    while True:
        weights = np.exp(-0.5 * power * (misfits - misfits.min()))
        weights /= weights.sum()
        if 1 / np.sum(np.square(weights)) >= _LEAST_CURVES:
            break
        power /= 2
    evenly = (np.arange(len(weights)) + 0.5) / len(weights)
    return np.minimum(np.searchsorted(np.cumsum(weights), evenly), len(weights) - 1), power


def _moved(logs: FloatArray, columns: Sequence[int], measured: FloatArray, noise: FloatArray) -> FloatArray:
    """Return the curves after a step of an ensemble Kalman filter.

    `noise` is the covariance of the measurements at `columns`. Each curve is corrected with a copy of the measurements
    perturbed by that noise, which keeps the spread of the ensemble equal to the posterior's (perturbed observations).
    """
    spread = logs - logs.mean(axis=0)
    spread_there = spread[:, columns]
    gain = np.linalg.solve(spread_there.T @ spread_there + len(logs) * noise, spread_there.T @ spread)
    random = np.random.default_rng(len(columns))
    met = measured + random.standard_normal(spread_there.shape) @ np.linalg.cholesky(noise).T
    return np.asarray(logs + (met - logs[:, columns]) @ gain)


@lru_cache(maxsize=3)
def possible_curves(settings: tuple[Setting, ...], loop: LoopAtFullSpeed) -> Curves:
    """Return the curves that are possible after a run at full speed, which is the first setting of each lever."""
    random = np.random.default_rng(0)
    loops = _possible_loops(loop, random)
    times: list[FloatArray] = []
    energies: list[FloatArray] = []
    for lever, group in groupby(settings, key=lambda setting: setting.lever):
        levels = np.array([float(setting.value) for setting in group])
        is_limit = lever is Lever.POWER_LIMITS
        depths = loops.depths_at_limits(levels, loop.power_w) if is_limit else loops.depths_at_locks(levels)
        for found, by_formula in (times, loops.times), (energies, loops.energies):
            logs = _interpolated(by_formula, depths) * np.exp(_DEVIATION * _smooth(levels, _ALIKE, random))
            if is_limit:
                scatter = _SCATTER * _smooth(levels, _ALIKE / 2, random)
                logs += scatter - scatter[:, :1]
            found.append(logs)
    return Curves(settings, np.concatenate([*times, *energies], axis=1))


@dataclass(frozen=True, slots=True)
class _PossibleLoops:
    """What the formulas say of each possible loop at real clocks below the one at full speed.

    Times and energies are natural logarithms, shape (curves, depths); a depth is minus the logarithm of the real clock,
    relative to that at full speed.
    """

    times: FloatArray
    energies: FloatArray
    full_speed: FloatArray
    """Real clock at full speed, relative to the highest one, shape (curves, 1)."""
    softness: FloatArray
    """How gradually a power limit binds, shape (curves, 1)."""

    def depths_at_locks(self, clocks_mhz: FloatArray) -> FloatArray:
        """Return the depths under clock locks, of which the first is no lower than the clock at full speed."""
        return np.asarray(np.maximum(0.0, np.log(clocks_mhz[0] / clocks_mhz) + np.log(self.full_speed)))

    def depths_at_limits(self, limits_w: FloatArray, power_w: float) -> FloatArray:
        """Return the depths under power limits, of which the first one is in force at full speed, at this power."""
        powers = np.minimum.accumulate(self.energies - self.times, axis=1)
        excess = self.softness * np.logaddexp(0, np.log(power_w / limits_w) / self.softness)
        return np.stack([_depths_where(powers, excess[:, 0] - ratio) for ratio in excess.T], axis=1)


def _possible_loops(loop: LoopAtFullSpeed, random: np.random.Generator) -> _PossibleLoops:
    """Return loops whose parameters are drawn at random."""

    def uniform(low: float, high: float) -> FloatArray:
        return random.uniform(low, high, (_NUM_CURVES, 1))

    computing = uniform(_LEAST_COMPUTING_SHARE, 1.0)
    waiting = np.exp(uniform(np.log(_LEAST_SCALING_SHARE), 0.0))
    scaling = np.where(uniform(0, 1) < _COMPUTING_CHANCE, computing, waiting) * loop.working_share
    exponent = uniform(*_EXPONENTS)

    usual_static_w = STATIC_W if loop.power_limit_w is None else _STATIC_OF_LIMIT * loop.power_limit_w
    static_w = usual_static_w * np.exp(_STATIC_SIGMA * random.standard_normal((_NUM_CURVES, 1)))
    static = np.minimum(static_w / max(loop.power_w, 1.0), _MOST_STATIC_SHARE)
    constant = (1 - static) * (1 - scaling) * uniform(0, _MOST_CONSTANT_SHARE)

    knee, top_voltage = uniform(*_KNEES), uniform(*_VOLTAGES)
    is_at_limit = loop.power_limit_w is not None and loop.power_w > _AT_LIMIT_RATIO * loop.power_limit_w
    is_capped = uniform(0, 1) < (_AT_LIMIT_CHANCE if is_at_limit else _CAPPED_CHANCE)
    full_speed = np.where(is_capped, uniform(_LEAST_CAPPED_CLOCK, 1.0), 1.0)
    if loop.sustained_ratio < 1.0:
        full_speed = np.minimum(loop.sustained_ratio * np.exp(SUSTAINED_ERROR * uniform(-1, 1)), 1.0)

    depths = np.linspace(0.0, _MOST_DEPTH, _NUM_DEPTHS)
    times = np.log1p(scaling * np.expm1(exponent * depths)) / exponent
    voltages = _voltage(full_speed * np.exp(-depths), knee, top_voltage) / _voltage(full_speed, knee, top_voltage)
    energies = np.log(static * np.exp(times) + constant + (1 - static - constant) * np.square(voltages))
    return _PossibleLoops(times, energies, full_speed, softness=np.exp(uniform(*np.log(_SOFTNESS))))


def _voltage(clock: FloatArray, knee: FloatArray, top: FloatArray) -> FloatArray:
    """Return the voltage at clocks relative to the highest one: 1 up to the knee, then linear up to the top."""
    return np.asarray(1 + (top - 1) * np.maximum(0.0, clock - knee) / (1 - knee))


def _smooth(levels: FloatArray, length: float, random: np.random.Generator) -> FloatArray:
    """Return random functions of settings, of size 1 and alike over a ratio of levels, shape (curves, levels)."""
    logs = np.log(levels)
    alike = np.exp(-0.5 * np.square((logs[:, None] - logs) / length)) + 1e-6 * np.eye(len(logs))
    return np.asarray(random.standard_normal((_NUM_CURVES, len(logs))) @ np.linalg.cholesky(alike).T)


def _interpolated(values: FloatArray, depths: FloatArray) -> FloatArray:
    """Return the values of each loop at depths of its own."""
    places = depths / _MOST_DEPTH * (_NUM_DEPTHS - 1)
    before = np.clip(places.astype(int), 0, _NUM_DEPTHS - 2)
    low, high = np.take_along_axis(values, before, axis=1), np.take_along_axis(values, before + 1, axis=1)
    return np.asarray(low + (places - before) * (high - low))


def _depths_where(falling: FloatArray, values: FloatArray) -> FloatArray:
    """Return the depths at which the falling functions of the loops reach one value each."""
    after = np.clip(np.sum(falling > values[:, None], axis=1), 1, _NUM_DEPTHS - 1)
    loops = np.arange(len(falling))
    high, low = falling[loops, after - 1], falling[loops, after]
    share = np.clip((high - values) / np.maximum(high - low, 1e-12), 0, 1)
    return np.asarray((after - 1 + share) * _MOST_DEPTH / (_NUM_DEPTHS - 1))
