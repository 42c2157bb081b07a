"""Which setting to measure next, and which of those measured is best: statistics of the possible curves.

Theory of operation. The *improvement* of a setting is by how much less it costs than the best one known; it differs
between the curves (`setting_curves`), and is 0 in those in which the setting is too slow or costs more. A setting is
worth measuring if its expected improvement exceeds `WORTHWHILE_RATIO` of the cost of one iteration, and also of the
extra cost of the iterations that measure it, so that measuring pays for itself within a thousand iterations. Among
these settings, a policy measures the one with the largest expected squared improvement (Schonlau, Welch and Jones
1998). The square favours settings that may be much better over those that are surely a little better, so a few
measurements go far. Measuring ends when no setting is worth it. Advice concerns other permitted slowdowns, so for
advice the policy measures the setting that tells most about their savings.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.setting_curves import Cost, Curves, FloatArray
from gpuenergyd_policies.setting_measurements import (
    ITERATIONS_PER_SETTING,
    is_full_speed,
    lost_iterations,
    standard_errors,
)
from gpuenergyd_policies.uniform_settings import Setting

ADVISED_SLOWDOWNS = (0.01, 0.02, 0.05)
MAX_PROBES = 7
"""Settings measured at most, full speed not counted: it is the baseline. On simulated GPUs with hundreds of settings
(`benchmarks/runs/cost_policy.py`, 240 searches), a seventh one lowers the cost by 0.07 ± 0.02 %, an eighth one by
0.01 ± 0.02 %."""
MOST_LOST_ITERATIONS = 1.0
"""Time that all measurements for advice may lose, in iterations at full speed."""
WORTHWHILE_RATIO = 0.001
"""Costs, times and permitted times that differ by less are equal: no further measurement is worth its time."""
_CHEAP_SLOWDOWN_RATIO = 0.02
"""A setting that is expected to be no slower than this may be measured even if it is slower than permitted."""


@dataclass(frozen=True, slots=True)
class SettingSearch:
    """The search among the settings of possible curves."""

    curves: Curves
    cost: Cost | None = None
    """What is minimized; None: energy."""
    permitted: Collection[Setting] = ()
    """Settings that are fast enough."""
    longest_ratio: float = math.inf
    """Iteration time relative to full speed that a chosen setting does not exceed."""

    def next_setting(self, tried: Collection[Setting]) -> Setting | None:
        """Return the setting to measure next, none of those `tried`; None when measuring is complete."""
        if len(tried) >= MAX_PROBES:
            return None
        settings, times, costs = self.curves.settings, self.curves.times, self.curves.costs(self.cost)
        is_open = np.array([setting not in tried and not is_full_speed(setting, settings) for setting in settings])
        is_open &= times.mean(axis=0) <= max(self.longest_ratio, 1 + _CHEAP_SLOWDOWN_RATIO)
        best = self.best()
        least_cost = costs[:, 0 if best is None else settings.index(best)].mean()
        prices = ITERATIONS_PER_SETTING * np.maximum(0.0, costs.mean(axis=0) - least_cost)
        is_fast_enough = times <= self.longest_ratio * (1 + WORTHWHILE_RATIO)
        improvements = np.where(is_open & is_fast_enough, np.maximum(0.0, least_cost - costs), 0.0)
        expected = improvements.mean(axis=0)
        is_worth_it = expected > WORTHWHILE_RATIO * (least_cost + prices) if tried else expected > 0
        if not is_worth_it.any():
            return None
        return settings[int(np.argmax(np.where(is_worth_it, np.square(improvements).mean(axis=0), 0.0)))]

    def best(self, *, current: Setting | None = None) -> Setting | None:
        """Return the permitted setting of least expected cost; None for full speed itself.

        The `current` one stays unless another is clearly cheaper.
        """
        costs = self.expected_costs
        best = min(self.permitted, key=lambda own: costs[own], default=None)
        if best is None or costs[best] >= costs[self.curves.settings[0]]:
            return None
        if current is not None and current in self.permitted and costs[current] <= (1 + WORTHWHILE_RATIO) * costs[best]:
            return current
        return best

    @property
    def expected_costs(self) -> dict[Setting, float]:
        """The mean cost of each setting over the curves."""
        means = self.curves.costs(self.cost).mean(axis=0)
        return dict(zip(self.curves.settings, map(float, means), strict=True))

    def less_cost_ratio(self, setting: Setting) -> float:
        """Return by how much a setting's expected cost is below that of full speed, as a share of it."""
        costs = self.expected_costs
        return 1 - costs[setting] / costs[self.curves.settings[0]]


def can_be_advised(view: JobView) -> bool:
    """Return whether a job is a loop whose saving by more slowdown the options would claim.

    Data-parallel ranks without phases are not planned together, so that no option would claim anything.
    """
    is_loop = view.is_plain_loop or view.schedule.name == LOOP_SCHEDULE
    return is_loop and not (view.is_plain_loop and view.num_dp_ranks > 1) and view.baseline.energy_j is not None


def most_telling_setting(view: JobView, curves: Curves, tried: Collection[Setting]) -> Setting | None:
    """Return the setting whose measurement tells most about the savings to advise; None if none tells much.

    That is the variance of the savings which time and energy of the setting explain, over the possible curves. One
    measurement, with as many iterations in which a setting settles, may lose half of the time that is left for all.
    """
    if len(tried) >= MAX_PROBES or not can_be_advised(view):
        return None
    most_lost = (MOST_LOST_ITERATIONS - lost_iterations(view)) / 2
    savings = np.stack([curves.savings(np.full(len(curves.logs), ratio)) for ratio in ADVISED_SLOWDOWNS], axis=1)
    noise = np.diag(np.square(standard_errors(view, ITERATIONS_PER_SETTING)))
    explained = {}
    for k, setting in enumerate(curves.settings):
        logs = curves.logs[:, [k, k + len(curves.settings)]]
        slowdown_ratio = np.mean(np.exp(logs[:, 0])) - 1
        if setting not in tried and 2 * ITERATIONS_PER_SETTING * slowdown_ratio <= most_lost:
            explained[setting] = _explained_variance(savings, logs, noise)
    chosen = max(explained, key=lambda own: explained[own], default=None)
    return None if chosen is None or explained[chosen] < noise[1, 1] else chosen


def _explained_variance(wanted: FloatArray, measured: FloatArray, noise: FloatArray) -> float:
    """Return the variance of what is wanted that measuring with noise explains, as the mean over the wanted columns.

    Rows are draws; it is that of the linear regression of what is wanted on what is measured.
    """
    wanted, measured = wanted - wanted.mean(axis=0), measured - measured.mean(axis=0)
    shared = measured.T @ wanted / len(wanted)
    variances = measured.T @ measured / len(wanted) + noise
    return float(np.mean(np.sum(shared * np.linalg.solve(variances, shared), axis=0)))
