"""The model that a job's pipeline is planned with: fitted profile, dependency graph, and time outside the graph."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, one_forward_one_backward
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.timeline import iteration_energy_j, makespan_s
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView
from gpuenergyd.core.policy_api.previous_run import PREVIOUS_PROFILE
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.bubble_aware.waits import with_recent_waits
from gpuenergyd_policies.observed_pipeline import observed_graph, observed_pipeline
from gpuenergyd_policies.planning.frontier import frontier
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.switching.simulation import simulate_switching
from gpuenergyd_policies.profiling.calls import CallCost
from gpuenergyd_policies.profiling.fit import FittedProfile, NotEnoughDataError, fit_profile
from gpuenergyd_policies.profiling.prior.of_job import LearnedProfile, learned_profile
from gpuenergyd_policies.profiling.procedure import GOOD_REGRET_RATIO, FitQuality
from gpuenergyd_policies.profiling.regret import is_regret_at_most
from gpuenergyd_policies.profiling.rescaling import under_ceilings

_SIMULATED_INSTRUCTIONS = 200_000
"""Instructions of profiling iterations that are simulated before a plan: in large pipelines only of the last ones."""


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """Profile and dependency graph of a pipeline, with its baseline."""

    profile: PipelineProfile
    graph: DependencyGraph
    baseline_energy_j: float
    bias_s: float
    """Measured iteration time at full speed minus that of the graph."""
    latencies: tuple[SwitchLatency, ...]
    """Of each rank's GPU, with what calls cost this job."""
    calls: CallCost
    waiting_power: WaitingPower | None = None
    """Power of a waiting GPU by clock, as fitted to the job; None: as at the maximum clock."""

    @classmethod
    def of(
        cls,
        view: JobView,
        profile: PipelineProfile,
        calls: CallCost | None = None,
        waiting_power: WaitingPower | None = None,
    ) -> "PipelineModel":
        """Return the model of a job whose profile is known; calls cost nothing by default."""
        profile = with_recent_waits(profile, view)
        observed = observed_pipeline(view, profile)
        options = [profile[i.instruction_class].at_max_clock for i in observed.graph.instructions]
        energy_j = iteration_energy_j(
            energies_j=[option.energy_j for option in options],
            durations_s=[option.time_s for option in options],
            iteration_time_s=view.baseline.iteration_time_s,
            num_ranks=observed.graph.num_ranks,
            blocking_power_w=profile.blocking_power_w,
        )
        calls = calls or CallCost()
        latencies = tuple(
            replace(latency.delayed(calls.delay_s), stall_s=calls.stall_s) for latency in view.switch_latencies
        )
        return cls(profile, observed.graph, energy_j, observed.bias_s, latencies, calls, waiting_power)

    @property
    def bias_energy_j(self) -> float:
        """Energy of all GPUs waiting during `bias_s`."""
        return self.profile.blocking_power_w * self.graph.num_ranks * self.bias_s

    def frontier(self, *, until_slowest: bool = False) -> tuple[FrontierPoint, ...]:
        """Return the time-energy frontier as real iterations would measure it, `bias_s` included.

        With `until_slowest` it goes on beyond the time of least energy, where power still falls.
        """
        return tuple(
            FrontierPoint(
                point.iteration_time_s + self.bias_s,
                point.energy_j + self.bias_energy_j,
                None if point.lower_bound_j is None else point.lower_bound_j + self.bias_energy_j,
            )
            for point in frontier(self.graph, self.profile, until_slowest=until_slowest).points
        )

    def profiling_excess_s(self, view: JobView) -> float:
        """Return the median time by which profiling iterations exceed the model.

        A graph of instructions misses other couplings of the ranks (sends that wait for their receiver, bursts of clock
        changes). At full speed little of that shows; in a plan that uses all slack, all of it does.
        """
        profiling_plans = {p.plan_id: p for p in view.issued_plans if p.purpose is PlanPurpose.PROFILE and not p.orders}
        excesses_s = []
        affordable = _SIMULATED_INSTRUCTIONS // len(self.graph.instructions)
        profiling = [o for o in view.observations if o.is_regular and o.plan_id in profiling_plans]
        for observation in profiling[-max(TUNING.min_simulated_iterations, affordable) :]:
            plan = profiling_plans[observation.plan_id or ""]
            changes = tuple(plan.changes_of(r) for r in range(self.graph.num_ranks))
            simulated = simulate_switching(self.graph, self.profile, changes, latency=self.latencies)
            excesses_s.append(observation.own_time_s - simulated.iteration_time_s - self.bias_s)
        return median(excesses_s) if excesses_s else 0.0


