"""Plans with one setting on all GPUs of a job: measurements, then the best setting, or full speed; all with advice.

A loop that permits no slowdown is measured too, for a few iterations (record 97): what a slowdown would save cannot be
told from full speed. So they run at the settings that tell most about it. A loop that waits for memory all the time is
not slower at a lower clock: such a setting is kept, and compared with full speed like any plan.
"""

import math
from dataclasses import replace

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.advice import with_advice
from gpuenergyd_policies.full_speed import permits_no_slowdown, plan_at_full_speed
from gpuenergyd_policies.setting_curves import Cost
from gpuenergyd_policies.setting_search import (
    ADVISED_SLOWDOWNS,
    WORTHWHILE_RATIO,
    SettingSearch,
    being_measured,
    can_be_advised,
    curves_of,
    energy_at_full_speed,
    is_current,
    measured_points,
    most_telling,
    profiled,
    settings_of,
)
from gpuenergyd_policies.uniform_probe import (
    Setting,
    common_clocks_mhz,
    setting_measurements,
    setting_of,
    setting_plan,
)

_LEAST_SAVING_RATIO = 0.01
"""Less than this is not kept without a permitted slowdown: temperature and other programs change as much."""
_LONGEST = "longest_iteration_ratio"


def search_plan(
    view: JobView,
    settings: tuple[Setting, ...],
    *,
    policy: str,
    least: str,
    otherwise: str,
    cost: Cost | None = None,
    by_fastest: bool = False,
) -> ClockPlan:
    """Return a plan that measures the next setting, or runs the best one, or full speed.

    `least` says what the best one has least of, and `otherwise` why there is none. A setting is fast enough
    if its expected time is, by two standard errors before it is chosen, or `by_fastest`, if its fastest iteration is: a
    disturbance only makes an iteration longer.
    """
    if energy_at_full_speed(view, settings) is None:
        is_settable = not view.can_set_clocks or settings[0].value in common_clocks_mhz(view)
        if settings[0] in setting_measurements(view) or not is_settable:
            return baseline_plan(reason="no setting can be chosen: there is no energy measurement at full speed")
        return _measuring(view, settings[0], policy)
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    longest_ratio = target_s / view.baseline.iteration_time_s
    decided = [plan for plan in view.issued_plans if _is_decided(view, plan, longest_ratio)]
    if decided and not decided[-1].ranks:
        return replace(plan_at_full_speed(view, otherwise, cost=cost), figures=decided[-1].figures)
    points = measured_points(view, settings, by_fastest=by_fastest, least_energy_error=0.0 if by_fastest else 0.01)
    curves = curves_of(view, settings, points)
    current = setting_of(decided[-1]) if decided else None
    if by_fastest:
        permitted = {own for own, point in points.items() if point.time_ratio <= longest_ratio}
    else:
        permitted = curves.are_within(longest_ratio, sigmas=2) & points.keys()
        permitted |= curves.are_within(longest_ratio, sigmas=0) & {current}
    search = SettingSearch(curves, cost, permitted, longest_ratio)
    best = search.best(current=current)
    if not decided or (by_fastest and current not in permitted):
        tried = profiled(view) | points.keys()
        setting = being_measured(view) or search.next_setting(tried)
        if setting is None and longest_ratio < 1 + max(ADVISED_SLOWDOWNS):
            setting = most_telling(view, curves, tried)
        if setting is not None:
            return _measuring(view, setting, policy)
    if best is None:
        plan = plan_at_full_speed(view, otherwise, cost=cost)
    else:
        costs = search.expected_costs
        reason = (
            f"least {least}, {100 * (1 - costs[best] / costs[settings[0]]):.1f} % below full speed: {best} on all GPUs,"
            f" measured {points[best].time_ratio * view.baseline.iteration_time_s:.6g} s, target {target_s:.6g} s"
        )
        plan = setting_plan(view, best, PlanPurpose.TUNED, policy=policy, reason=reason)
        plan = with_advice(view, plan, cost=cost)
    return replace(plan, figures=((_LONGEST, longest_ratio),))


def _is_decided(view: JobView, plan: ClockPlan, longest_ratio: float) -> bool:
    """Return whether a plan was the best one for this permitted time."""
    decided_for = plan.figure(_LONGEST)
    return (
        decided_for is not None
        and is_current(view, plan)
        and math.isclose(decided_for, longest_ratio, rel_tol=WORTHWHILE_RATIO)
    )


def _measuring(view: JobView, setting: Setting, policy: str) -> ClockPlan:
    reason = f"measuring {setting} on all GPUs"
    return setting_plan(view, setting, PlanPurpose.PROFILE, policy=policy, reason=reason)


def plan_without_slowdown(view: JobView, reason: str) -> ClockPlan:
    """Return the next trial, else the setting that saves at full speed's time, else full speed; with advice."""
    settings = settings_of(view)
    may_try = view.may_try and can_be_advised(view) and permits_no_slowdown(view) and view.num_dp_ranks == 1
    if not may_try or not settings:
        return plan_at_full_speed(view, reason)
    points, last = measured_points(view, settings), view.issued_plans[-1].purpose if view.issued_plans else None
    if last is PlanPurpose.PROFILE or not points:
        setting = being_measured(view) or most_telling(view, curves_of(view, settings, points), profiled(view))
        if setting is not None:
            why = f"measuring what a permitted slowdown would save: {setting} for a few iterations"
            return setting_plan(view, setting, PlanPurpose.PROFILE, policy="advice", reason=why)
    free = {own: point.energy_ratio for own, point in points.items() if point.time_ratio <= 1 + WORTHWHILE_RATIO}
    setting = min(free, key=lambda own: free[own], default=None)
    if setting is None or free[setting] > 1 - _LEAST_SAVING_RATIO:
        return plan_at_full_speed(view, reason)
    why = f"{setting} on all GPUs took no more time than full speed in its trial: this loop seems to wait for memory"
    return with_advice(view, setting_plan(view, setting, PlanPurpose.TUNED, policy="advice", reason=why))
