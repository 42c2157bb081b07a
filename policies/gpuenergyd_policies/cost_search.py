"""Few-sample search of the cheapest setting of one lever: a Gaussian process over time, one over power.

Time and power change smoothly with a clock or power limit, their product and sum need not: a cost has a cliff where
time explodes, and a plateau where a limit does not bind. So time and power are modelled, each as a second-degree
polynomial of the setting with a smooth deviation, both relative to full speed in logarithms. The next setting to
measure is the one whose expected improvement of the cost is largest (Jones, Schonlau and Welch 1998), and measuring is
complete when it is below `WORTHWHILE_RATIO`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd_policies.objective import Objective
from gpuenergyd_policies.uniform_probe import Setting

MAX_PROBES = 8
"""Settings measured at most, full speed not counted: it is the baseline."""
FIRST_PROBE = 0.5
"""Where the first measurement lies between full speed and the lowest setting, on the logarithmic scale."""
_PROBES_OF_FIRST_LEVER = 5
"""Settings measured of the first of two levers."""
_POWER_PER_SPEED_EXPONENT = 2.0
"""Power falls at least with this power of the speed near full speed: a first power limit that is not too slow."""
WORTHWHILE_RATIO = 0.001
"""Expected improvement of the cost below which a further measurement is not worth its time."""
_TIME_NOISE_RATIO, _ENERGY_NOISE_RATIO = 0.003, 0.01
"""Assumed errors of a measurement: time of an iteration, and power over some seconds (V100, measured)."""
_SCALE, _DEVIATION, _SLOPE = 0.25, 0.15, 1.5
"""Kernel: distance over which a deviation is alike, its size, and the size of the polynomial's coefficients; chosen on
simulated GPUs.

