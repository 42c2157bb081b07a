"""Chooses between a newly learned plan and the plans that ran already, unless the new one is an experiment."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.model import PipelineModel
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.best_known import (
    EXPERIMENT_LATE_RATIO,
    KnownPlan,
    believed_frontier,
    best_known,
    is_experiment,
    is_kept,
)
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.switching.simulation import simulate_switching


def more_time_ratio(view: JobView, model: PipelineModel, *, number: int, target_figure: str) -> float:
    """Return by how much plan `number` may exceed the target: as an experiment after a plan that was kept."""
    target_ratio = view.target.iteration_time_s(view.baseline.iteration_time_s) / view.baseline.iteration_time_s
    was_kept = _was_kept(_tried(view, _measured_s(view), target_ratio, target_figure))
    if len(model.graph.instructions) > TOO_LARGE or not was_kept:
        return 0.0
    is_applied = is_experiment(number, num_plans=TUNING.num_learning_plans, was_kept=was_kept)
    return EXPERIMENT_LATE_RATIO if is_applied else 0.0


def new_or_tried(view: JobView, model: PipelineModel, new: ClockPlan, *, number: int, target_figure: str) -> ClockPlan:
    """Return plan `number`, or one for the same target that ran and is better, under the new plan's name.

    Lateness that the model misses (clocks that take effect late, other couplings of the ranks) is that of the plans
    that ran: the new one is expected to have the median of it.
    """
    measured_s = _measured_s(view)
    target_ratio = new.figure(target_figure)
    tried = [] if target_ratio is None else _tried(view, measured_s, target_ratio, target_figure)
    if is_experiment(number, num_plans=TUNING.num_learning_plans, was_kept=_was_kept(tried)):
        return new
    if not tried or new.predicted is None or len(model.graph.instructions) > TOO_LARGE:
        return new
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    known, excesses_s = [], []
    for plan in tried:
        changes = tuple(plan.changes_of(r) for r in range(model.graph.num_ranks))
        simulated = simulate_switching(model.graph, model.profile, changes, latency=model.latencies)
        excesses_s.append(measured_s[plan.plan_id] - simulated.iteration_time_s - model.bias_s)
        known.append(KnownPlan(simulated.energy_j + model.bias_energy_j, measured_s[plan.plan_id] - target_s))
    expected_s = new.predicted.iteration_time_s + max(0.0, median(excesses_s))
    frontier = believed_frontier(model.graph, model.profile, deadline_s=target_s - model.bias_s)
    chosen = best_known([KnownPlan(new.predicted.energy_j, expected_s - target_s), *known], frontier)
    if chosen == 0:
        return new
    kept = tried[chosen - 1]
    why = f"{new.reason}; {kept.plan_id} is still the best plan known"
    return replace(kept, plan_id=new.plan_id, reason=why, learned=new.learned)


def _tried(view: JobView, measured_s: Mapping[str, float], target_ratio: float, target_figure: str) -> list[ClockPlan]:
    """Return the plans for a target that were measured, oldest first."""
    return [
        plan
        for plan in view.issued_plans
        if plan.purpose is PlanPurpose.TUNED
        and plan.plan_id in measured_s
        and not plan.orders
        and abs((plan.figure(target_figure) or 0.0) - target_ratio) <= TUNING.target_moved_ratio
    ]


def _was_kept(tried: Sequence[ClockPlan]) -> bool:
    """Return whether the latest plan is nearly one that had run before."""
    return is_kept([[mhz for rank in plan.ranks for mhz in rank.sm_clocks_mhz] for plan in tried])


def _measured_s(view: JobView) -> Mapping[str, float]:
    """Return the median time of each plan's undisturbed iterations without the first, where enough were measured."""
    times_s: dict[str, list[float]] = {}
    for observation in view.observations:
        if observation.is_regular and observation.plan_id is not None:
            times_s.setdefault(observation.plan_id, []).append(observation.own_time_s)
    return {plan_id: median(own[1:]) for plan_id, own in times_s.items() if len(own) > TUNING.min_iterations_to_learn}
