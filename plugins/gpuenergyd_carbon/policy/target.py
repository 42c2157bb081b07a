"""Target policies: a constant slowdown, and the carbon target, by receding-horizon control.

The controller knows the frontier of a job, its budget account and a forecast.
A job with a known number of iterations may spend its whole budget at any time before its end. Without one, the budget
applies per window: the work of a window earns it, and the account must balance by the window's end. The controller's
limit on speed ensures both.
"""

import math
from dataclasses import replace
from datetime import datetime, timedelta

import numpy as np

from gpuenergyd.core.carbon.intensity import HOUR
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetDecision, TargetView
from gpuenergyd_carbon.policy.budget import SLOT_S, Array, SpeedHull, clamped_speed, next_speed, repaired, speed_hull
from gpuenergyd_carbon.policy.history import DAY_HOURS, WEEK_HOURS
from gpuenergyd_carbon.rules.present_intensity import IntensityNow, intensity_now, same_hour_mean

HORIZON_HOURS = WEEK_HOURS
"""Number of hours planned one by one; the time after them is one slot of average intensity."""
RESERVE_RATIO = 1e-3
"""Share of the remaining time kept as a reserve for varying iteration times."""
LEAST_CHANGE_RATIO = 2e-3
"""Smaller changes of speed keep the present target."""


class ConstantSlowdown:
    """Spends the slowdown budget evenly over time; the default target, and the reference for other policies."""

    def next_target(self, view: TargetView) -> PerformanceTarget:
        """Return the slowdown budget, or the pace of a straggler."""
        return PerformanceTarget(view.max_slowdown_ratio, straggler_time_s=view.straggler_time_s)


class CarbonTarget:
    """Minimises emissions, or any other hourly cost of energy, within the job's slowdown budget and deadline.

    It keeps no state, because the view contains everything that it needs.
    """

    def next_target(self, view: TargetView) -> PerformanceTarget:
        """Return the target until the next call."""
        return decide(view).target

    def explain(self, view: TargetView) -> TargetDecision:
        """Return the same target with its reason and the intensity behind it."""
        return decide(view)


def decide(view: TargetView) -> TargetDecision:
    """Return the target until the next decision, with its reason."""
    target = PerformanceTarget(view.max_slowdown_ratio, straggler_time_s=view.straggler_time_s)
    here = intensity_now(view.now_at, view.history, view.forecast)
    value = here.carbon_intensity_g_per_kwh
    if not view.frontier:
        return TargetDecision(target, "constant slowdown: no frontier is known yet", here.basis, value)
    hull = speed_hull([(p.iteration_time_s, p.energy_j) for p in view.frontier], view.host_power_w)
    full_time_s = max(view.full_speed_time_s or view.baseline.iteration_time_s, 1.0 / hull.full_speed_per_s)
    hull = hull.limited_to(1.0 / max(full_time_s, view.straggler_time_s or 0.0))
    fastest = min(1.0 / full_time_s, hull.full_speed_per_s)
    speed, reason, overrun_s = _decided_speed(view, hull, fastest, here)
    if speed >= hull.full_speed_per_s * (1.0 - 1e-9):  # full speed is a slowdown of 0, whatever its present time
        target = replace(target, max_slowdown_ratio=0.0)
    else:
        target = replace(target, permitted_time_s=1.0 / speed)
    return TargetDecision(target, reason, here.basis, value, overrun_s)


def _decided_speed(view: TargetView, hull: SpeedHull, fastest: float, here: IntensityNow) -> tuple[float, str, float]:
    """Return the speed until the next decision, its reason, and the time by which even full speed misses the budget."""
    remaining_iterations, remaining_s = _account(view)
    lengths = _slots(view.now_at, remaining_s * (1.0 - RESERVE_RATIO))
    needed_s = remaining_iterations / fastest
    slowest = float(hull.speeds_per_s[0])
    if remaining_iterations <= 0:
        return slowest, "all iterations are done", 0.0
    if not len(lengths) or needed_s >= float(lengths.sum()):
        return fastest, "full speed: no slack is left", max(0.0, needed_s - max(remaining_s, 0.0))
    forecast, value = view.forecast, here.carbon_intensity_g_per_kwh
    skill = forecast.skill if forecast is not None else None
    is_without_skill = skill is not None and skill.skill_24h_mean_ratio <= 0.0
    if value is None or is_without_skill:
        why = "the forecast has no recent skill" if is_without_skill else "no usable signal"
        even = max(remaining_iterations / float(lengths.sum()), slowest)
        return clamped_speed(even, lengths, remaining_iterations, fastest), f"constant speed: {why}", 0.0
    expected, fallback = _expected(view, len(lengths), value)
    speed = next_speed(hull, expected, fallback, lengths, remaining_iterations, full_speed_per_s=fastest)
    current = 1.0 / view.current_target_time_s if view.current_target_time_s else math.inf
    if abs(current - speed) < LEAST_CHANGE_RATIO * speed:
        speed = clamped_speed(current, lengths, remaining_iterations, fastest)
    unit = forecast.unit if forecast is not None else "g/kWh"
    average = float(repaired(expected, fallback).mean())
    return speed, f"{value:.4g} {unit} now ({here.basis}), {average:.4g} on average", 0.0


def _account(view: TargetView) -> tuple[float, float]:
    """Return the remaining iterations, and the active time left for them."""
    permitted_s = view.baseline.iteration_time_s * (1.0 + view.max_slowdown_ratio)
    until_deadline_s = math.inf if view.deadline_at is None else (view.deadline_at - view.now_at).total_seconds()
    if view.num_iterations_total is None:
        left_s = min(view.window_s - view.active_time_s % view.window_s, max(until_deadline_s, 1.0))
        return (view.active_time_s + left_s) / permitted_s - view.num_iterations_done, left_s
    by_budget_s = permitted_s * view.num_iterations_total - view.active_time_s
    left_s = by_budget_s if view.deadline_at is None else until_deadline_s
    return float(view.num_iterations_total - view.num_iterations_done), left_s


def _slots(now_at: datetime, remaining_s: float) -> Array:
    """Return the lengths of the rest of this hour, of full hours, and of a last slot; their sum is `remaining_s`."""
    if remaining_s <= 0:
        return np.zeros(0)
    ends = SLOT_S * np.arange(1, HORIZON_HOURS + 1) - now_at.timestamp() % SLOT_S
    ends = np.append(ends[ends < remaining_s], remaining_s)
    return np.diff(ends, prepend=0.0)


def _expected(view: TargetView, num_slots: int, value_now: float) -> tuple[Array, Array]:
    """Return the forecast of each slot, and the historical means of the same hours; NaN where there is none.

    Negative prices are treated as zero: they do not justify using more energy than full speed.
    """
    hour_at = view.now_at.replace(minute=0, second=0, microsecond=0)
    instants = [hour_at + k * HOUR for k in range(min(num_slots, HORIZON_HOURS))]
    expected, fallback = np.full(num_slots, np.nan), np.full(num_slots, np.nan)
    if view.history is not None:
        means = [same_hour_mean(view.history, instant) for instant in instants[:DAY_HOURS]]
        fallback[: len(instants)] = np.resize(np.array(means, dtype=float), len(instants))
    if view.forecast is not None and view.forecast.issued_at > view.now_at - timedelta(days=1):
        expected[: len(instants)] = np.array([view.forecast.value_at(instant) for instant in instants], dtype=float)
    if not np.isfinite(expected[0]):
        expected[0] = value_now
    return np.maximum(expected, 0.0), np.maximum(fallback, 0.0)
