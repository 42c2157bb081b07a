"""Plans with one setting on all GPUs of a job: measurements, then the best setting, or full speed; all with advice.

Theory of operation. A policy measures settings (`setting_search`) until no further one is worth its time. Then it
decides: it runs the best setting, measured or between measured ones, or stays at full speed. The plan says for which
permitted time it was decided: a decision stands until that time changes, or until the setting turns out too slow.

Loops that permit no slowdown are measured for a few iterations too (record 97): what a slowdown would save cannot be
told from full speed. A loop that waits for memory all the time is not slower at a lower clock: such a setting is kept.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.advice import is_time_to_review, with_advice
from gpuenergyd_policies.full_speed import permits_no_slowdown, plan_at_full_speed
from gpuenergyd_policies.setting_curves import Cost, Curves, MeasuredPoint
from gpuenergyd_policies.setting_measurements import (
    curves_of,
    energy_at_full_speed,
    is_current,
    measured_points,
    setting_being_measured,
    setting_measurements,
    tried_settings,
)
from gpuenergyd_policies.setting_search import (
    ADVISED_SLOWDOWNS,
    WORTHWHILE_RATIO,
    SettingSearch,
    can_be_advised,
    most_telling_setting,
)
from gpuenergyd_policies.uniform_settings import Setting, common_clocks_mhz, setting_of, setting_plan, settings_of

_SIGMAS_TO_CHOOSE = 1.0
"""Standard errors by which a time must be within the permitted one before its setting is chosen."""
_LEAST_SAVING_RATIO = 0.01
"""Less than this is not kept without a permitted slowdown: temperature and other programs change as much."""
_LONGEST = "longest_iteration_ratio"
"""Figure of a plan that was decided: the permitted iteration time, relative to full speed."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a policy searches a setting for, and how it says so in its plans."""

    policy: str
    least: str
    """What the best setting has least of."""
    otherwise: str
    """Why full speed is kept if no setting is better."""
    cost: Cost | None = None
    """What is minimized; None: energy."""
    as_measured: bool = False
    """Whether a setting that was measured needs no standard error to spare, at the first decision."""


def search_plan(view: JobView, settings: tuple[Setting, ...], goal: Goal) -> ClockPlan:
    """Return a plan that measures the next setting, or runs the best one, or full speed."""
    if energy_at_full_speed(view, settings) is None:
        return _plan_to_know_full_speed(view, settings[0], goal)
    longest_ratio = view.target.iteration_time_s(view.baseline.iteration_time_s) / view.baseline.iteration_time_s
    decided = _decided_plan(view, longest_ratio)
    if decided is not None and not decided.ranks:
        return _decided(plan_at_full_speed(view, goal.otherwise, cost=goal.cost), longest_ratio)
    if decided is not None and _stands_until_review(view, decided):
        return replace(decided, advice=())
    current = None if decided is None else setting_of(decided)
    points = measured_points(view, settings)
    curves = curves_of(view, settings, points)
    surely_fast = curves.fast_enough(longest_ratio, sigmas=_SIGMAS_TO_CHOOSE)
    if goal.as_measured:
        measured = {own for own, point in points.items() if point.time_ratio <= longest_ratio * (1 + WORTHWHILE_RATIO)}
        if decided is not None:
            measured &= surely_fast
            measured |= curves.fast_enough(longest_ratio, sigmas=-_SIGMAS_TO_CHOOSE) & {current}
    else:
        measured = surely_fast & points.keys() | curves.fast_enough(longest_ratio, sigmas=0) & {current}
    permitted = measured | {own for own in surely_fast - points.keys() if _is_between(own, points, longest_ratio)}
    search = SettingSearch(curves, goal.cost, measured, longest_ratio)
    if current not in permitted and (setting := _next_to_measure(view, search, points)) is not None:
        return _measuring(view, setting, goal)
    best = replace(search, permitted=permitted).best(current=current)
    if best is None:
        plan = plan_at_full_speed(view, goal.otherwise, cost=goal.cost)
    else:
        baseline_s, time_ratio = view.baseline.iteration_time_s, curves.times[:, settings.index(best)].mean()
        reason = (
            f"least {goal.least}, {100 * search.less_cost_ratio(best):.1f} % below full speed: {best} on all GPUs,"
            f" expected {time_ratio * baseline_s:.6g} s, target {longest_ratio * baseline_s:.6g} s"
        )
        tuned = setting_plan(view, best, PlanPurpose.TUNED, policy=goal.policy, reason=reason)
        plan = with_advice(view, tuned, cost=goal.cost)
    return _decided(plan, longest_ratio)


