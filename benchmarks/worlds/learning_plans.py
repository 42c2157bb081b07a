"""The next plan of a job whose truth is a measured table, as the policy makes it from a belief about its curves."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.worlds.learning_jobs import LearningJob
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_policies.bubble_aware.best_known import (
    EXPERIMENT_LATE_RATIO,
    KnownPlan,
    believed_frontier,
    best_known,
    is_experiment,
    is_kept,
)
from gpuenergyd_policies.learning.job_curves import FittedCurves
from gpuenergyd_policies.learning.risk import MAX_LATE_RATIO, caution_within_risk
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.plan_evaluation import PlanEvaluation, baseline, evaluate_clocks


@dataclass(frozen=True, slots=True)
class Choice:
    """How plans are chosen; parts are left out for an ablation."""

    caution_sigmas: float | None = None
    """The same for every plan; None: as little as the belief permits."""
    keeps_best_known: bool = True
    has_experiments: bool = True
    """Whether some plans are applied whatever is believed of those that ran."""
    experiment_late_ratio: float = EXPERIMENT_LATE_RATIO
    """Time beyond the target for an experiment after a plan that was kept."""
    is_thompson: bool = False
    """Whether powers are drawn from the belief."""


def next_clocks(
    job: LearningJob,
    fitted: FittedCurves,
    before: Sequence[PlanEvaluation],
    *,
    num_plans: int,
    choice: Choice,
    draw: np.random.Generator,
) -> Sequence[int]:
    """Return the clocks of the next of `num_plans`: a new plan, or one of those before if it is better."""
    mean_profile = fitted.profile()
    deadline_s = baseline(job.graph, mean_profile).iteration_time_s
    ran = [tuple(own.sm_clocks_mhz) for own in before]
    was_kept = is_kept(ran)
    is_unknown = choice.has_experiments and is_experiment(len(before) + 1, num_plans=num_plans, was_kept=was_kept)
    sigmas, late_ratio = choice.caution_sigmas, 0.0
    more_ratio = choice.experiment_late_ratio if was_kept and is_unknown else 0.0
    if sigmas is None:
        limit = MAX_LATE_RATIO - more_ratio
        caution = caution_within_risk(job.graph, fitted, deadline_s=deadline_s, random=draw, max_late_ratio=limit)
        sigmas, late_ratio = caution.sigmas, caution.mean_late_ratio
    believed = fitted.profile(caution_sigmas=sigmas)
    if choice.is_thompson:
        believed = _with_energies_of(believed, *fitted.drawn(1, draw))
    clocks = fastest_allowed(job, believed, more_ratio=more_ratio)
    if not choice.keeps_best_known or not before or is_unknown:
        return clocks
    plans = [KnownPlan(evaluate_clocks(job.graph, mean_profile, clocks).energy_j, late_ratio * deadline_s)]
    for own in before:
        late = own.iteration_time_s / job.baseline.iteration_time_s - 1
        energy_j = evaluate_clocks(job.graph, mean_profile, own.sm_clocks_mhz).energy_j
        plans.append(KnownPlan(energy_j, late * deadline_s))
    frontier = believed_frontier(job.graph, mean_profile, deadline_s=deadline_s)
    return [clocks, *ran][best_known(plans, frontier)]


def fastest_allowed(job: LearningJob, believed: PipelineProfile, *, more_ratio: float = 0.0) -> Sequence[int]:
    """Return the cheapest clocks believed to be as fast as full speed but for a share of its time."""
    at_full_speed_s = baseline(job.graph, believed).iteration_time_s
    deadline_s = max((1 + more_ratio) * at_full_speed_s, min_iteration_time_s(job.graph, believed))
    return solve(job.graph, believed, deadline_s=deadline_s).sm_clocks_mhz


def _with_energies_of(times: PipelineProfile, powers: PipelineProfile) -> PipelineProfile:
    classes = {}
    for key, own in times.classes.items():
        pairs = zip(own.options, powers[key].options, strict=True)
        options = (ClockOption(a.sm_clock_mhz, a.time_s, a.time_s * b.energy_j / b.time_s) for a, b in pairs)
        classes[key] = InstructionProfile(tuple(options))
    return PipelineProfile(classes, times.blocking_power_w)