Distances are shares of the range of settings; sizes are natural logarithms of ratios to full speed.
"""
_NUGGET = 1e-6
_SIGMAS_WITHIN = 1.0
"""Standard errors by which a time is below the longest one before its setting may be chosen."""
_SURE_SIGMAS = 2.0
_CLEARLY_CHEAPER_RATIO = 0.001
"""Difference of costs below which a plan in force is kept: every change costs some iterations."""

_Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Probe:
    """Time and energy of an iteration at one setting."""

    time_s: float
    energy_j: float
    num_measurements: float = 1.0
    """Measurements that they are means of: a setting that was chosen is measured on and on."""


@dataclass(frozen=True, slots=True)
class CostSearch:
    """The search over one or two levers of a job, decided anew from what has been measured."""

    objective: Objective
    levels: Mapping[Lever, Sequence[int]]
    """Of each lever in the order in which they are tried; levels are descending, and the first is full speed."""
    full_speed: Probe
    longest_s: float = math.inf
    """Iteration time that a chosen setting does not exceed."""
    num_gpus: int = 1

    def next_setting(self, probes: Mapping[Setting, Probe]) -> Setting | None:
        """Return the next setting to measure; None when measuring is complete."""
        best_cost = self._full_speed_cost
        for k, (lever, levels) in enumerate(self.levels.items()):
            measured = self._measured(lever, probes)
            most = _PROBES_OF_FIRST_LEVER if k == 0 and len(self.levels) > 1 else MAX_PROBES
            if len(probes) < MAX_PROBES and len(measured) <= most:
                level = next_probe(
                    levels,
                    measured,
                    self.objective,
                    first_level=self._first_level(lever, probes),
                    longest_s=self.longest_s,
                    best_cost=best_cost,
                )
                if level is not None:
                    return Setting(lever, level)
            best_cost = min(best_cost, self._cheapest(lever, probes)[1])
        return None

    def best(self, probes: Mapping[Setting, Probe], *, current: Setting | None = None) -> tuple[Setting | None, float]:
        """Return the setting of least cost and by how much it is below full speed; None for full speed itself.

        The `current` one stays unless another is clearly cheaper, or it is too slow.
        """
        found = {}
        for lever, levels in self.levels.items():
            level, cost = self._cheapest(lever, probes)
            if level != levels[0] and cost < self._full_speed_cost:
                found[Setting(lever, level)] = cost
        if not found:
            return None, 0.0
        best = min(found, key=lambda setting: found[setting])
        if current is not None and current in probes and current.lever in self.levels:
            own = estimates(self.levels[current.lever], self._measured(current.lever, probes), self.objective)
            kept = own[current.value]
            if kept.is_within(self.longest_s) and kept.cost <= (1 + _CLEARLY_CHEAPER_RATIO) * found[best]:
                best, found[current] = current, kept.cost
        return best, 1 - found[best] / self._full_speed_cost

    @property
    def _full_speed_cost(self) -> float:
        return self.objective.cost(self.full_speed.time_s, self.full_speed.energy_j)

    def _measured(self, lever: Lever, probes: Mapping[Setting, Probe]) -> dict[int, Probe]:
        levels = self.levels[lever]
        own = {s.value: probe for s, probe in probes.items() if s.lever is lever and s.value in levels}
        return {**own, levels[0]: self.full_speed}

    def _cheapest(self, lever: Lever, probes: Mapping[Setting, Probe]) -> tuple[int, float]:
        measured = self._measured(lever, probes)
        return cheapest(self.levels[lever], measured, self.objective, longest_s=self.longest_s)

    def _first_level(self, lever: Lever, probes: Mapping[Setting, Probe]) -> float:
        """Return a level that should be fast enough; of power limits not below the mean power of the best clock."""
        top, permitted_ratio = self.levels[lever][0], self.full_speed.time_s / self.longest_s
        if lever is Lever.CLOCKS:
            return top * permitted_ratio
        mean_w = self.full_speed.energy_j / self.full_speed.time_s / self.num_gpus
        fast_w = min(mean_w, top) * math.pow(permitted_ratio, _POWER_PER_SPEED_EXPONENT)
        if Lever.CLOCKS not in self.levels:
            return fast_w
        best = self._measured(Lever.CLOCKS, probes)[self._cheapest(Lever.CLOCKS, probes)[0]]
        return max(fast_w, best.energy_j / best.time_s / self.num_gpus)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Time and cost of an iteration at one level, with the standard errors of their logarithms."""

    time_s: float
    time_error: float
    cost: float
    cost_error: float

    def is_within(self, longest_s: float) -> bool:
        """Return whether an iteration is probably no longer than this; half of those just as long are longer."""
        return self.time_s * math.exp(_SIGMAS_WITHIN * self.time_error) <= longest_s


def next_probe(
    levels: Sequence[int],
    measured: Mapping[int, Probe],
    objective: Objective,
    *,
    first_level: float = 0.0,
    longest_s: float = math.inf,
    best_cost: float = math.inf,
) -> int | None:
    """Return the level to measure next; None when measuring is complete.

    `levels` are in descending order, and the first one is full speed, which must be measured. The first probe is not
    below `first_level`. Iterations may not take longer than `longest_s`; `best_cost` is that of another lever.
    """
    unmeasured = [level for level in levels if level not in measured]
    if not unmeasured:
        return None
    if len(measured) == 1:
        wanted = (1 - FIRST_PROBE) * math.log(levels[0]) + FIRST_PROBE * math.log(levels[-1])
        wanted = max(wanted, math.log(max(first_level, levels[-1])))
        return min(unmeasured, key=lambda level: abs(math.log(level) - wanted))
    found = estimates(levels, measured, objective)
    permitted = [found[level].cost for level in measured if found[level].time_s <= longest_s]
    best = math.log(min([best_cost, *permitted]))
    gains = {}
    for level in unmeasured:
        if _least_time_s(level, levels[0], measured) > longest_s:
            continue
        own = found[level]
        is_fast_enough = NormalDist().cdf(math.log(longest_s / own.time_s) / own.time_error)
        gains[level] = is_fast_enough * _expected_improvement(best - math.log(own.cost), own.cost_error)
    chosen = max(gains, key=lambda level: gains[level], default=None)
    return chosen if chosen is not None and gains[chosen] >= WORTHWHILE_RATIO else None


