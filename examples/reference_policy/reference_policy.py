"""Clock policy without tuning: a baseline, one fit, the frontier and a plan. The default policy refines each step.

1. Baseline: iterations at full speed give the time of each instruction, and each GPU's power at work.
2. Fit, relative to full speed, at which the clock is f_max:
       time(f)  = a + (1 - a) * f_max / f      a by kind and stage; 0, the worst case, until it is measured
       power(f) = shape(f) ** exponent         shape from published curves; exponent 1 until it is measured
3. Frontier: the planner finds the cheapest clocks for an iteration time, from times and energies at all clocks.
4. Plan: the frontier's point at the permitted time. Its iterations improve the fit, and the next plan follows. After
   four plans the cheapest one that was on time stays, or full speed if none saved energy.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import entry_points
from math import exp, inf, log
from statistics import fmean, median
from typing import TypeVar

import numpy as np

from gpuenergyd.core.measurement.observation import IterationObservation, RankEnergy
from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass, dependency_graph
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction, PlanPurpose, RankClocks, baseline_plan
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView, OfflinePlan, OfflinePlanner, OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget

Key = TypeVar("Key")
Shape = tuple[Sequence[float], Sequence[float]]
"""Logarithms of clocks and of power at them, relative to full speed; a power law between neighbours."""

NUM_PLANS = 4
"""Plans that are measured, each made from a better fit; later ones hardly change the clocks."""
ITERATIONS_PER_PLAN = 10
"""As many as the baseline has, so that both are equally precise."""
LATE_RATIO = 0.005
"""A plan that is slower than permitted by more than this is late: half of what the daemon's guard accepts."""
WAITING_SHARE = 0.3
"""Power of a waiting GPU as a share of its power at work, where none is published: 84 of 280 W on an A100."""
ASSUMPTION_WEIGHT = 0.1
"""An assumed slope counts as much as ten measurements at a clock that is 10 % lower."""


