"""The plugin API of policies: Protocols, and the frozen views and results that they exchange. No I/O.

The policy host creates one instance per job and may be killed at any moment. A view therefore contains everything that
is known about the job. A policy must work without state between calls; it may keep caches, but only for speed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.fitted import FittedPipeline
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, Schedule
from gpuenergyd.core.pipeline.learned_curves import LearnedCurves
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.power_swing import PlannedSwing
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.reorder import OrderAdvice, RankMemory
from gpuenergyd.core.pipeline.switching import SwitchLatency, constant_latency
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.target import PerformanceTarget


class Lever(StrEnum):
    """Setting that a plan may change to save energy."""

    CLOCKS = "clocks"
    POWER_LIMITS = "power-limits"
    POWER_PROFILES = "power-profiles"


class ClockPolicy(Protocol):
    """Plans the clocks of one job. Entry point: `gpuenergyd.policies`.

    Constructed without arguments, or with options given as strings after its name, as in `cost:eta=0.7`.
    """

    def next_plan(self, view: "JobView") -> ClockPlan:
        """Return the plan to run next; the `plan_id` of the last issued plan means no change.

        Some plans are only prepared and never issued. The issued ones are in the view.
        """
        ...


class FrontierPolicy(Protocol):
    """Optional method of a clock policy: predicts the job's frontier. Without it, only measured points are used."""

    def frontier(self, view: "JobView") -> tuple["FrontierPoint", ...]:
        """Return points of the job's time-energy frontier, as iterations would measure them; empty while unknown."""
        ...


class PowerFrontierPolicy(Protocol):
    """Optional method of a clock policy: the frontier for a power budget. Without it, `FrontierPolicy` is used.

    Implement it if plans for a target with `power_time_s` become slower than the least-energy plan.
    """

    def power_frontier(self, view: "JobView") -> tuple["FrontierPoint", ...]:
        """Return the job's frontier down to the plan of least power; empty while unknown."""
        ...


class FittedPolicy(Protocol):
    """Optional method of a clock policy: its fitted model of a job, for `plan --job` and `explain --job`."""

    def fitted(self, view: "JobView") -> FittedPipeline | None:
        """Return the fitted profile, latencies and target of a job; None while too little is known."""
        ...


class PreparedPolicy(Protocol):
    """Optional method of a clock policy: does slow work ahead of its first plan, such as compiling.

    The daemon has it called in the planning process when a job with this policy registers, during the baseline.
    """

    def prepare(self, announce: Callable[[str], None]) -> str | None:
        """Prepare the process; return a lasting problem and its fix, separated by "; ", or None.

        Pass a short description of slow work to `announce`; `status` shows it while jobs wait for a plan.
        """
        ...


class OfflinePlanner(Protocol):
    """Plans a pipeline from tables. Entry point: `gpuenergyd.planners`, a callable with the same name as the policy."""

    def __call__(self, request: "OfflineRequest") -> "OfflinePlan":
        """Return a plan whose iteration time is at most the target's.

        Raises:
            TargetError: no plan is fast enough; the message names the fastest possible time.
        """
        ...


@dataclass(frozen=True, slots=True)
class GpuView:
    """The GPU of one pipeline stage; clocks are in descending order.

    If a stage has several ranks, its GPUs are merged into one: they follow one plan, and powers and energies are sums.
    """

    gpu_uuid: str
    model_name: str
    supported_sm_clocks_mhz: tuple[int, ...]
    switch_latency_s: float
    """Time from the request of a higher clock until it is effective, 90th percentile."""
    blocking_power_w: float | None = None
    """Power while waiting for a peer, as published for this GPU model; None if unknown."""
    switching: SwitchLatency | None = None
    """Latency by direction and clocks; None if only `switch_latency_s` is known."""
    num_gpus: int = 1
    """Number of GPUs of the stage, whose energies and waiting powers are summed."""
    host: str = ""
    """Host of the GPUs, whose driver changes one clock at a time; empty if unknown."""
    num_host_gpus: int = 0
    """Number of GPUs on that host used by jobs, this one included; 0 if unknown."""
    power_limit_range_w: tuple[float, float] | None = None
    """Lowest and default power limit of each GPU, in watts; None if unknown or if power cannot be limited."""
    power_profiles: tuple[int, ...] = ()
    """Numbers of the workload power profiles that each GPU offers."""
    foreign_power_profiles: tuple[int, ...] = ()
    """Numbers of the power profiles that other programs have requested."""

    @property
    def switch_latency(self) -> SwitchLatency:
        """Switch latency of this GPU, by direction and clocks if known, otherwise the same for all changes."""
        latency = self.switching or constant_latency(self.switch_latency_s)
        return replace(latency, num_calls=self.num_gpus, host=self.host)