def _least_time_s(level: int, top: int, measured: Mapping[int, Probe]) -> float:
    """Return a lower bound of the time at a level from the lowest level measured so far, with its error subtracted.

    Log time is convex in the logarithm of a clock, because parts that scale with it and parts that do not add up.
    """
    lowest, full_speed_s = min(measured), measured[top].time_s
    if level >= lowest or lowest == top:
        return 0.0
    slower = math.log(measured[lowest].time_s / full_speed_s) - _SURE_SIGMAS * _TIME_NOISE_RATIO
    return full_speed_s * math.exp(max(0.0, slower) * math.log(top / level) / math.log(top / lowest))


def cheapest(
    levels: Sequence[int], measured: Mapping[int, Probe], objective: Objective, *, longest_s: float = math.inf
) -> tuple[int, float]:
    """Return the measured level of least cost that is fast enough, and its cost: smoothed over all measurements.

    Full speed is always fast enough.
    """
    found = estimates(levels, measured, objective)
    permitted = [level for level in measured if level == levels[0] or found[level].is_within(longest_s)]
    chosen = min(permitted, key=lambda level: found[level].cost)
    return chosen, found[chosen].cost


def estimates(levels: Sequence[int], measured: Mapping[int, Probe], objective: Objective) -> dict[int, Estimate]:
    """Return time and cost of each level, smoothed over all measurements."""
    full_speed = measured[levels[0]]
    power_w = full_speed.energy_j / full_speed.time_s
    span = max(math.log(levels[0] / levels[-1]), 1e-9)
    x_all = np.array([math.log(levels[0] / level) / span for level in levels])
    x = np.array([math.log(levels[0] / level) / span for level in measured])
    probes = list(measured.values())
    times = np.array([math.log(own.time_s / full_speed.time_s) for own in probes])
    powers = np.array([math.log(own.energy_j / own.time_s / power_w) for own in probes])
    shares = 1 / np.array([own.num_measurements for own in probes])
    time_log, time_variance = _predict(x, times, shares * _TIME_NOISE_RATIO**2, x_all)
    power_log, power_variance = _predict(x, powers, shares * (_TIME_NOISE_RATIO**2 + _ENERGY_NOISE_RATIO**2), x_all)
    found = {}
    for k, level in enumerate(levels):
        time_s = full_speed.time_s * math.exp(time_log[k])
        energy_j = time_s * power_w * math.exp(power_log[k])
        by_time, by_power = objective.elasticities(time_s, energy_j)
        cost_error = math.sqrt(by_time**2 * time_variance[k] + by_power**2 * power_variance[k])
        found[level] = Estimate(time_s, math.sqrt(time_variance[k]), objective.cost(time_s, energy_j), cost_error)
    return found


def _predict(x: _Vector, y: _Vector, noise: _Vector, at: _Vector) -> tuple[_Vector, _Vector]:
    """Return mean and variance of a Gaussian process that is zero at full speed; `noise` are variances."""
    factor = np.linalg.cholesky(_kernel(x, x) + np.diag(noise + _NUGGET))
    weights = np.linalg.solve(factor.T, np.linalg.solve(factor, y))
    cross = _kernel(at, x)
    explained = np.linalg.solve(factor, cross.T)
    variance = np.diag(_kernel(at, at)) - np.sum(explained * explained, axis=0)
    return cross @ weights, np.maximum(variance, 1e-12)


def _kernel(a: _Vector, b: _Vector) -> _Vector:
    distance = (a[:, None] - b[None, :]) / _SCALE
    smooth = _DEVIATION**2 * np.exp(-0.5 * distance**2)
    return smooth + _SLOPE**2 * (np.outer(a, b) + np.outer(a**2, b**2)) + _NUGGET


def _expected_improvement(gain: float, error: float) -> float:
    normal, z = NormalDist(), gain / error
    return gain * normal.cdf(z) + error * normal.pdf(z)
