"""Plans with one setting on all GPUs of a job: what was decided, and plans of loops that permit no slowdown.

Theory of operation. A policy measures settings (`setting_search`) until no further one is worth its time. Then it
decides: it runs the best setting, measured or between measured ones, or stays at full speed. The plan says for which
permitted time it was decided: a decision stands until that time changes, or until the setting turns out too slow.

Loops that permit no slowdown are measured for a few iterations too (record 97): what a slowdown would save cannot be
told from full speed. A loop that waits for memory all the time is not slower at a lower clock: such a setting is kept.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.advice import is_time_to_review, with_advice
from gpuenergyd_policies.full_speed import permits_no_slowdown, plan_at_full_speed
from gpuenergyd_policies.setting_curves import Curves, MeasuredPoint
from gpuenergyd_policies.setting_measurements import (
    curves_of,
    is_current,
    measured_points,
    setting_being_measured,
    tried_settings,
)
from gpuenergyd_policies.setting_search import WORTHWHILE_RATIO, SettingSearch, can_be_advised, most_telling_setting
from gpuenergyd_policies.uniform_settings import Setting, setting_of, setting_plan, settings_of

_LEAST_SAVING_RATIO = 0.01
"""Less than this is not kept without a permitted slowdown: temperature and other programs change as much."""
_LONGEST = "longest_iteration_ratio"
"""Figure of a plan that was decided: the permitted iteration time, relative to full speed."""


def decided_plan(view: JobView, longest_ratio: float) -> ClockPlan | None:
    """Return the last plan that was decided for this permitted time since trials began; None if there is none."""
    for plan in reversed(view.issued_plans):
        decided_for = plan.figure(_LONGEST)
        if decided_for is None or not is_current(view, plan):
            continue
        if math.isclose(decided_for, longest_ratio, rel_tol=WORTHWHILE_RATIO):
            return plan
    return None


def stands_until_review(view: JobView, decided: ClockPlan) -> bool:
    """Return whether a decision stands without another look: it is in force, and a review takes milliseconds."""
    return view.issued_plans[-1].plan_id == decided.plan_id and not is_time_to_review(view)


def as_decided(plan: ClockPlan, longest_ratio: float) -> ClockPlan:
    """Return a plan that says for which permitted time it was decided."""
    return replace(plan, figures=((_LONGEST, longest_ratio),))


def plan_without_slowdown(view: JobView, reason: str) -> ClockPlan:
    """Return the next trial, else the setting that saves at full speed's time, else full speed; with advice.

    `reason` says why the job is kept at full speed.
    """
    settings = settings_of(view)
    may_try = view.may_try and can_be_advised(view) and permits_no_slowdown(view) and view.num_dp_ranks == 1
    if not may_try or not settings:
        return plan_at_full_speed(view, reason)
    decided = decided_plan(view, 1.0)
    if decided is not None and not decided.ranks:
        return as_decided(plan_at_full_speed(view, reason), 1.0)
    if decided is not None and stands_until_review(view, decided):
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
        return as_decided(plan_at_full_speed(view, reason), 1.0)
    why = f"{setting} on all GPUs took no more time than full speed in its trial: this loop seems to wait for memory"
    plan = setting_plan(view, setting, PlanPurpose.TUNED, policy="advice", reason=why)
    return as_decided(with_advice(view, plan), 1.0)


def _free_setting(curves: Curves, points: Mapping[Setting, MeasuredPoint], current: Setting | None) -> Setting | None:
    """Return a measured setting that saves at the time of full speed: the current one while it does; None: none."""
    search = SettingSearch(curves, permitted=curves.fast_enough(1 + WORTHWHILE_RATIO, sigmas=0) & points.keys())
    chosen = current if current in search.permitted else search.best()
    return chosen if chosen is not None and search.less_cost_ratio(chosen) >= _LEAST_SAVING_RATIO else None
