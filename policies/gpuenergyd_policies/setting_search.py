"""Search for the best setting of a job that is the same on all its GPUs: measured few at a time, chosen by the curves.

Theory of operation. No state is kept: from the settings measured so far, the possible curves (`setting_curves`) say for
each other setting by how much less it may cost, on average over the curves in which it is fast enough. The setting of
largest expected improvement is measured next (Jones, Schonlau and Welch 1998), until that is below `WORTHWHILE_RATIO`.
Then the measured setting of least expected cost runs; what its iterations show may make another one follow.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd_policies.setting_curves import Cost, Curves, FloatArray, LoopAtFullSpeed, MeasuredPoint, possible_curves
from gpuenergyd_policies.uniform_probe import (
    ITERATIONS_PER_CLOCK,
    Setting,
    common_clocks_mhz,
    common_power_limits_w,
    setting_measurements,
    setting_of,
)

ADVISED_SLOWDOWNS = (0.01, 0.02, 0.05)
MAX_PROBES, MAX_PROBES_FOR_ADVICE = 8, 6
"""Settings measured at most, full speed not counted: it is the baseline; those measured for advice leave some."""
MOST_LOST_ITERATIONS = 1.0
"""Time that all measurements for advice may lose, in iterations at full speed."""
WORTHWHILE_RATIO = 0.001
"""Costs, times and permitted times that differ by less are equal: no further measurement is worth its time."""
LEAST_TIME_ERROR, LEAST_ENERGY_ERROR = 0.001, 0.003
"""Standard errors of a measured setting that repetition does not show: temperature, other programs."""
_CHEAP_SLOWDOWN_RATIO = 0.02
"""A setting that is probably not slower than this may be measured even if it is slower than permitted."""
_LOWEST_CLOCK_RATIO = 0.4
"""Share of the highest clock below which time grows faster than power falls on every GPU measured so far."""


def settings_of(view: JobView, *, with_limits: bool = False) -> tuple[Setting, ...]:
    """Return the settings that may be chosen, of each lever from full speed down.

    Power limits are only among them where clocks may not be set, or where `with_limits` asks for both.
    """
    found: list[Setting] = []
    if view.can_set_clocks and (clocks_mhz := common_clocks_mhz(view)):
        top_mhz = max(mhz for gpu in view.gpus for mhz in gpu.supported_sm_clocks_mhz)
        useful = [mhz for mhz in clocks_mhz if _LOWEST_CLOCK_RATIO * top_mhz <= mhz < top_mhz]
        found += [Setting(Lever.CLOCKS, mhz) for mhz in [top_mhz, *useful] if useful]
    if with_limits or not view.can_set_clocks:
        limits_w = common_power_limits_w(view)
        found += [Setting(Lever.POWER_LIMITS, limit_w) for limit_w in limits_w if len(limits_w) > 1]
    return tuple(found)


def energy_at_full_speed(view: JobView, settings: Collection[Setting]) -> float | None:
    """Return the energy of the baseline; a short one may have none, which is then measured as a setting."""
    if view.baseline.energy_j is not None:
        return view.baseline.energy_j
    measured = setting_measurements(view)
    own = (measured[top].energy_j for top in settings if top in measured and is_full_speed(top, settings))
    return next((energy_j for energy_j in own if energy_j is not None), None)


def is_full_speed(setting: Setting, settings: Collection[Setting]) -> bool:
    """Return whether this is the highest setting of its lever."""
    return setting == next(own for own in settings if own.lever is setting.lever)


def measured_points(
    view: JobView, settings: Collection[Setting], *, by_fastest: bool = False, least_energy_error: float = 0.0
) -> dict[Setting, MeasuredPoint]:
    """Return the settings slower than full speed that were measured; `by_fastest`, by their fastest iteration.

    The errors of their energies are at least `least_energy_error`.
    """
    baseline_s, baseline_j = view.baseline.iteration_time_s, energy_at_full_speed(view, settings)
    return {
        setting: MeasuredPoint(
            (seen.iteration_time_s if by_fastest else seen.median_time_s) / baseline_s,
            seen.energy_j / baseline_j,
            *np.maximum(errors(view, seen.num_iterations), (0.0, least_energy_error)),
        )
        for setting, seen in setting_measurements(view).items()
        if setting in settings and not is_full_speed(setting, settings) and seen.energy_j and baseline_j
    }


def curves_of(view: JobView, settings: tuple[Setting, ...], points: Mapping[Setting, MeasuredPoint]) -> Curves:
    """Return the curves that are possible after what was measured."""
    energy_j = energy_at_full_speed(view, settings)
    assert energy_j is not None
    power_w = energy_j / view.baseline.iteration_time_s / sum(gpu.num_gpus for gpu in view.gpus)
    range_w = view.gpus[0].power_limit_range_w
    waits = [_waiting_s(seen) / seen.own_time_s for seen in view.observations if seen.is_regular and seen.is_timed]
    working = max(0.1, 1 - median(waits)) if waits else 1.0
    loop = LoopAtFullSpeed(power_w, None if range_w is None else range_w[1], working)
    return possible_curves(settings, loop).given(points, full_speed=errors(view, view.baseline.num_iterations))


def _waiting_s(seen: IterationObservation) -> float:
    return sum(sample.time_s * sample.count for sample in seen.instruction_samples if sample.kind.is_wait)


def errors(view: JobView, num_iterations: int) -> tuple[float, float]:
    """Return the standard errors of the median time and energy of so many iterations, relative to full speed."""
    root = math.sqrt(max(1, num_iterations))
    planned = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    seen = [o.energy_j for o in view.observations if o.is_regular and o.plan_id not in planned]
    energies_j = [energy_j for energy_j in seen if energy_j is not None]
    energy_sigma = 0.0
    if len(energies_j) >= 3:
        middle = median(energies_j)
        energy_sigma = robust_sigma(abs(energy_j - middle) for energy_j in energies_j) / middle
    time_sigma = view.baseline.iteration_sigma_s / view.baseline.iteration_time_s
    return math.hypot(LEAST_TIME_ERROR, time_sigma / root), math.hypot(LEAST_ENERGY_ERROR, energy_sigma / root)


def being_measured(view: JobView) -> Setting | None:
    """Return the setting of the last plan, if that is a measurement, until there are enough iterations."""
    last = view.issued_plans[-1] if view.issued_plans else None
    setting = setting_of(last) if last is not None and last.purpose is PlanPurpose.PROFILE else None
    return None if setting in setting_measurements(view) else setting


def profiled(view: JobView) -> set[Setting]:
    """Return the settings that plans have measured since profiling began."""
    plans = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.PROFILE and is_current(view, plan)]
    return {setting for plan in plans if (setting := setting_of(plan)) is not None}


def is_current(view: JobView, plan: ClockPlan) -> bool:
    """Return whether a plan is one of those since profiling began."""
    return view.plan_id(plan.plan_id.partition("@")[0]) == plan.plan_id


@dataclass(frozen=True, slots=True)
class SettingSearch:
    """The search among the settings of possible curves."""

    curves: Curves
    cost: Cost | None = None
    """What is minimized; None: energy."""
    permitted: Collection[Setting] = ()
    """Settings that were measured and are fast enough."""
    longest_ratio: float = math.inf
    """Iteration time relative to full speed that a chosen setting does not exceed."""

    def next_setting(self, tried: Collection[Setting]) -> Setting | None:
        """Return the setting to measure next, none of those `tried`; None when measuring is complete."""
        if len(tried) >= MAX_PROBES:
            return None
        settings, times = self.curves.settings, self.curves.times
        costs = self._costs
        best = self.best()
        reference = costs[:, 0 if best is None else settings.index(best)].mean()
        better = np.maximum(0.0, reference - costs) * (times <= self.longest_ratio * (1 + WORTHWHILE_RATIO))
        is_open = np.median(times, axis=0) <= max(self.longest_ratio, 1 + _CHEAP_SLOWDOWN_RATIO)
        is_open &= np.array([own not in tried and not is_full_speed(own, settings) for own in settings])
        gains = np.where(is_open, better.mean(axis=0) / reference, 0.0)
        chosen = int(np.argmax(gains))
        return settings[chosen] if gains[chosen] >= WORTHWHILE_RATIO else None

    def best(self, *, current: Setting | None = None) -> Setting | None:
        """Return the permitted setting of least expected cost; None for full speed itself.

        The `current` one stays unless another is clearly cheaper.
        """
        costs = self.expected_costs
        best = min(self.permitted, key=lambda own: costs[own], default=None)
        if best is None or costs[best] >= costs[self.curves.settings[0]]:
            return None
        if current is not None and current in self.permitted and costs[current] <= (1 + WORTHWHILE_RATIO) * costs[best]:
            best = current
        return best

    @property
    def expected_costs(self) -> dict[Setting, float]:
        """The mean cost of each setting over the curves."""
        return dict(zip(self.curves.settings, map(float, self._costs.mean(axis=0)), strict=True))

    @property
    def _costs(self) -> FloatArray:
        return self.curves.costs(self.cost)


def can_be_advised(view: JobView) -> bool:
    """Return whether a job is a loop whose saving by more slowdown the options would claim.

    Data-parallel ranks without phases are not planned together, so that no option would claim anything.
    """
    is_loop = view.is_plain_loop or view.schedule.name == LOOP_SCHEDULE
    return is_loop and not (view.is_plain_loop and view.num_dp_ranks > 1) and view.baseline.energy_j is not None


def most_telling(view: JobView, curves: Curves, tried: Collection[Setting]) -> Setting | None:
    """Return the setting whose measurement tells most about the savings; None if none tells much.

    That is the variance of the savings which time and energy of the setting explain, over the possible curves. One
    measurement, with as many iterations in which a setting settles, may lose half of the time that is left for all.
    """
    affordable = MOST_LOST_ITERATIONS - _lost_iterations(view)
    if len(tried) >= MAX_PROBES_FOR_ADVICE or not can_be_advised(view):
        return None
    count = len(curves.logs)
    saved = np.stack([curves.savings(np.full(count, ratio)) for ratio in ADVISED_SLOWDOWNS], axis=1)
    saved -= saved.mean(axis=0)
    noise = np.diag(np.square(errors(view, ITERATIONS_PER_CLOCK)))
    told = {}
    for k, setting in enumerate(curves.settings):
        own = curves.logs[:, [k, k + len(curves.settings)]]
        slowdown_ratio = np.mean(np.exp(own[:, 0])) - 1
        if setting not in tried and 0 < 2 * ITERATIONS_PER_CLOCK * slowdown_ratio <= affordable / 2:
            told[setting] = _explained(saved, own - own.mean(axis=0), noise)
    chosen = max(told, key=lambda own: told[own], default=None)
    return None if chosen is None or told[chosen] < noise[1, 1] else chosen


def _explained(wanted: FloatArray, seen: FloatArray, noise: FloatArray) -> float:
    """Return the mean variance of what is wanted that is explained by what is seen with noise."""
    shared = seen.T @ wanted / len(seen)
    return float(np.mean(np.sum(shared * np.linalg.solve(seen.T @ seen / len(seen) + noise, shared), axis=0)))


def _lost_iterations(view: JobView) -> float:
    """Return the time that measurements have lost, in iterations at full speed."""
    measuring = {plan.plan_id for plan in view.issued_plans if plan.purpose is PlanPurpose.PROFILE}
    lost = (o.own_time_s / view.baseline.iteration_time_s - 1 for o in view.observations if o.plan_id in measuring)
    return sum(max(0.0, own) for own in lost)
