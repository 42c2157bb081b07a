"""Advice on the permitted slowdown for loops whose phases are planned: from their plan and their fitted profile.

The plan in force has a measured saving at its permitted slowdown. What more slowdown adds is read from the fitted time
and energy of each phase, in profiles drawn from the fit. Plans for less slowdown hardly lower the clocks of phases that
compute, which says nothing of what that would save, so a plan for the largest advised slowdown is measured for a few
iterations.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist, fmean, median, pstdev

import numpy as np

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import dependency_graph
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, SavingAdvice
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_policies.advice import (
    ADVISED_EVERY,
    ADVISED_EVERY_AT_FIRST,
    SAVING_QUANTILES,
    advised_slowdowns,
    is_time_to_review,
    with_advice,
)
from gpuenergyd_policies.bubble_aware.figures import Figure
from gpuenergyd_policies.bubble_aware.model import FittedJob
from gpuenergyd_policies.bubble_aware.outcome import PlanOutcome
from gpuenergyd_policies.bubble_aware.planning import plan_from_model
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.risk import NUM_DRAWS
from gpuenergyd_policies.learning.seen import NotEnoughDataError
from gpuenergyd_policies.planning.frontier import least_energies_j, min_iteration_time_s
from gpuenergyd_policies.setting_measurements import LEAST_ENERGY_ERROR, is_current
from gpuenergyd_policies.setting_search import ADVISED_SLOWDOWNS, can_be_advised

_ERROR_OF_ADDED = 0.1
"""Standard error of what a further slowdown adds, as a share of it: plans switch clocks late, and keep caution."""


def with_slowdown_advice(view: JobView, plan: ClockPlan) -> ClockPlan:
    """Return a plan for a loop with advice, where it is time for it."""
    if plan.purpose is PlanPurpose.TRIAL or not view.can_set_clocks or not can_be_advised(view):
        return plan
    if view.is_plain_loop:
        return with_advice(view, plan)
    measured = [o for o in view.observations if o.is_regular and o.plan_id == plan.plan_id and o.energy_j is not None]
    is_new = len(measured) < TUNING.min_iterations_to_evaluate + ADVISED_EVERY_AT_FIRST
    is_due = is_new or view.observations[-1].iteration_index % ADVISED_EVERY == 0
    if plan.purpose is not PlanPurpose.TUNED or len(measured) < TUNING.min_iterations_to_evaluate or not is_due:
        return plan
    try:
        fitted = FittedJob(view).fitted
    except NotEnoughDataError:
        return plan
    profiles = [fitted.profile, *fitted.curves.drawn(NUM_DRAWS, np.random.default_rng(view.num_issued()))]
    return replace(plan, advice=_advice(view, plan, measured, profiles))


def may_measure_slower(view: JobView) -> bool:
    """Return whether a slower plan may be measured: for a loop alone, once, where nothing else sets its pace.

    Data-parallel ranks would have to measure in the same iterations.
    """
    is_alone = not view.is_plain_loop and view.num_dp_ranks == 1 and can_be_advised(view)
    is_own_pace = view.target == PerformanceTarget(view.target.max_slowdown_ratio) and len(advised_slowdowns(view)) > 0
    is_measured = any(plan.purpose is PlanPurpose.TRIAL and is_current(view, plan) for plan in view.issued_plans)
    return view.may_try and is_alone and is_own_pace and not is_measured


def slower_plan(outcome: PlanOutcome) -> ClockPlan | None:
    """Return the plan for the largest advised slowdown; None while the time account cannot pay it.

    Once learning is over, that is seldom looked at.
    """
    view = outcome.view
    if not outcome.is_learning and not is_time_to_review(view):
        return None
    try:
        model = FittedJob(view).model
    except NotEnoughDataError:
        return None
    slower = replace(view, target=PerformanceTarget(max(ADVISED_SLOWDOWNS)))
    why = "measuring what a permitted slowdown would save, for a few iterations"
    plan = plan_from_model(slower, model, caution_ratio=outcome.caution_ratio, number=outcome.number, why=why)
    if view.affordable_s is not None and _most_extra_s(view, model.profile, plan) > view.affordable_s:
        return None
    plan_id = view.plan_id(f"advice-{PlanPurpose.TRIAL}-{view.num_issued()}")
    return replace(plan, plan_id=plan_id, purpose=PlanPurpose.TRIAL)


def _most_extra_s(view: JobView, profile: PipelineProfile, plan: ClockPlan) -> float:
    """Return by how much an iteration of a loop is longer if all that computes is in proportion to the clock."""
    extra_s = 0.0
    for instruction, mhz in zip(view.schedule.orders[0], plan.ranks[0].sm_clocks_mhz, strict=True):
        top = profile[instruction.instruction_class].at_max_clock
        if mhz is not None and not instruction.kind.is_wait:
            extra_s += top.time_s * (top.sm_clock_mhz / mhz - 1)
    return extra_s


def _advice(
    view: JobView, plan: ClockPlan, measured: Sequence[IterationObservation], profiles: Sequence[PipelineProfile]
) -> tuple[SavingAdvice, ...]:
    """Return the advice; the first of the profiles is the most probable one."""
    baseline_j = view.baseline.energy_j
    assert baseline_j is not None
    energies_j = [o.energy_j for o in measured if o.energy_j is not None]
    saving = 1 - median(energies_j) / baseline_j
    error = math.hypot(LEAST_ENERGY_ERROR, pstdev(energies_j) / baseline_j / math.sqrt(len(energies_j)))
    caution_ratio = plan.figure(Figure.CAUTION) or 0.0
    graph, advised = dependency_graph(view.schedule), advised_slowdowns(view)
    ratios = (view.target.max_slowdown_ratio, *advised)
    more_s = [max(0.0, ratio - caution_ratio) * view.baseline.iteration_time_s for ratio in ratios]
    least_j = [
        least_energies_j(graph, own, [min_iteration_time_s(graph, own) + more for more in more_s]) for own in profiles
    ]
    found = []
    for index, ratio in enumerate(advised, start=1):
        added = [(own_j[0] - own_j[index]) / baseline_j for own_j in least_j]
        spread = max(pstdev(added[1:]), _ERROR_OF_ADDED * abs(fmean(added)))
        half = NormalDist(0.0, math.hypot(error, spread)).inv_cdf(SAVING_QUANTILES[-1])
        total = saving + added[0]
        found.append(SavingAdvice(ratio, total, total - half, total + half, is_measured=True))
    return tuple(found)
