"""What a job has measured of settings that are the same on all its GPUs, also relative to full speed.

Nothing is kept between calls: plans and iterations of the view say which settings were measured, and with what result.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_high
from typing import NamedTuple

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.setting_curves import Curves, LoopAtFullSpeed, MeasuredPoint, StandardErrors, possible_curves
from gpuenergyd_policies.uniform_settings import Setting, setting_of, sustained_ratio

ITERATIONS_PER_SETTING = 2
"""Undisturbed iterations that a measurement of one setting needs."""
LEAST_TIME_ERROR, LEAST_ENERGY_ERROR = 0.001, 0.003
"""Standard errors of a measured setting that repetition does not show: temperature, other programs."""
_DISTURBED = 4.0
"""Scatters of iteration times by which a median is above the quickest quarter where most iterations were disturbed, and
by which full speed differs from the baseline where it has changed."""
_NEIGHBOURS = 2
"""Iterations at full speed on each side of one at a setting, with which that is compared."""


@dataclass(frozen=True, slots=True)
class SettingMeasurement:
    """Time and energy of the undisturbed iterations at one setting."""

    time_s: float
    """Median time of an iteration; that of the quickest quarter where most were disturbed, which makes one longer."""
    energy_j: float | None
    """Median energy of an iteration; None if it was not measured."""
    num_iterations: int


def iterations_by_setting(view: JobView) -> dict[Setting, list[IterationObservation]]:
    """Return the undisturbed iterations at each setting that has enough of them."""
    settings = {plan.plan_id: setting for plan in view.issued_plans if (setting := setting_of(plan)) is not None}
    found: dict[Setting, list[IterationObservation]] = {}
    for seen in view.observations:
        if seen.is_regular and seen.plan_id in settings:
            found.setdefault(settings[seen.plan_id], []).append(seen)
    return {setting: iterations for setting, iterations in found.items() if len(iterations) >= ITERATIONS_PER_SETTING}


def setting_measurements(view: JobView) -> dict[Setting, SettingMeasurement]:
    """Return the measurements of all settings with enough undisturbed iterations."""
    return {
        setting: _measurement(view, iterations, [_NO_CHANGE] * len(iterations))
        for setting, iterations in iterations_by_setting(view).items()
    }


class _Change(NamedTuple):
    """Time and energy of full speed at some time, relative to the baseline."""

    time_ratio: float
    energy_ratio: float


_NO_CHANGE = _Change(1.0, 1.0)


def _measurement(
    view: JobView, iterations: Sequence[IterationObservation], changes: Sequence[_Change]
) -> SettingMeasurement:
    """Return what iterations would have shown at the baseline's time and energy of full speed."""
    pairs = list(zip(iterations, changes, strict=True))
    times_s = [seen.own_time_s / change.time_ratio for seen, change in pairs]
    energies_j = [seen.energy_j / change.energy_ratio for seen, change in pairs if seen.energy_j is not None]
    disturbed_s = _DISTURBED * max(view.baseline.iteration_sigma_s, LEAST_TIME_ERROR * view.baseline.iteration_time_s)
    time_s, quiet_s = median(times_s), median_high(sorted(times_s)[: len(times_s) // 2])
    time_s = time_s if time_s - quiet_s <= disturbed_s else quiet_s
    return SettingMeasurement(time_s, median(energies_j) if energies_j else None, len(times_s))


def setting_being_measured(view: JobView) -> Setting | None:
    """Return the setting of the last plan, if that is a measurement with too few iterations so far."""
    last = view.issued_plans[-1] if view.issued_plans else None
    setting = setting_of(last) if last is not None and last.purpose is PlanPurpose.TRIAL else None
    return None if setting in iterations_by_setting(view) else setting


def tried_settings(view: JobView) -> set[Setting]:
    """Return the settings that plans have tried since trials began."""
    plans = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TRIAL and is_current(view, plan)]
    return {setting for plan in plans if (setting := setting_of(plan)) is not None}


def is_current(view: JobView, plan: ClockPlan) -> bool:
    """Return whether a plan is one of those since trials began."""
    return view.plan_id(plan.plan_id.partition("@")[0]) == plan.plan_id


def lost_iterations(view: JobView) -> float:
    """Return the time that measurements of settings have lost, in iterations at full speed."""
    measuring = {plan.plan_id for plan in view.issued_plans if plan.purpose is PlanPurpose.TRIAL}
    times_s = (seen.own_time_s for seen in view.observations if seen.plan_id in measuring)
    return sum(max(0.0, time_s / view.baseline.iteration_time_s - 1) for time_s in times_s)


def is_full_speed(setting: Setting, settings: Collection[Setting]) -> bool:
    """Return whether this is the highest setting of its lever."""
    return setting == next(other for other in settings if other.lever is setting.lever)


def energy_at_full_speed(view: JobView, settings: Collection[Setting]) -> float | None:
    """Return the energy of the baseline; a short one may have none, which is then measured as a setting."""
    if view.baseline.energy_j is not None:
        return view.baseline.energy_j
    measured = setting_measurements(view).items()
    tops = (top for setting, top in measured if setting in settings and is_full_speed(setting, settings))
    return next((top.energy_j for top in tops if top.energy_j is not None), None)


def measured_points(view: JobView, settings: Collection[Setting]) -> dict[Setting, MeasuredPoint]:
    """Return the settings slower than full speed that were measured, relative to full speed at that time."""
    baseline_s, baseline_j = view.baseline.iteration_time_s, energy_at_full_speed(view, settings)
    full_speed, points = _at_full_speed(view), {}
    for setting, iterations in iterations_by_setting(view).items():
        if setting in settings and not is_full_speed(setting, settings) and baseline_j:
            changes = [_change_around(view, iteration, full_speed, baseline_j) for iteration in iterations]
            seen = _measurement(view, iterations, changes)
            if seen.energy_j:
                errors = standard_errors(view, seen.num_iterations)
                points[setting] = MeasuredPoint(seen.time_s / baseline_s, seen.energy_j / baseline_j, errors)
    return points


def _change_around(
    view: JobView, seen: IterationObservation, full_speed: Sequence[IterationObservation], baseline_j: float
) -> _Change:
    """Return time and energy of full speed around an iteration, relative to the baseline: 1 unless they differ.

    A loop may become faster while it is measured, for instance as its data comes from a cache: then a slow setting
    takes no more time than the baseline did.
    """
    before = [other for other in full_speed if other.iteration_index < seen.iteration_index][-_NEIGHBOURS:]
    after = [other for other in full_speed if other.iteration_index > seen.iteration_index][:_NEIGHBOURS]
    baseline_s, times_s = view.baseline.iteration_time_s, [neighbour.own_time_s for neighbour in (*before, *after)]
    noise_s = max(view.baseline.iteration_sigma_s, LEAST_TIME_ERROR * baseline_s) / math.sqrt(max(1, len(times_s)))
    if not times_s or abs(fmean(times_s) - baseline_s) <= _DISTURBED * noise_s:
        return _NO_CHANGE
    time_ratio = _middle(times_s[: len(before)], times_s[len(before) :]) / baseline_s
    energies_j = [[seen.energy_j for seen in side if seen.energy_j is not None] for side in (before, after)]
    return _Change(time_ratio, _middle(*energies_j) / baseline_j if any(energies_j) else time_ratio)


def _middle(before: Sequence[float], after: Sequence[float]) -> float:
    """Return the value between those before and after; without any after, a fall goes on, and a rise does not."""
    if before and not after:
        return min(fmean(before), before[-1] ** 2 / before[0])
    return fmean(fmean(side) for side in (before, after) if side)


def standard_errors(view: JobView, num_iterations: int) -> StandardErrors:
    """Return those of the median time and energy of so many iterations, by the scatter of all at full speed."""
    full_speed = _at_full_speed(view)
    baseline_sigma = view.baseline.iteration_sigma_s / view.baseline.iteration_time_s
    time_sigma = max(baseline_sigma, _relative_sigma([seen.own_time_s for seen in full_speed]))
    energy_sigma = _relative_sigma([seen.energy_j for seen in full_speed if seen.energy_j is not None])
    root = math.sqrt(max(1, num_iterations))
    return StandardErrors(
        math.hypot(LEAST_TIME_ERROR, time_sigma / root), math.hypot(LEAST_ENERGY_ERROR, energy_sigma / root)
    )


def _at_full_speed(view: JobView) -> list[IterationObservation]:
    planned = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    return [seen for seen in view.observations if seen.is_regular and seen.plan_id not in planned]


def _relative_sigma(values: Sequence[float]) -> float:
    """Return the standard deviation relative to the median; 0 without values."""
    middle = median(values) if values else 0.0
    return robust_sigma(abs(value - middle) for value in values) / middle if values else 0.0


def curves_of(view: JobView, settings: tuple[Setting, ...], points: Mapping[Setting, MeasuredPoint]) -> Curves:
    """Return the curves that are possible after what was measured; the energy at full speed must be known."""
    energy_j = energy_at_full_speed(view, settings)
    assert energy_j is not None
    power_w = energy_j / view.baseline.iteration_time_s / sum(gpu.num_gpus for gpu in view.gpus)
    range_w = view.gpus[0].power_limit_range_w
    waits = [
        sum(sample.time_s * sample.count for sample in seen.instruction_samples if sample.kind.is_wait)
        / seen.own_time_s
        for seen in view.observations
        if seen.is_regular and seen.is_timed
    ]
    working_share = max(0.0, 1 - median(waits)) if waits else 1.0
    loop = LoopAtFullSpeed(power_w, None if range_w is None else range_w[1], working_share, sustained_ratio(view))
    return possible_curves(settings, loop).given(points, full_speed=standard_errors(view, view.baseline.num_iterations))
