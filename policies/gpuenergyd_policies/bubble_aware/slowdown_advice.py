"""Advice on the permitted slowdown for loops whose phases are planned: from their plan and their fitted profile.

The plan in force has a measured saving at its permitted slowdown. What more slowdown adds is read from the fitted time
and energy of each phase, in profiles drawn from the fit: phases of one rank run one after the other, so that the
cheapest way to spend more time is to lower, again and again, the clock that saves most for it.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median, pstdev

import numpy as np

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, SavingAdvice
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.advice import (
    ADVISED_EVERY,
    ADVISED_EVERY_AT_FIRST,
    advised_slowdowns,
    with_advice,
)
from gpuenergyd_policies.bubble_aware.model import FittedJob
from gpuenergyd_policies.bubble_aware.planning import Figure
from gpuenergyd_policies.learning.seen import NotEnoughDataError
from gpuenergyd_policies.setting_measurements import LEAST_ENERGY_ERROR
from gpuenergyd_policies.setting_search import can_be_advised

_LEAST_MEASURED = 6
"""Iterations of the plan in force before there is advice."""
_NUM_DRAWS = 16
_ERROR_OF_ADDED = 0.1
"""Standard error of what a further slowdown adds, as a share of it: plans switch clocks late, and keep caution."""
_INTERVAL_AT_SIGMA = 1.645
_Step = tuple[float, float]
"""Time added and energy saved by lowering the clock of one phase."""


def with_slowdown_advice(view: JobView, plan: ClockPlan) -> ClockPlan:
    """Return a plan for a loop with advice, where it is time for it."""
    if plan.purpose is PlanPurpose.PROFILE or not view.can_set_clocks or not can_be_advised(view):
        return plan
    if view.is_plain_loop:
        return with_advice(view, plan)
    measured = [o for o in view.observations if o.is_regular and o.plan_id == plan.plan_id and o.energy_j is not None]
    is_new = len(measured) < _LEAST_MEASURED + ADVISED_EVERY_AT_FIRST
    is_due = is_new or view.observations[-1].iteration_index % ADVISED_EVERY == 0
    if plan.purpose is not PlanPurpose.TUNED or len(measured) < _LEAST_MEASURED or not is_due:
        return plan
    try:
        fitted = FittedJob(view).fitted
    except NotEnoughDataError:
        return plan
    random = np.random.default_rng(view.num_issued())
    profiles = [fitted.profile, *fitted.drawn(_NUM_DRAWS, random)]
    return replace(plan, advice=_advice(view, plan, measured, [_steps(view, own) for own in profiles]))


def _advice(
    view: JobView, plan: ClockPlan, measured: Sequence[IterationObservation], curves: Sequence[Sequence[_Step]]
) -> tuple[SavingAdvice, ...]:
    """Return the advice; the first of `curves` is the most probable one."""
    baseline_j = view.baseline.energy_j
    assert baseline_j is not None
    energies_j = [o.energy_j for o in measured if o.energy_j is not None]
    saving = 1 - median(energies_j) / baseline_j
    error = math.hypot(LEAST_ENERGY_ERROR, pstdev(energies_j) / baseline_j / math.sqrt(len(energies_j)))
    caution_ratio = plan.figure(Figure.CAUTION) or 0.0
    permitted = view.target.max_slowdown_ratio
    found = []
    for ratio in advised_slowdowns(view):
        added = [
            (_saved_j(own, ratio - caution_ratio, view) - _saved_j(own, permitted - caution_ratio, view)) / baseline_j
            for own in curves
        ]
        spread = max(pstdev(added[1:]), _ERROR_OF_ADDED * abs(fmean(added)))
        half = _INTERVAL_AT_SIGMA * math.hypot(error, spread)
        total = saving + added[0]
        found.append(SavingAdvice(ratio, total, total - half, total + half, is_measured=True))
    return tuple(found)


def _saved_j(steps: Sequence[_Step], slowdown_ratio: float, view: JobView) -> float:
    """Return what the steps save that fit into a slowdown, the last one in part."""
    left_s, saved_j = max(0.0, slowdown_ratio) * view.baseline.iteration_time_s, 0.0
    for added_s, own_j in steps:
        if added_s > left_s:
            return saved_j + own_j * left_s / added_s
        left_s, saved_j = left_s - added_s, saved_j + own_j
    return saved_j


def _steps(view: JobView, profile: PipelineProfile) -> list[_Step]:
    """Return the steps of all phases of an iteration, those first that save most for their time."""
    (order,) = view.schedule.orders
    steps = [step for instruction in order for step in _steps_of(profile[instruction.instruction_class])]
    return sorted(steps, key=lambda step: -step[1] / max(step[0], 1e-12))


def _steps_of(options: InstructionProfile) -> list[_Step]:
    """Return the steps along the lower convex hull of time and energy, from the highest clock on."""
    top = options.at_max_clock
    hull = [(top.time_s, top.energy_j)]
    for point in sorted((o.time_s, o.energy_j) for o in options.options):
        if point[1] >= hull[-1][1]:
            continue
        while len(hull) > 1 and _is_above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append((max(point[0], top.time_s), point[1]))
    return [(slow_s - fast_s, fast_j - slow_j) for (fast_s, fast_j), (slow_s, slow_j) in pairwise(hull)]


def _is_above(a: _Step, b: _Step, c: _Step) -> bool:
    """Return whether the middle one of three points is not below the line through the others."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