def _is_between(setting: Setting, points: Mapping[Setting, MeasuredPoint], longest_ratio: float) -> bool:
    """Return whether a slower setting was measured, and no faster one was too slow."""
    own = {seen.value: point for seen, point in points.items() if seen.lever is setting.lever}
    is_slow = any(value > setting.value and point.time_ratio > longest_ratio for value, point in own.items())
    return min(own, default=math.inf) < setting.value and not is_slow


def _plan_to_know_full_speed(view: JobView, top: Setting, goal: Goal) -> ClockPlan:
    """Return a plan that measures the energy at full speed, if that was not tried yet and can be set."""
    is_settable = not view.can_set_clocks or top.value in common_clocks_mhz(view)
    if top in setting_measurements(view) or not is_settable:
        return baseline_plan(reason="no setting can be chosen: there is no energy measurement at full speed")
    return _measuring(view, top, goal)


def _measuring(view: JobView, setting: Setting, goal: Goal) -> ClockPlan:
    return setting_plan(view, setting, PlanPurpose.TRIAL, policy=goal.policy, reason=f"measuring {setting} on all GPUs")


def _next_to_measure(view: JobView, search: SettingSearch, points: Mapping[Setting, MeasuredPoint]) -> Setting | None:
    """Return the setting to measure; None when measuring is complete.

    That is the one being measured, then those that may be best, then those that tell what more slowdown would save.
    """
    tried = tried_settings(view) | points.keys()
    setting = setting_being_measured(view) or search.next_setting(tried)
    if setting is None and search.longest_ratio < 1 + max(ADVISED_SLOWDOWNS):
        setting = most_telling_setting(view, search.curves, tried)
    return setting


def _decided_plan(view: JobView, longest_ratio: float) -> ClockPlan | None:
    """Return the last plan that was decided for this permitted time since trials began; None if there is none."""
    for plan in reversed(view.issued_plans):
        decided_for = plan.figure(_LONGEST)
        if decided_for is None or not is_current(view, plan):
            continue
        if math.isclose(decided_for, longest_ratio, rel_tol=WORTHWHILE_RATIO):
            return plan
    return None


def _stands_until_review(view: JobView, decided: ClockPlan) -> bool:
    """Return whether a decision stands without another look: it is in force, and a review takes milliseconds."""
    return view.issued_plans[-1].plan_id == decided.plan_id and not is_time_to_review(view)


def _decided(plan: ClockPlan, longest_ratio: float) -> ClockPlan:
    return replace(plan, figures=((_LONGEST, longest_ratio),))


def plan_without_slowdown(view: JobView, reason: str) -> ClockPlan:
    """Return the next trial, else the setting that saves at full speed's time, else full speed; with advice.

    `reason` says why the job is kept at full speed.
    """
    settings = settings_of(view)
    may_try = view.may_try and can_be_advised(view) and permits_no_slowdown(view) and view.num_dp_ranks == 1
    if not may_try or not settings:
        return plan_at_full_speed(view, reason)
    decided = _decided_plan(view, 1.0)
    if decided is not None and not decided.ranks:
        return _decided(plan_at_full_speed(view, reason), 1.0)
    if decided is not None and _stands_until_review(view, decided):
        return replace(decided, advice=())
    points = measured_points(view, settings)
    curves = curves_of(view, settings, points)
    if decided is None:
        setting = setting_being_measured(view) or most_telling_setting(view, curves, tried_settings(view))
        if setting is not None:
            why = f"measuring what a permitted slowdown would save: {setting} for a few iterations"
            return setting_plan(view, setting, PlanPurpose.TRIAL, policy="advice", reason=why)
    setting = _free_setting(curves, points, None if decided is None else setting_of(decided))
    if setting is None:
        return _decided(plan_at_full_speed(view, reason), 1.0)
    why = f"{setting} on all GPUs took no more time than full speed in its trial: this loop seems to wait for memory"
    plan = setting_plan(view, setting, PlanPurpose.TUNED, policy="advice", reason=why)
    return _decided(with_advice(view, plan), 1.0)


def _free_setting(curves: Curves, points: Mapping[Setting, MeasuredPoint], current: Setting | None) -> Setting | None:
    """Return a measured setting that saves at the time of full speed: the current one while it does; None: none."""
    search = SettingSearch(curves, permitted=curves.fast_enough(1 + WORTHWHILE_RATIO, sigmas=0) & points.keys())
    chosen = current if current in search.permitted else search.best()
    return chosen if chosen is not None and search.less_cost_ratio(chosen) >= _LEAST_SAVING_RATIO else None