class ReferencePolicy:
    """Plans a job from its baseline and from what its own plans have shown; keeps no state between calls."""

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the plan in force while it is measured, then the next one, and finally the best of them."""
        if not view.can_set_clocks or view.num_dp_ranks > 1:
            return baseline_plan(reason="at full speed: clocks may not be set, or the loop has several processes")
        plan_ids, plans = plans_for_target(view)
        if plans and plans[-1].plan_id == plan_ids[-1]:
            return plans[-1]
        is_in_force = bool(plans) and plans[-1].plan_id == view.issued_plans[-1].plan_id
        if is_in_force and len(iterations_under(view, plans[-1])) < ITERATIONS_PER_PLAN:
            return plans[-1]
        if (fit := fitted(view)) is None:
            return baseline_plan(reason="at full speed: an instruction or a GPU's energy has not been measured yet")
        if len(plans) < NUM_PLANS:
            plan = plan_at_target(view, fit, plans)
            if plan.predicted_saving is not None and plan.predicted_saving.ratio > 0:
                return replace(plan, plan_id=plan_ids[len(plans)])
        return replace(cheapest_measured(view, plans), plan_id=plan_ids[-1])

    def frontier(self, view: JobView) -> tuple[FrontierPoint, ...]:
        """Return the frontier as iterations would measure it; empty while there is no fit."""
        if (fit := fitted(view)) is None:
            return ()
        other_s = time_beyond_instructions_s(view, fit, plans_for_target(view)[1])
        other_j = other_s * sum(fit.waiting_w.values())
        points = solved(view, fit, instructions_s(view, fit), want_frontier=True).frontier
        return tuple(FrontierPoint(own.iteration_time_s + other_s, own.energy_j + other_j, None) for own in points)


# --- 1. Baseline: what iterations show ---


def iterations_under(view: JobView, plan: ClockPlan) -> list[IterationObservation]:
    """Return the undisturbed iterations under a plan."""
    return [o for o in view.observations if o.is_regular and o.plan_id == plan.plan_id]


def measured_energies(iterations: Iterable[IterationObservation]) -> Iterator[tuple[RankEnergy, float, float, float]]:
    """Yield what each GPU ran in an iteration, with its energy, and for how long it waited and worked."""
    for rank in (rank for o in iterations for rank in o.ranks):
        waiting_s = sum(at.time_s for at in rank.time_at if at.kind is None or at.kind.is_wait)
        working_s = sum(at.time_s for at in rank.time_at) - waiting_s
        if rank.energy_j is not None and working_s > 0:
            yield rank, rank.energy_j, waiting_s, working_s


# --- 2. Fit: one slope of time per instruction class, one exponent of power ---


@dataclass(frozen=True, slots=True)
class Fit:
    """Times and powers at full speed, and how they change with the clock; by rank or by class of instruction."""

    graph: DependencyGraph
    full_speed_s: Mapping[InstructionClass, float]
    full_speed_mhz: Mapping[int, float]
    """The clock that a GPU runs at when nothing is requested: below the highest one under a power cap."""
    working_w: Mapping[int, float]
    waiting_w: Mapping[int, float]
    shapes: Mapping[int, Shape]
    slopes: Mapping[InstructionClass, float]
    """1 - a: how much of the time grows as the clock falls."""
    exponent: float = 1.0

    def clock_ratio(self, pp_rank: int, sm_clock_mhz: float) -> float:
        """Return f / f_max, at most 1."""
        return min(1.0, sm_clock_mhz / self.full_speed_mhz[pp_rank])

    def power_ratio(self, pp_rank: int, sm_clock_mhz: float) -> float:
        """Return the power at work at a clock relative to full speed, before the exponent."""
        return exp(float(np.interp(log(self.clock_ratio(pp_rank, sm_clock_mhz)), *self.shapes[pp_rank])))

    def option(self, key: InstructionClass, sm_clock_mhz: int) -> ClockOption:
        """Return time and energy of an instruction, or of a phase that waits, at a clock."""
        time_s = self.full_speed_s[key] * (1 + self.slopes[key] * (1 / self.clock_ratio(key.pp_rank, sm_clock_mhz) - 1))
        full_w = (self.waiting_w if key.kind.is_wait else self.working_w)[key.pp_rank]
        power_w = full_w * self.power_ratio(key.pp_rank, sm_clock_mhz) ** self.exponent
        return ClockOption(sm_clock_mhz, time_s, time_s * power_w)


def fitted(view: JobView) -> Fit | None:
    """Return the fit to all iterations so far; None while a time or an energy at full speed is missing."""
    graph = dependency_graph(
        view.schedule, communication_latency_s=view.communication_latency_s, launch_gap_s=view.launch_gap_s
    )
    slow_ids = {plan.plan_id for plan in view.issued_plans if plan.purpose is not PlanPurpose.BASELINE}
    full_speed = [o for o in view.observations if o.is_regular and o.plan_id not in slow_ids]
    slower = [o for o in view.observations if o.is_regular and o.plan_id in slow_ids]
    times_s, clocks_mhz = defaultdict[InstructionClass, list[float]](list), defaultdict[int, list[float]](list)
    for sample in (sample for o in full_speed for sample in o.instruction_samples):
        times_s[sample.instruction_class].append(sample.time_s)
        clocks_mhz[sample.pp_rank].append(sample.main_share.sm_clock_mhz)
    working_w, waiting_w = powers_w(view, full_speed)
    if not set(graph.classes) <= times_s.keys() or len(working_w) < graph.num_ranks:
        return None
    shapes = {rank: published_shape(gpu.model_name) for rank, gpu in enumerate(view.gpus)}
    fit = Fit(graph, medians(times_s), medians(clocks_mhz), working_w, waiting_w, shapes, dict.fromkeys(times_s, 1.0))
    return replace(fit, slopes=fitted_slopes(fit, slower), exponent=fitted_exponent(fit, slower))


def medians(values: Mapping[Key, Sequence[float]]) -> dict[Key, float]:
    """Return the median of each key's values."""
    return {key: median(own) for key, own in values.items()}


