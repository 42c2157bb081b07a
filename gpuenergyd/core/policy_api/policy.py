"""The plugin API: what a policy is asked and what it answers. Frozen views in, values out, no I/O.

A policy is a class found by entry point in the group `gpuenergyd.policies`; one instance serves one job and lives
in the policy host, which may be killed at any moment. A view therefore carries everything that is known: a
policy that remembers nothing between calls is always right, one that caches is only faster.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from gpuenergyd.core.carbon.intensity import CarbonForecast, HourlySeries, IntensityBasis
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, Schedule
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.switching import SwitchLatency, constant_latency
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd.core.policy_api.target import PerformanceTarget


@dataclass(frozen=True, slots=True)
class GpuView:
    """One GPU as a policy sees it; clocks are descending."""

    gpu_uuid: str
    model_name: str
    supported_sm_clocks_mhz: tuple[int, ...]
    switch_latency_s: float
    """Time from asking for a faster clock until it is effective, 90th percentile as measured on this host so far."""
    blocking_power_w: float | None = None
    """Power while waiting for a peer, as published for this model; None when nothing is known."""
    switching: SwitchLatency | None = None
    """The same by direction and by clocks; None when only that one figure is known."""

    @property
    def switch_latency(self) -> SwitchLatency:
        """How long clock changes of this GPU take, as far as that is known."""
        return self.switching or constant_latency(self.switch_latency_s)


@dataclass(frozen=True, slots=True)
class BaselineView:
    """The un-tuned run of this very job: medians over `num_iterations` regular iterations."""

    iteration_time_s: float
    energy_j: float | None
    num_iterations: int
    iteration_sigma_s: float = 0.0
    """Spread of one iteration's time around the median (robust standard deviation): what chance can do."""


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything a clock policy may know of a job; `gpus[r]` is the GPU of pipeline rank r."""

    job_id: str
    schedule: Schedule
    gpus: tuple[GpuView, ...]
    target: PerformanceTarget
    baseline: BaselineView
    observations: tuple[IterationObservation, ...]
    issued_plans: tuple[ClockPlan, ...]
    """Plans sent so far, oldest first; the last is the one in force or about to be. Of hundreds, old ones that no
    observation names are left out, those that profiled last of all."""
    communication_latency_s: float = 0.0
    """Median time from the end of an instruction to the begin of the one on the next rank that waited for it."""
    launch_gap_s: float = 0.0
    """Median time between two instructions of one rank when the second had everything it needs."""
    can_set_clocks: bool = True
    """False where nobody may set clocks (mode observe, MIG, no privilege): what is asked for then is a plan of purpose
    `PREDICTED` with a prediction, from the full-speed run and from what a policy assumes or remembers."""
    generation: int = 0
    """How often what was learned of this job has been forgotten; plan ids carry it, so that none is used twice."""
    previous_run: PreviousRun | None = None
    """What an earlier run of this job showed; whether it still holds is for the policy to check at full speed."""
    num_dropped_plans: Mapping[PlanPurpose, int] = field(default_factory=dict)
    """How many plans of each purpose were left out of `issued_plans`."""

    def num_issued(self, purpose: PlanPurpose | None = None) -> int:
        """Return how many plans were sent so far, for one purpose or for any: what numbers the next one."""
        kept = sum(purpose in {None, plan.purpose} for plan in self.issued_plans)
        return kept + sum(number for own, number in self.num_dropped_plans.items() if purpose in {None, own})

    def plan_id(self, name: str) -> str:
        """Return the id of a plan that has this name in the present generation."""
        return f"{name}@{self.generation + 1}" if self.generation else name


class ClockPolicy(Protocol):
    """Decides the clocks of one job. Entry points: `gpuenergyd.policies`."""

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the plan to run next; a plan whose `plan_id` is the last issued one changes nothing."""
        ...


