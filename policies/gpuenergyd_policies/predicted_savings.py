"""Predicted plans and savings for GPUs whose clocks may not be set.

The planner runs on the belief that a first plan is made from: published curves, a past job of the same model, and the
iterations at full speed. The plan is made for the mean curves; plans for curves drawn from the belief, widened by the
error of the measured iteration time, give the range of its saving. Where the saving is within that error, and where
no plan is better than full speed, full speed is predicted.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from statistics import NormalDist, fmean, stdev

import numpy as np

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.sustained_clock import sustained_clocks, sustained_text
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction
from gpuenergyd.core.pipeline.plan import (
    SAVING_HIGH,
    SAVING_LOW,
    ClockPlan,
    PlanPrediction,
    PlanPurpose,
    RankClocks,
    baseline_plan,
)
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.full_speed import permits_no_slowdown, reason_for_full_speed
from gpuenergyd_policies.learning.job_profile import learned_profile, newest_at_full_speed
from gpuenergyd_policies.learning.risk import NUM_DRAWS
from gpuenergyd_policies.learning.seen import NotEnoughDataError
from gpuenergyd_policies.observed_pipeline import contradiction, observed_graph, observed_pipeline
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_policies.planning.problem import Effort
from gpuenergyd_policies.planning.switching.requests import clock_changes
from gpuenergyd_policies.planning.switching.simulation import simulate_switching

Planner = Callable[[DependencyGraph, PipelineProfile, float], dict[Instruction, int]]
"""A function from graph, profile and deadline to a clock for each instruction that meets the deadline."""
BASIS = "measured at full speed only; lower clocks assumed from published curves of data-centre GPUs"
_RANGE = 0.025, 0.975
"""Quantiles that bound the range of the savings of drawn curves, and of the mean iteration time."""


def predicted_plan(view: JobView, planner: Planner) -> ClockPlan:
    """Return the plan for likely curves and the range of its saving; the baseline plan without enough measurements.

    Where no more is saved than times may be wrong by, the plan leaves all clocks alone.
    """
    reason = reason_for_full_speed(view)
    if reason is not None and not permits_no_slowdown(view):
        return baseline_plan("predicted", reason=f"savings cannot be predicted: {reason}")
    if reason is not None and view.baseline.energy_j is not None:
        return _at_full_speed(view, view.baseline.energy_j, reason.partition(": ")[2])
    try:
        seen = newest_at_full_speed(view)
        fitted = learned_profile(seen, (), view.gpus, view.past_jobs)
        error_ratio = _error_ratio(seen)
    except NotEnoughDataError as error:
        return baseline_plan("predicted", reason=f"savings cannot be predicted: {error}")
    if (reason := contradiction(view, observed_graph(view), fitted.profile)) is not None:
        return baseline_plan("predicted", reason=f"savings cannot be predicted: {reason}")
    at_limit = sustained_text(sustained_clocks(seen))
    basis = BASIS + fitted.past_jobs_text + (at_limit and f"; {at_limit}")
    likely = replace(_planned(view, planner, fitted.profile), reason=basis)
    saving_ratio = _saving_ratio(likely)
    drawn = fitted.curves.drawn(NUM_DRAWS, np.random.default_rng(0))
    savings = [saving_ratio, *(_saving_ratio(_planned(view, planner, profile)) for profile in drawn)]
    low, high = (float(bound) for bound in np.quantile(savings, _RANGE))
    if saving_ratio <= error_ratio:
        assert likely.predicted is not None
        assert likely.predicted.baseline_energy_j is not None
        likely, low = _at_full_speed(view, likely.predicted.baseline_energy_j, basis), 0.0
    low, high = max(0.0, min(low, saving_ratio) - error_ratio), max(high, saving_ratio) + error_ratio
    return replace(likely, figures=((SAVING_LOW, low), (SAVING_HIGH, high)))


def cheapest_clocks(graph: DependencyGraph, profile: PipelineProfile, deadline_s: float) -> dict[Instruction, int]:
    """Return the clocks of the exact frontier at a deadline, one for each instruction."""
    solved = solve(graph, profile, deadline_s=deadline_s, effort=Effort.QUICK)
    return dict(zip(graph.instructions, solved.sm_clocks_mhz, strict=True))


def _at_full_speed(view: JobView, energy_j: float, reason: str) -> ClockPlan:
    time_s = view.baseline.iteration_time_s
    predicted = PlanPrediction(time_s, energy_j, baseline_time_s=time_s, baseline_energy_j=energy_j)
    return ClockPlan("predicted", PlanPurpose.PREDICTED, predicted=predicted, reason=reason)


def _error_ratio(seen: Sequence[IterationObservation]) -> float:
    """Return the error of the mean iteration time at full speed, which a plan may take for time to spare.

    Raises:
        NotEnoughDataError: fewer than two iterations were measured.
    """
    times_s = [o.iteration_time_s for o in seen]
    if len(times_s) < 2:
        raise NotEnoughDataError("fewer than two iterations were measured at full speed")
    return NormalDist().inv_cdf(_RANGE[1]) * stdev(times_s) / (fmean(times_s) * sqrt(len(times_s)))


def _planned(view: JobView, planner: Planner, profile: PipelineProfile) -> ClockPlan:
    observed = observed_pipeline(view, profile)
    graph, bias_s = observed.graph, observed.bias_s
    full_speed = baseline(graph, profile)
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    clocks = planner(graph, profile, max(target_s - bias_s, min_iteration_time_s(graph, profile)))
    durations_s = [profile[i.instruction_class].at_clock(clocks[i]).time_s for i in graph.instructions]
    latencies = view.switch_latencies
    changes = clock_changes(timeline(graph, durations_s), clocks, latency=latencies, profile=profile)
    simulated = simulate_switching(graph, profile, changes, latency=latencies)
    waiting_j = profile.blocking_power_w * graph.num_ranks * bias_s
    return ClockPlan(
        plan_id="predicted",
        purpose=PlanPurpose.PREDICTED,
        ranks=tuple(
            RankClocks(pp_rank, tuple(clocks[i] for i in order), changes[pp_rank])
            for pp_rank, order in enumerate(view.schedule.orders)
        ),
        predicted=PlanPrediction(
            iteration_time_s=simulated.iteration_time_s + bias_s,
            energy_j=simulated.energy_j + waiting_j,
            baseline_time_s=view.baseline.iteration_time_s,
            baseline_energy_j=full_speed.energy_j + waiting_j,
        ),
    )


def _saving_ratio(plan: ClockPlan) -> float:
    assert plan.predicted is not None
    assert plan.predicted.baseline_energy_j is not None
    return max(0.0, 1 - plan.predicted.energy_j / plan.predicted.baseline_energy_j)