class FittedJob:
    """What the iterations of one view show: each part is computed when it is first asked for, and only once.

    In a large pipeline a fit takes a second, a model another one. All parts raise NotEnoughDataError if the iterations
    do not determine a profile.
    """

    def __init__(self, view: JobView) -> None:
        self.view = view

    @cached_property
    def profiled(self) -> FittedProfile:
        """The profile fitted to profiling iterations."""
        return fit_profile(iterations_to_fit(self.view), self.view.gpus)

    @cached_property
    def fitted(self) -> FittedProfile | LearnedProfile:
        """The profile fitted to profiling iterations, or learned from plans if there are none."""
        view = self.view
        if was_profiled(view):
            return self.profiled
        tuned = {plan.plan_id for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED}
        planned = [o for o in view.observations if o.is_regular and o.plan_id in tuned]
        planned = planned[-TUNING.max_fitted_profiling_iterations :]
        return learned_profile(iterations_to_fit(view), planned, view.gpus, view.past_jobs)

    @cached_property
    def model(self) -> PipelineModel:
        """The model that plans are made with."""
        fitted = self.fitted
        waiting_power = fitted.waiting_power if isinstance(fitted, FittedProfile) else None
        return PipelineModel.of(self.view, under_ceilings(fitted.profile, self.view), fitted.calls, waiting_power)

    @cached_property
    def model_as_fitted(self) -> PipelineModel:
        """The model of GPUs that reach the clocks of the fit, whatever has become of them since."""
        if under_ceilings(self.fitted.profile, self.view) is self.fitted.profile:
            return self.model
        return PipelineModel.of(self.view, self.fitted.profile)


def fit_model(view: JobView) -> PipelineModel:
    """Return the model fitted to a job's iterations.

    Raises:
        NotEnoughDataError: the iterations do not determine a profile.
    """
    return FittedJob(view).model


def fitted_profile(view: JobView) -> FittedProfile | LearnedProfile:
    """Return the profile fitted to profiling iterations, or learned from plans if there are none.

    Raises:
        NotEnoughDataError: the iterations do not determine a profile.
    """
    return FittedJob(view).fitted


def was_profiled(view: JobView) -> bool:
    """Return whether the view has profiling iterations, of this run or of a previous one."""
    profiling = {plan.plan_id for plan in view.issued_plans if plan.purpose is PlanPurpose.PROFILE and not plan.orders}
    return any(o.plan_id in profiling or o.plan_id == PREVIOUS_PROFILE for o in view.observations)


def fit_quality(job: FittedJob) -> FitQuality:
    """Return the measurements to repeat, and whether a plan made from the iterations so far is expected to lose little.

    Too few iterations to fit anything are no good.
    """
    try:
        doubtful = job.profiled.doubtful
    except NotEnoughDataError:
        return FitQuality(frozenset(), is_good=lambda: False)
    return FitQuality(doubtful, is_good=lambda: _is_regret_small(job))


def _is_regret_small(job: FittedJob) -> bool:
    view, fitted = job.view, job.profiled
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    if (short := _short_graph(view)) is not None:
        times_s = [fitted.profile[i.instruction_class].at_max_clock.time_s for i in short.instructions]
        at_full_speed_s = makespan_s(short, times_s)
        deadline_s = at_full_speed_s * target_s / view.baseline.iteration_time_s
        return is_regret_at_most(GOOD_REGRET_RATIO, fitted, short, deadline_s=deadline_s)
    model = job.model_as_fitted
    return is_regret_at_most(GOOD_REGRET_RATIO, fitted, model.graph, deadline_s=target_s - model.bias_s)


def _short_graph(view: JobView) -> DependencyGraph | None:
    """Return the graph of the same pipeline with few microbatches, if it is large and regular; None otherwise.

    What errors of the profile cost hardly depends on the number of microbatches, and is computed for many profiles.
    """
    schedule = view.schedule
    num_microbatches = TUNING.rounds_of_short_pipeline * schedule.num_ranks
    if sum(map(len, schedule.orders)) <= TOO_LARGE or schedule.num_microbatches <= num_microbatches:
        return None
    if schedule.orders != one_forward_one_backward(schedule.num_ranks, schedule.num_microbatches).orders:
        return None
    return observed_graph(replace(view, schedule=one_forward_one_backward(schedule.num_ranks, num_microbatches)))


def iterations_to_fit(view: JobView) -> list[IterationObservation]:
    """Return profiling iterations, and some at full speed from the first to the last.

    Tuned iterations are left out: they would add clocks measured once or twice, which the planner would pick for errors
    in their favour.
    """
    purpose_of = {plan.plan_id: plan.purpose for plan in view.issued_plans}
    purpose_of[PREVIOUS_PROFILE] = PlanPurpose.PROFILE
    reordered = {plan.plan_id for plan in view.issued_plans if plan.orders}
    regular = [o for o in view.observations if o.is_regular and o.plan_id not in reordered]
    profiling = [o for o in regular if purpose_of.get(o.plan_id or "") is PlanPurpose.PROFILE]
    full_speed = [o for o in regular if purpose_of.get(o.plan_id or "", PlanPurpose.BASELINE) is PlanPurpose.BASELINE]
    step = max(1, math.ceil(len(full_speed) / TUNING.max_fitted_full_speed_iterations))
    fitted = profiling[-TUNING.max_fitted_profiling_iterations :] + full_speed[::step]
    return sorted(fitted, key=lambda o: o.iteration_index)