@dataclass(frozen=True, slots=True)
class BaselineView:
    """Baseline of the job: medians over `num_iterations` regular iterations at full speed."""

    iteration_time_s: float
    energy_j: float | None
    num_iterations: int
    iteration_sigma_s: float = 0.0
    """Robust standard deviation of the iteration time."""


@dataclass(frozen=True, slots=True)
class ReorderView:
    """What is known about changing the instruction order of a running job."""

    is_allowed: bool = False
    """Whether the user allows it on all ranks."""
    refusal: str = ""
    """Why the order cannot change even if the user allows it; empty if it can."""
    memory: tuple[RankMemory | None, ...] = ()
    """Memory of each pipeline rank, on the GPU of its stage with the least room; None while unknown."""
    advice: OrderAdvice | None = None
    """The policy's last advice."""


@dataclass(frozen=True, slots=True)
class JobView:
    """Everything known about a job; `gpus[r]` is the GPU of pipeline rank r, or the merged GPUs of that stage."""

    job_id: str
    schedule: Schedule
    gpus: tuple[GpuView, ...]
    target: PerformanceTarget
    baseline: BaselineView
    observations: tuple[IterationObservation, ...]
    issued_plans: tuple[ClockPlan, ...]
    """Plans already sent, oldest first; the last one is in force or about to be. If there are hundreds, old plans
    without observations are left out."""
    communication_latency_s: float = 0.0
    """Median time from the end of an instruction to the start of a waiting instruction on another rank."""
    launch_gap_s: float = 0.0
    """Median time between two instructions of one rank if the second one's input was ready."""
    can_set_clocks: bool = True
    """False if clocks may not be set (mode observe, MIG, missing privilege). The policy then returns a plan with
    purpose `PREDICTED`, based on full speed and on published curves or past jobs, unless it uses another setting."""
    can_set_power_limits: bool = False
    """Whether plans may limit the power of GPUs that have a `power_limit_range_w`."""
    can_set_power_profiles: bool = False
    """Whether plans may request workload power profiles of GPUs that offer any."""
    generation: int = 0
    """Number of times that trials have started over; part of plan ids, so that none is used twice."""
    past_jobs: tuple[PastJob, ...] = ()
    """Curves of earlier jobs of this user, or imported ones, on this job's GPU model; newest first."""
    curves_before: LearnedCurves | None = None
    """Curves measured in this job before it last changed."""
    num_dropped_plans: Mapping[PlanPurpose, int] = field(default_factory=dict)
    """Number of plans of each purpose left out of `issued_plans`."""
    num_dp_ranks: int = 1
    """Number of processes of a plain loop that end each iteration together; 1 for pipelines. Each process is a job of
    its own, and its iteration times also depend on the others' clocks."""
    is_flattest: bool = False
    """Whether to choose the plan with the smallest power swing among plans of nearly the least energy; set by the
    policy itself, from its options."""
    may_try: bool = True
    """Whether a loop may exceed the permitted slowdown for a few iterations, to measure what that would save."""
    reorder: ReorderView = field(default_factory=ReorderView)
    """Whether plans may change the instruction order, and the memory available for it."""
    affordable_s: float | None = None
    """Worst-case time beyond full speed per iteration that the next trial may cost
    (`core/measurement/worst_case.py`); a more expensive plan waits until the job's time account can pay for it. 0: the
    job may not run trials. None: no limit."""

    @property
    def switch_latencies(self) -> tuple[SwitchLatency, ...]:
        """Switch latency of each stage's GPU, including the wait for driver calls of other jobs on its host.

        Other jobs are assumed to make as many calls per GPU as this one, at the same time, because replicas of a
        training change clocks together.
        """
        return tuple(
            replace(gpu.switch_latency, num_calls=math.ceil(gpu.num_gpus * self._share(gpu))) for gpu in self.gpus
        )

    def _share(self, gpu: GpuView) -> float:
        """Return the ratio of all GPUs in use on a host to those of this job."""
        on_host = [other for other in self.gpus if other.host == gpu.host]
        num_own = sum(other.num_gpus for other in on_host)
        return max(1.0, max(other.num_host_gpus for other in on_host) / num_own)

    @property
    def is_plain_loop(self) -> bool:
        """Whether the job is a loop without a pipeline: one rank with one instruction per iteration."""
        return [len(order) for order in self.schedule.orders] == [1]

    @property
    def has_waits(self) -> bool:
        """Whether the job has phases that wait for gradients or data."""
        return any(instruction.kind.is_wait for order in self.schedule.orders for instruction in order)

    def num_issued(self, purpose: PlanPurpose | None = None) -> int:
        """Return the number of plans already sent, with one purpose or with any."""
        kept = sum(purpose in {None, plan.purpose} for plan in self.issued_plans)
        return kept + sum(number for known, number in self.num_dropped_plans.items() if purpose in {None, known})

    def plan_id(self, name: str) -> str:
        """Return the id of a plan with this name in the current generation."""
        return f"{name}@{self.generation + 1}" if self.generation else name