class FrontierPolicy(Protocol):
    """A clock policy that knows what else its job could run at; one that does not say leaves what was measured."""

    def frontier(self, view: JobView) -> tuple["FrontierPoint", ...]:
        """Return points of the job's time-energy frontier, as real iterations would measure; empty while unknown."""
        ...


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """A pipeline given as tables, for planning without a daemon.

    `baseline_graph` is the plain schedule, whose every instruction at maximum clock is the baseline; `graph` is the one
    to plan, None where the planner may choose it (extra in-flight microbatches). `options` are the planner's
    own, by name, as the command line gave them.
    """

    name: str
    profile: PipelineProfile
    schedule: Schedule | None
    graph: DependencyGraph
    target: PerformanceTarget
    extra_inflight: int | str | None = None
    max_switches: int | None = None
    switch_latency_s: float = 0.0
    want_frontier: bool = False
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A point of the time-energy frontier: a real plan's time and energy, and the proven least energy at that time."""

    iteration_time_s: float
    energy_j: float
    lower_bound_j: float | None


@dataclass(frozen=True, slots=True)
class SwitchingFigures:
    """What clock changes that take a while make of a plan, simulated; and the plan of free clocks beside it.

    `changes[r]` are asked for ahead of need. The free plan has no limit on its changes: with lead they cost energy
    only, naively (each asked for when its instruction begins) they cost time.
    """

    switch_latency_s: float
    num_segments: tuple[int, ...]
    changes: tuple[tuple[ClockChange, ...], ...]
    iteration_time_s: float
    energy_j: float
    free_lead_time_s: float
    free_lead_energy_j: float
    free_naive_time_s: float
    free_naive_energy_j: float


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """A planner's answer: clocks for every instruction, in `order`, with what they cost and a proven bound.

    With `switching`, time and energy are those with late clocks.
    """

    orders: tuple[tuple[Instruction, ...], ...]
    sm_clocks_mhz: Mapping[Instruction, int]
    baseline_time_s: float
    baseline_energy_j: float
    iteration_time_s: float
    energy_j: float
    lower_bound_j: float | None
    solve_cpu_s: float
    extra_inflight: tuple[int, ...] = ()
    frontier: tuple[FrontierPoint, ...] = ()
    switching: SwitchingFigures | None = None
    prices_w: Mapping[Instruction, float] = field(default_factory=dict)
    """What one more second of room for an instruction would save, per second; empty when the planner does not know."""


class OfflinePlanner(Protocol):
    """Plans a pipeline from tables. Entry points: `gpuenergyd.planners`, callables under the policies' names."""

    def __call__(self, request: OfflineRequest) -> OfflinePlan:
        """Return a plan whose iteration time is at most what the target owes.

        Raises:
            TargetError: no plan is fast enough; the message says what is possible.
        """
        ...


@dataclass(frozen=True, slots=True)
class TargetView:
    """Everything a target policy may know of a job: its budget, what it has spent, and a signal to follow.

    `frontier` holds the job's own points, or those of its uniform clocks where it has no pipeline; it is empty while
    nothing is known. `active_time_s` is the time of the iterations done, without checkpoints, evaluation, data
    stalls and waits for a straggler: only slowness that a policy chose is charged to the budget.
    """

    job_id: str
    now_at: datetime
    max_slowdown_ratio: float
    baseline: BaselineView
    num_iterations_done: int
    active_time_s: float
    frontier: tuple[FrontierPoint, ...] = ()
    num_iterations_total: int | None = None
    deadline_at: datetime | None = None
    history: HourlySeries | None = None
    """Of carbon intensity, price or another cost per energy, up to now."""
    forecast: CarbonForecast | None = None
    full_speed_time_s: float | None = None
    """Iteration time at full speed as measured lately, power caps included; None while only the baseline is known."""
    straggler_time_s: float | None = None
    current_target_time_s: float | None = None
    """What this policy asked for last; changes too small to matter are not worth a new plan."""
    host_power_w: float = 0.0
    window_s: float = 72 * 3600.0
    """A job without an end keeps its budget over windows of so much time."""


@dataclass(frozen=True, slots=True)
class TargetDecision:
    """A target and what it rests on."""

    target: PerformanceTarget
    reason: str
    basis: IntensityBasis
    intensity: float | None
    """The signal that stands for now, in its own unit."""
    overrun_s: float = 0.0
    """How much later than permitted the work ends at full speed, by others' doing: stragglers, caps, lost time."""


class TargetPolicy(Protocol):
    """Decides what performance is owed to one job, a few times an hour. Entry points: `gpuenergyd.targets`.

    A policy that also has `explain(view) -> TargetDecision` is asked that instead, and status shows its reasons.
    """

    def next_target(self, view: TargetView) -> PerformanceTarget:
        """Return the target from now on."""
        ...