def powers_w(view: JobView, iterations: Iterable[IterationObservation]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the power of each GPU at work, and while it waits, by rank; without GPUs whose energy is unknown."""
    working_w, waiting_w = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for rank, energy_j, waiting_s, working_s in measured_energies(iterations):
        waits_w = WAITING_SHARE * energy_j / (working_s + WAITING_SHARE * waiting_s)
        if (published_w := view.gpus[rank.pp_rank].blocking_power_w) is not None:
            waits_w = min(published_w, energy_j / (working_s + waiting_s))
        waiting_w[rank.pp_rank].append(waits_w)
        working_w[rank.pp_rank].append((energy_j - waits_w * waiting_s) / working_s)
    return medians(working_w), medians(waiting_w)


@cache
def published_shape(gpu_model_name: str) -> Shape:
    """Return the published power curve of a GPU model as gpuenergyd ships it: the mean over kinds of instructions."""
    (learning,) = entry_points(group="gpuenergyd.policies", name="learning")
    powers = defaultdict[float, list[float]](list)
    for point in (point for curve in learning.load()().prior(gpu_model_name, ()).curves for point in curve.points):
        powers[point.clock_ratio].append(point.power_ratio)
    return [log(ratio) for ratio in sorted(powers)], [log(fmean(powers[ratio])) for ratio in sorted(powers)]


def slope(points: Iterable[tuple[float, float]], assumed: float) -> float:
    """Return the slope, not negative, of a line through the origin by least squares, drawn to an assumed one."""
    xy, xx = ASSUMPTION_WEIGHT * assumed, ASSUMPTION_WEIGHT
    for x, y in points:
        xy, xx = xy + x * y, xx + x * x
    return max(0.0, xy / xx)


def fitted_slopes(fit: Fit, iterations: Iterable[IterationObservation]) -> dict[InstructionClass, float]:
    """Return the slope of time of each class: its own as far as it was measured, else that of its kind, else 1."""
    points = defaultdict[InstructionClass, list[tuple[float, float]]](list)
    for sample in (sample for o in iterations for sample in o.instruction_samples):
        key = sample.instruction_class
        periods_s = sum(own.time_s / fit.clock_ratio(key.pp_rank, own.sm_clock_mhz) for own in sample.shares)
        points[key].append((periods_s / sample.time_s - 1, sample.time_s / fit.full_speed_s[key] - 1))
    slopes = {}
    for key in fit.full_speed_s:
        of_kind = slope((point for other, own in points.items() if other.kind is key.kind for point in own), 1.0)
        slopes[key] = 0.0 if key.kind.is_wait else slope(points[key], of_kind)  # a wait takes as long at any clock
    return slopes


def fitted_exponent(fit: Fit, iterations: Iterable[IterationObservation]) -> float:
    """Return the exponent of the shape of power that explains the energies of all GPUs."""
    points = []
    for rank, energy_j, waiting_s, working_s in measured_energies(iterations):
        working_j = energy_j - fit.waiting_w[rank.pp_rank] * waiting_s
        shaped_s = sum(
            at.time_s * fit.power_ratio(rank.pp_rank, at.sm_clock_mhz)
            for at in rank.time_at
            if at.kind is not None and not at.kind.is_wait
        )
        if working_j > 0:
            points.append((log(shaped_s / working_s), log(working_j / (fit.working_w[rank.pp_rank] * working_s))))
    return slope(points, 1.0)


# --- 3. Frontier: the planner's cheapest clocks for an iteration time ---


def solved(view: JobView, fit: Fit, deadline_s: float, *, want_frontier: bool = False) -> OfflinePlan:
    """Return the cheapest clocks whose instructions take at most `deadline_s`, each requested ahead of need."""
    classes = {}
    for key in fit.graph.classes:
        offered_mhz = view.gpus[key.pp_rank].supported_sm_clocks_mhz
        lowest_mhz = max(offered_mhz) * exp(fit.shapes[key.pp_rank][0][0])  # that the published curve covers
        covered = (fit.option(key, mhz) for mhz in offered_mhz if mhz >= lowest_mhz)
        classes[key] = instruction_profile(covered, where=str(key))
    (entry_point,) = entry_points(group="gpuenergyd.planners", name="bubble-aware")
    planner: OfflinePlanner = entry_point.load()
    return planner(
        OfflineRequest(
            name=view.job_id,
            profile=PipelineProfile(classes, fmean(fit.waiting_w.values())),
            schedule=view.schedule,
            graph=fit.graph,
            target=PerformanceTarget(0.0, deadline_s if view.target.fills_time else None, permitted_time_s=deadline_s),
            switch_latency_s=max(gpu.switch_latency_s for gpu in view.gpus),
            want_frontier=want_frontier,
        )
    )


def instructions_s(view: JobView, fit: Fit, plan: ClockPlan | None = None) -> float:
    """Return the time of an iteration's instructions under a plan, by the fit; at full speed without one."""
    clocks_mhz = {
        instruction: clock
        for rank in (() if plan is None else plan.ranks)
        for instruction, clock in zip(view.schedule.orders[rank.pp_rank], rank.sm_clocks_mhz, strict=True)
    }
    tops_mhz = [max(gpu.supported_sm_clocks_mhz) for gpu in view.gpus]
    clocks = ((i.instruction_class, clocks_mhz.get(i) or tops_mhz[i.pp_rank]) for i in fit.graph.instructions)
    return makespan_s(fit.graph, [fit.option(key, mhz).time_s for key, mhz in clocks])


# --- 4. Plan: at the permitted time, corrected by what the plan before has shown ---


def plans_for_target(view: JobView) -> tuple[list[str], list[ClockPlan]]:
    """Return the ids of all plans for the present target, of which the last one stays, and the plans issued so far."""
    baseline_s = view.baseline.iteration_time_s
    permitted = round((view.target.iteration_time_s(baseline_s) / baseline_s - 1) / LATE_RATIO)
    plan_ids = [view.plan_id(f"tuned-{permitted}-{number}") for number in range(1, NUM_PLANS + 2)]
    issued = {plan.plan_id: plan for plan in view.issued_plans}
    return plan_ids, [issued[plan_id] for plan_id in plan_ids if plan_id in issued]


def time_beyond_instructions_s(view: JobView, fit: Fit, plans: Sequence[ClockPlan]) -> float:
    """Return what an iteration takes beyond its instructions: at full speed, or under the last plan if that is more."""
    other_s = view.baseline.iteration_time_s - instructions_s(view, fit)
    for plan in plans[-1:]:
        if measured := iterations_under(view, plan):
            other_s = max(other_s, median(o.own_time_s for o in measured) - instructions_s(view, fit, plan))
    return other_s


def plan_at_target(view: JobView, fit: Fit, plans: Sequence[ClockPlan]) -> ClockPlan:
    """Return the plan of least energy within the permitted time."""
    other_s, baseline_s = time_beyond_instructions_s(view, fit, plans), view.baseline.iteration_time_s
    target_s = view.target.iteration_time_s(baseline_s)
    plan = solved(view, fit, max(target_s - other_s, instructions_s(view, fit)))
    assert plan.switching is not None
    ranks = (
        RankClocks(pp_rank, tuple(plan.sm_clocks_mhz[i] for i in order), plan.switching.changes[pp_rank])
        for pp_rank, order in enumerate(view.schedule.orders)
    )
    other_j = other_s * sum(fit.waiting_w.values())
    full_speed_j = plan.baseline_energy_j + other_j
    predicted = PlanPrediction(plan.iteration_time_s + other_s, plan.energy_j + other_j, None, baseline_s, full_speed_j)
    return ClockPlan("", PlanPurpose.TUNED, tuple(ranks), predicted, f"least energy within {target_s:.4g} s")


def cheapest_measured(view: JobView, plans: Sequence[ClockPlan]) -> ClockPlan:
    """Return the plan of least measured energy that was not late, else full speed."""
    latest_s = view.target.iteration_time_s(view.baseline.iteration_time_s) * (1 + LATE_RATIO)
    best = baseline_plan(reason="at full speed: no plan saves energy within the permitted time")
    best_j = view.baseline.energy_j or inf
    for plan in plans:
        measured = iterations_under(view, plan)
        energies_j = [o.energy_j for o in measured if o.energy_j is not None]
        is_late = not measured or median(o.own_time_s for o in measured) > latest_s
        if energies_j and not is_late and fmean(energies_j) < best_j:
            best, best_j = replace(plan, reason=f"cheapest of {len(plans)} plans"), fmean(energies_j)
    return best