@dataclass(frozen=True, slots=True)
class PowerCap:
    """Upper limit on the total power of a pipeline's GPUs, including waits."""

    power_w: float
    window_s: float = 0.0
    """Length of the windows over which mean power is limited; 0 limits power at every instant."""


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """Pipeline and options for planning without a daemon.

    `graph` is the original schedule; the target refers to its time with all instructions at maximum clock. `schedule`
    is None if the file defines its own graph. `options` are specific to the planner, by name, as given on the command
    line.
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
    reference_graph: DependencyGraph | None = None
    """The graph whose full speed is the reference of savings, usually 1F1B; None means `graph`."""
    order_limits: tuple[int, ...] = ()
    """If not empty, the planner also chooses the order, holding at most this many microbatches on each rank."""
    power_cap: PowerCap | None = None
    """If given, the plan is the fastest one within this cap, whatever the target."""
    is_flattest: bool = False
    """Whether to choose the plan with the smallest power swing among plans of nearly the least energy."""

    @property
    def baseline_graph(self) -> DependencyGraph:
        """The graph whose full speed is the reference of savings."""
        return self.reference_graph or self.graph


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """Point of the time-energy frontier: time and energy of a plan, with the proven lower bound of energy."""

    iteration_time_s: float
    energy_j: float
    lower_bound_j: float | None


@dataclass(frozen=True, slots=True)
class SwitchingFigures:
    """Simulated effect of the switch latency on a plan, compared with a plan with unlimited clock changes ("free").

    The changes in `changes[r]` are requested early. The free plan with early requests ("lead") costs only energy; the
    naive one, which requests each change when its instruction begins, costs time.
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
class LoweredWait:
    """A wait with a lowered clock: lowered when `instruction` ends, and raised ahead of the next instruction."""

    instruction: Instruction
    """The instruction before the wait; after a rank's last one, the wait extends into the next iteration."""
    sm_clock_mhz: int
    wait_s: float
    raised_s: float
    """Delay from the end of the instruction to the request of the next clock."""


@dataclass(frozen=True, slots=True)
class WaitingFigures:
    """Effect of clock-dependent waiting power: energy without lowered waits, and the waits that are lowered."""

    is_assumed: bool
    """Whether waiting power by clock is assumed instead of measured."""
    at_highest_clock_w: float
    least_w: float
    mean_w: float
    """Mean power while waiting under the plan."""
    kept_energy_j: float
    """Energy of the iteration if clocks are not lowered during waits."""
    lowered: tuple[LoweredWait, ...]


@dataclass(frozen=True, slots=True)
class PowerFigures:
    """Power of a plan under a cap, compared with the usual ways to stay below it."""

    cap: PowerCap
    peak_w: float
    """Maximum mean power in a window of the cap's length."""
    mean_w: float
    full_speed_peak_w: float
    time_bound_s: float
    """Proven lower bound: no clocks in this order stay below the cap in less time."""
    single_clock_time_s: float | None
    """Iteration time at the best single clock, locked on all GPUs; None if no measured clock fits."""
    equal_limits_time_s: float | None
    """Iteration time if each GPU stays below an equal share of the cap; None if no measured clock fits."""


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """Result of an offline planner: a clock for every instruction of `orders`, with time, energy and proven bound.

    With `switching`, time and energy include the switch latency.
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
    """Energy that one more second of slack would save, by instruction; empty if the planner does not compute it."""
    compile_cpu_s: float = 0.0
    """CPU time for compiling the planner's own code, not part of `solve_cpu_s`; 0 except at its first use."""
    own_order_time_s: float | None = None
    """Iteration time of the plan's own order at full speed; None if the planner does not compute it."""
    own_order_energy_j: float | None = None
    """Energy of the plan's own order at full speed, waiting included; None if the planner does not compute it."""
    stage_of_chunk: tuple[tuple[int, ...], ...] = ()
    """Model stage of each chunk of each rank; empty means chunk * ranks + rank."""
    waiting: WaitingFigures | None = None
    """None if waiting costs the same at all clocks."""
    power: PowerFigures | None = None
    """None without a power cap."""
    swing: PlannedSwing | None = None
    """Swing of the total power of all GPUs; None if the planner does not compute it."""
    any_order_bound_j: float | None = None
    """Proven lower bound for any order within the memory limits; None if not computed or too expensive. Waits are
    charged up to the end of each plan, or up to the straggler's time."""
