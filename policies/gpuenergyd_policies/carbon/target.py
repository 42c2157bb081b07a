"""The carbon target of one job: receding-horizon control from its frontier, budget account and a forecast.

A job with a known number of iterations may spend its whole budget at any time before its end. Without one, the budget
is kept per window: the work of a window earns it, and it must balance by the window's end, ensured by the same limit of
the controller.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

import numpy as np

from gpuenergyd.core.carbon.intensity import HOUR, HourlySeries, IntensityBasis, intensity_now, same_hour_mean
from gpuenergyd.core.policy_api.policy import TargetDecision, TargetView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_policies.carbon.budget import MAX_SIGNAL, Array, SpeedHull, clamped_speed, next_speed, speed_hull

HORIZON_HOURS = 168
"""Hours planned one by one; the time after them is one slot of average intensity."""
RESERVE_RATIO = 1e-3
"""Share of the remaining time kept as a reserve for the variation of iteration times."""
LEAST_CHANGE_RATIO = 2e-3
"""Change of speed below which the present target is kept."""
_ACTIVE_AT_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class _Account:
    """Remaining work, and the active time for it."""

    remaining_iterations: float
    remaining_s: float


def decide(view: TargetView) -> TargetDecision:
    """Return the target until the next decision, with its reason."""
    constant = PerformanceTarget(view.max_slowdown_ratio, straggler_time_s=view.straggler_time_s)
    here = intensity_now(view.now_at, _non_negative(view), view.forecast)
    value = here.carbon_intensity_g_per_kwh
    if not view.frontier:
        return TargetDecision(constant, "constant slowdown: no frontier is known yet", here.basis, value)
    hull = speed_hull([(p.iteration_time_s, p.energy_j) for p in view.frontier], view.host_power_w)
    full_time_s = max(view.full_speed_time_s or view.baseline.iteration_time_s, hull.min_time_s)
    limit_s = max(full_time_s, view.straggler_time_s or 0.0)
    hull = hull.limited_to(1.0 / limit_s)
    fastest = min(1.0 / full_time_s, hull.full_speed_per_s)
    account = _account(view)
    lengths = _slots(view.now_at, account.remaining_s * (1.0 - RESERVE_RATIO))
    needed_s = account.remaining_iterations / fastest
    if account.remaining_iterations <= 0:
        return _decided(view, hull, float(hull.speeds_per_s[0]), "all iterations are done", here.basis, value)
    if not len(lengths) or needed_s >= float(lengths.sum()):
        overrun_s = max(0.0, needed_s - max(account.remaining_s, 0.0))
        return _decided(view, hull, fastest, "full speed: no slack is left", here.basis, value, overrun_s)
    even = account.remaining_iterations / float(lengths.sum())
    is_without_skill = (
        view.forecast is not None
        and view.forecast.skill is not None
        and view.forecast.skill.skill_24h_mean_ratio <= 0.0
    )
    if here.basis is IntensityBasis.NEUTRAL or is_without_skill:
        why = "the forecast has no recent skill" if is_without_skill else "no usable signal"
        speed = clamped_speed(max(even, float(hull.speeds_per_s[0])), lengths, account.remaining_iterations, fastest)
        return _decided(view, hull, speed, f"constant speed: {why}", here.basis, value)
    expected, fallback = _expected(view, len(lengths), value)
    speed = next_speed(hull, expected, fallback, lengths, account.remaining_iterations, full_speed_per_s=fastest)
    current = 1.0 / view.current_target_time_s if view.current_target_time_s else None
    if current is not None and abs(current - speed) < LEAST_CHANGE_RATIO * speed:
        speed = clamped_speed(current, lengths, account.remaining_iterations, fastest)
    unit = view.forecast.unit if view.forecast is not None else "g/kWh"
    reason = f"{value:.4g} {unit} now ({here.basis}), {float(np.mean(fallback)):.4g} on average"
    return _decided(view, hull, speed, reason, here.basis, value)


def _decided(
    view: TargetView,
    hull: SpeedHull,
    speed_per_s: float,
    reason: str,
    basis: IntensityBasis,
    intensity: float | None,
    overrun_s: float = 0.0,
) -> TargetDecision:
    time_s = 1.0 / speed_per_s
    if time_s <= hull.min_time_s * (1.0 + 1e-9):  # full speed is a slowdown of 0, whatever its present time
        target = PerformanceTarget(0.0, straggler_time_s=view.straggler_time_s)
    else:
        target = PerformanceTarget(
            view.max_slowdown_ratio, straggler_time_s=view.straggler_time_s, permitted_time_s=time_s
        )
    return TargetDecision(target, reason, basis, intensity, overrun_s)


def _account(view: TargetView) -> _Account:
    permitted_s = view.baseline.iteration_time_s * (1.0 + view.max_slowdown_ratio)
    done = float(view.num_iterations_done)
    if view.num_iterations_total is None:
        left_s = view.window_s - view.active_time_s % view.window_s
        if view.deadline_at is not None:
            left_s = min(left_s, max((view.deadline_at - view.now_at).total_seconds(), _ACTIVE_AT_LEAST_S))
        return _Account((view.active_time_s + left_s) / permitted_s - done, left_s)
    remaining = view.num_iterations_total - done
    if view.deadline_at is not None:
        return _Account(remaining, (view.deadline_at - view.now_at).total_seconds())
    return _Account(remaining, permitted_s * view.num_iterations_total - view.active_time_s)


def _slots(now_at: datetime, remaining_s: float) -> Array:
    """Return the lengths of the rest of this hour, of full hours, and of the last slot; their sum is `remaining_s`."""
    if remaining_s <= 0:
        return np.zeros(0)
    into_hour_s = now_at.timestamp() % 3600.0
    ends = 3600.0 * np.arange(1, HORIZON_HOURS + 1) - into_hour_s
    ends = np.append(ends[ends < remaining_s], remaining_s)
    return np.diff(ends, prepend=0.0)


def _expected(view: TargetView, num_slots: int, value_now: float | None) -> tuple[Array, Array]:
    """Return the forecast of each slot (NaN where it has none), and the historical means of the same hours."""
    hour_at = view.now_at.replace(minute=0, second=0, microsecond=0)
    history = _non_negative(view)
    means: dict[int, float] = {}
    if history is not None:
        for k in range(24):
            mean = same_hour_mean(history, hour_at + k * HOUR)
            means[k] = float("nan") if mean is None else mean
    expected = np.full(num_slots, np.nan)
    fallback = np.array([means.get(k % 24, float("nan")) for k in range(num_slots)])
    fallback[~(np.abs(fallback) <= MAX_SIGNAL)] = np.nan
    now = value_now if value_now is not None and 0 < value_now <= MAX_SIGNAL else 1.0
    level = float(np.nanmean(fallback)) if np.isfinite(fallback).any() else now
    fallback = np.where(np.isfinite(fallback), fallback, level)
    if num_slots > HORIZON_HOURS:
        fallback[-1] = level
    if view.forecast is not None and view.forecast.issued_at > view.now_at - timedelta(days=1):
        for k in range(min(num_slots, HORIZON_HOURS)):
            ahead = view.forecast.value_at(hour_at + k * HOUR)
            if ahead is not None:
                expected[k] = max(0.0, ahead)
    if value_now is not None:
        expected[0] = expected[0] if np.isfinite(expected[0]) else max(0.0, value_now)
    return expected, fallback


def _non_negative(view: TargetView) -> HourlySeries | None:
    """Return the history with negative prices as zero: they are no reason to use more energy than full speed."""
    history = view.history
    if history is None or all(not value < 0 for value in history.values):
        return history
    return replace(history, values=tuple(0.0 if value < 0 else value for value in history.values))
