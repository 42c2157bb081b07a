"""Trials of slower settings for loops that permit no slowdown: few iterations, for advice and for savings at no time.

What a slowdown saves cannot be told from full speed (record 97). So a few iterations run at slower clocks, or under
lower power limits, until one is as slow as the largest advised slowdown, then one near each advised one. All together
they lose less than the time of one iteration. A loop that waits for memory all the time is not slower at a lower clock:
such a setting is kept, and compared with full speed like any plan.
"""

from collections.abc import Mapping

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd_policies.advice import ADVISED_SLOWDOWNS, MEASURED_UP_TO, can_be_advised, with_advice
from gpuenergyd_policies.full_speed import permits_no_slowdown, plan_at_full_speed
from gpuenergyd_policies.uniform_probe import (
    ClockMeasurement,
    Setting,
    common_clocks_mhz,
    common_power_limits_w,
    lever_measurements,
    setting_of,
    setting_plan,
)

LEVEL_RATIOS = (0.92, 0.82, 0.72, 0.62, 0.52)
"""Levels tried, relative to the one at full speed, until one is slow enough."""
MOST_LOST_ITERATIONS = 1.0
"""Time that all trials of a job may lose, in iterations at full speed."""
_BETWEEN = (0.02, 0.01, 0.05)
"""Slowdowns near which a level is tried too, the most telling one first."""
_NEAR = (0.6, 1.6)
_MOST_ISSUED = 8
_EQUAL_TIME_RATIO = 0.001
"""Medians of times that differ by less are equal."""
_LEAST_SAVING_RATIO = 0.01
"""Less than this is not kept: temperature and other programs change the energy of an iteration by as much."""


def plan_without_slowdown(view: JobView, reason: str) -> ClockPlan:
    """Return the next trial, else the setting that saves at full speed's time, else full speed; with advice."""
    lever = Lever.CLOCKS if view.can_set_clocks else Lever.POWER_LIMITS
    levels = common_clocks_mhz(view) if view.can_set_clocks else common_power_limits_w(view)
    may_try = view.may_try and can_be_advised(view) and permits_no_slowdown(view) and view.num_dp_ranks == 1
    if not may_try or len(levels) < 2:
        return plan_at_full_speed(view, reason)
    baseline_s, baseline_j = view.baseline.iteration_time_s, view.baseline.energy_j
    assert baseline_j is not None
    measured = lever_measurements(view, lever)
    slowdowns = {levels[0]: 0.0} | {level: own.median_time_s / baseline_s - 1 for level, own in measured.items()}
    level = _being_tried(view, lever, measured) or _next_level(view, levels, slowdowns)
    if level is not None and _is_affordable(view, baseline_s):
        setting = Setting(lever, level)
        why = f"measuring what a permitted slowdown would save: {setting} for a few iterations"
        return setting_plan(view, setting, PlanPurpose.PROFILE, policy="advice", reason=why)
    free = [
        (own.energy_j, tried)
        for tried, own in measured.items()
        if own.energy_j is not None
        and slowdowns[tried] <= _EQUAL_TIME_RATIO
        and own.energy_j <= (1 - _LEAST_SAVING_RATIO) * baseline_j
    ]
    if not free:
        return plan_at_full_speed(view, reason)
    setting = Setting(lever, min(free)[1])
    why = f"{setting} on all GPUs took no more time than full speed in its trial: this loop seems to wait for memory"
    return with_advice(view, setting_plan(view, setting, PlanPurpose.TUNED, policy="advice", reason=why))


def _being_tried(view: JobView, lever: Lever, measured: Mapping[int, ClockMeasurement]) -> int | None:
    """Return the level of the last trial until it has been measured."""
    last = view.issued_plans[-1] if view.issued_plans else None
    setting = setting_of(last) if last is not None and last.purpose is PlanPurpose.PROFILE else None
    return setting.value if setting is not None and setting.lever is lever and setting.value not in measured else None


def _next_level(view: JobView, levels: list[int], slowdowns: Mapping[int, float]) -> int | None:
    """Return the next level to try; None if enough is known. `levels` are descending."""
    needed = MEASURED_UP_TO * max(ADVISED_SLOWDOWNS)
    issued = {setting.value for plan in view.issued_plans if (setting := setting_of(plan)) is not None}
    if len(issued - {levels[0]}) >= _MOST_ISSUED:
        return None
    if max(slowdowns.values()) < needed:
        lowest = min(slowdowns)
        coarse = [min(levels, key=lambda own: abs(own - ratio * levels[0])) for ratio in LEVEL_RATIOS]
        return next((level for level in coarse if level < lowest and level not in issued), None)
    for wanted in _BETWEEN:
        if not any(_NEAR[0] * wanted <= slowdown <= _NEAR[1] * wanted for slowdown in slowdowns.values()):
            level = _level_at(wanted, levels, slowdowns)
            if level is not None and level not in issued:
                return level
    return None


def _level_at(wanted: float, levels: list[int], slowdowns: Mapping[int, float]) -> int | None:
    """Return the level between two measured ones whose slowdown is about the wanted one; None if there is none."""
    fast = min((level for level, slowdown in slowdowns.items() if slowdown < wanted), default=None)
    slow = max((level for level, slowdown in slowdowns.items() if slowdown >= wanted), default=None)
    if fast is None or slow is None or slow >= fast:
        return None
    share = (wanted - slowdowns[fast]) / (slowdowns[slow] - slowdowns[fast])
    between = [level for level in levels if slow < level < fast]
    return min(between, key=lambda level: abs(level - (fast - share * (fast - slow))), default=None)


def _is_affordable(view: JobView, baseline_s: float) -> bool:
    """Return whether the trials so far have lost less than they may."""
    trials = {plan.plan_id for plan in view.issued_plans if plan.purpose is PlanPurpose.PROFILE}
    lost_s = sum(max(0.0, seen.own_time_s - baseline_s) for seen in view.observations if seen.plan_id in trials)
    return lost_s < MOST_LOST_ITERATIONS * baseline_s
