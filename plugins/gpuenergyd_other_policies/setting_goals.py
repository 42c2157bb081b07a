"""Plans of the policies `uniform` and `cost`: the setting of least energy or cost that is fast enough, by search."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.advice import with_advice
from gpuenergyd_policies.full_speed import plan_at_full_speed
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks
from gpuenergyd_policies.setting_curves import Cost, MeasuredPoint
from gpuenergyd_policies.setting_measurements import (
    curves_of,
    energy_at_full_speed,
    measured_points,
    setting_being_measured,
    setting_measurements,
    tried_settings,
)
from gpuenergyd_policies.setting_plans import as_decided, decided_plan, stands_until_review
from gpuenergyd_policies.setting_search import ADVISED_SLOWDOWNS, WORTHWHILE_RATIO, SettingSearch, most_telling_setting
from gpuenergyd_policies.uniform_settings import Setting, common_clocks_mhz, setting_of, setting_plan

_SIGMAS_TO_CHOOSE = 1.0
"""Standard errors by which a time must be within the permitted one before its setting is chosen."""


@dataclass(frozen=True, slots=True)
class Goal:
    """The goal of a policy's search for a setting, and its wording in plans."""

    policy: str
    least: str
    """The quantity that the best setting has the least of."""
    otherwise: str
    """Why full speed is kept if no setting is better."""
    cost: Cost | None = None
    """Cost to minimize; None means energy."""
    as_measured: bool = False
    """Whether a setting that was measured needs no standard error to spare, at the first decision."""


def search_plan(view: JobView, settings: tuple[Setting, ...], goal: Goal) -> ClockPlan:
    """Return a plan that measures the next setting, or runs the best one, or full speed."""
    if energy_at_full_speed(view, settings) is None:
        return _plan_to_know_full_speed(view, settings[0], goal)
    longest_ratio = view.target.iteration_time_s(view.baseline.iteration_time_s) / view.baseline.iteration_time_s
    decided = decided_plan(view, longest_ratio)
    if decided is not None and not decided.ranks:
        return as_decided(plan_at_full_speed(view, goal.otherwise, cost=goal.cost), longest_ratio)
    if decided is not None and stands_until_review(view, decided):
        return replace(decided, advice=())
    current = None if decided is None else setting_of(decided)
    points = measured_points(view, settings)
    curves = curves_of(view, settings, points)
    surely_fast = curves.fast_enough(longest_ratio, sigmas=_SIGMAS_TO_CHOOSE)
    if goal.as_measured:
        measured = {one for one, point in points.items() if point.time_ratio <= longest_ratio * (1 + WORTHWHILE_RATIO)}
        if decided is not None:
            slow = {one for one, at in points.items() if at.time_ratio > longest_ratio * (1 + 1.5 * WORTHWHILE_RATIO)}
            measured = measured & surely_fast | (points.keys() & {current}) - slow
    else:
        measured = surely_fast & points.keys() | curves.fast_enough(longest_ratio, sigmas=0) & {current}
    permitted = measured | {one for one in surely_fast - points.keys() if _is_between(one, points, longest_ratio)}
    is_searched = not view.target.is_forced  # a straggler, whose pace this is, may have gone before a search has ended
    search = SettingSearch(curves, goal.cost, measured, longest_ratio)
    if is_searched and current not in permitted and (setting := _next_to_measure(view, search, points)) is not None:
        return _measuring(view, setting, goal)
    best = replace(search, permitted=permitted if is_searched else surely_fast).best(current=current)
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
    return as_decided(plan, longest_ratio)


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


def cheapest_common_clock(
    graph: DependencyGraph, profile: PipelineProfile, deadline_s: float
) -> dict[Instruction, int]:
    """Return the common clock of least energy that meets the deadline, for each instruction."""
    common = set.intersection(*({o.sm_clock_mhz for o in curve.options} for curve in profile.classes.values()))
    evaluated = {mhz: evaluate_clocks(graph, profile, [mhz] * len(graph.instructions)) for mhz in common}
    fitting = [mhz for mhz in evaluated if evaluated[mhz].iteration_time_s <= deadline_s * (1 + 1e-9)]
    chosen: int = min(fitting, key=lambda mhz: evaluated[mhz].energy_j)
    return dict(zip(graph.instructions, [chosen] * len(graph.instructions), strict=True))
