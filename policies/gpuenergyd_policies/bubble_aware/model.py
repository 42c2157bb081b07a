"""The model that a job's pipeline is planned with: fitted profile, dependency graph, and time outside the graph."""

from dataclasses import dataclass, replace
from functools import cached_property

from gpuenergyd.core.pipeline.graph import DependencyGraph
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.core.pipeline.waiting import WaitingPower
from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.calls import CallCost
from gpuenergyd_policies.learning.job_profile import LearnedProfile, learned_profile, newest_at_full_speed
from gpuenergyd_policies.observed_pipeline import observed_pipeline
from gpuenergyd_policies.planning.frontier import frontier
from gpuenergyd_policies.planning.plan_evaluation import baseline


@dataclass(frozen=True, slots=True)
class PipelineModel:
    """Profile and dependency graph of a pipeline, with its baseline."""

    profile: PipelineProfile
    graph: DependencyGraph
    baseline_energy_j: float
    """In the schedule's own order."""
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
        observed = observed_pipeline(view, profile)
        waiting_j = profile.blocking_power_w * observed.graph.num_ranks * observed.bias_s
        baseline_j = baseline(observed.graph, profile).energy_j + waiting_j
        calls = calls or CallCost.none()
        latencies = tuple(
            replace(latency.delayed(calls.delay_s), stall_s=calls.stall_s) for latency in view.switch_latencies
        )
        return cls(profile, observed.graph, baseline_j, observed.bias_s, latencies, calls, waiting_power)

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


class FittedJob:
    """What the iterations of one view show: each part is computed when it is first asked for, and only once.

    In a large pipeline a fit takes a second, a model another one. All parts raise NotEnoughDataError if the iterations
    do not determine a profile.
    """

    def __init__(self, view: JobView) -> None:
        self.view = view

    @cached_property
    def fitted(self) -> LearnedProfile:
        """The profile learned from iterations at full speed and under plans."""
        view = self.view
        slower = PlanPurpose.TUNED, PlanPurpose.TRIAL
        plans = {plan.plan_id for plan in view.issued_plans if plan.purpose in slower and not plan.orders}
        planned = [o for o in view.observations if o.is_regular and o.is_timed and o.plan_id in plans]
        newest = planned[-TUNING.max_fitted_planned_iterations :]
        return learned_profile(newest_at_full_speed(view), newest, view.gpus, view.past_jobs, view.curves_before)

    @cached_property
    def model(self) -> PipelineModel:
        """The model that plans are made with."""
        fitted = self.fitted
        return PipelineModel.of(self.view, fitted.profile, fitted.calls, fitted.curves.waiting_power)
