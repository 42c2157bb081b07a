"""Events of a job, which its state machine handles, and the commands that it returns."""

from dataclasses import dataclass, field
from enum import StrEnum

from gpuenergyd.core.job.operator_orders import OperatorOrders
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import ObservedSpan, RankIteration
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.learned_curves import LearnedCurves
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.pipeline.reorder import OrderAdvice, RankMemory, ReorderOffer
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import GpuView, JobView
from gpuenergyd.core.policy_api.target import PerformanceTarget


class JobPhase(StrEnum):
    """Phase of a job; docs/reference/job-states.md shows the transitions."""

    JOINING = "joining"
    """Some ranks have not registered yet."""
    WARMUP = "warmup"
    """First iterations, which are not measured."""
    BASELINE = "baseline"
    """Full-speed iterations to which all savings refer."""
    TRIAL = "trial"
    """The policy tries settings, or waits until the time account can pay for trying them."""
    TUNED = "tuned"
    """A plan from the policy is in force."""
    FALLBACK = "fallback"
    """Back at full speed after a finding of the guard or a failure."""
    PAUSED = "paused"
    """At full speed by order of an operator, until the job is resumed."""
    ENDED = "ended"
    """A rank was released or lost; the job handles no more events."""

    @classmethod
    def _missing_(cls, value: object) -> "JobPhase | None":
        """Return the phase that versions up to 0.3 called profiling, for jobs that they hand over."""
        return cls.TRIAL if value == "profiling" else None


# --- events -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A training process registered as one rank of a pipeline stage."""

    pp_rank: int
    order: tuple[Instruction, ...]
    gpu: GpuView
    stage_rank: int = 0
    reorder: ReorderOffer = field(default_factory=ReorderOffer)


@dataclass(frozen=True, slots=True)
class RankChangedMicrobatches:
    """A rank runs a different number of microbatches from now on, for example in a ramp-up of the batch size."""

    pp_rank: int
    order: tuple[Instruction, ...]
    num_microbatches: int
    stage_rank: int = 0


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank finished an iteration."""

    report: RankIteration


@dataclass(frozen=True, slots=True)
class IterationObserved:
    """The GPUs' energy for an iteration is known; the response to `ObserveIteration`."""

    observation: IterationObservation
    began_mono_ns: int = 0
    spans: tuple[ObservedSpan, ...] = ()
    """The instructions of all ranks with their times and clocks."""
    least_other_overhead_s: float | None = None
    """Shortest time that any other replica of the training spends outside its instructions; None if unknown."""


@dataclass(frozen=True, slots=True)
class MergedIterationObserved:
    """An iteration merged from the daemons of several hosts; `plan_epoch` is None if the ranks' plans differ."""

    observation: IterationObservation
    plan_epoch: int | None
    least_other_overhead_s: float | None = None
    """See `IterationObserved`."""


@dataclass(frozen=True, slots=True)
class PlanDecided:
    """The policy returned a plan."""

    plan: ClockPlan


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """The policy raised, took too long or returned an invalid answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class GpuViewChanged:
    """A property of a rank's GPU was measured, for example its clock switch latency."""

    pp_rank: int
    gpu: GpuView
    stage_rank: int = 0


@dataclass(frozen=True, slots=True)
class PastJobsFound:
    """The history database holds curves of earlier jobs that this one may resemble."""

    jobs: tuple[PastJob, ...]


@dataclass(frozen=True, slots=True)
class ControlLost:
    """Clocks of this job cannot be set for now: the GPU worker died, a GPU was lost, or permission is missing."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrialPermissionChanged:
    """Trials of the job were permitted or forbidden; `refusal` is the reason if forbidden, None if permitted."""

    refusal: str | None


@dataclass(frozen=True, slots=True)
class TargetChanged:
    """The job has a new performance target; a straggler's pace and the host's power budget stay in effect."""

    target: PerformanceTarget


@dataclass(frozen=True, slots=True)
class OperatorOrdered:
    """An operator replaced the orders for the job; `reason` names the operator and the change."""

    orders: OperatorOrders
    reason: str


@dataclass(frozen=True, slots=True)
class StragglerChanged:
    """A slower replica makes this one wait for its iteration time, or no longer does (None)."""

    straggler_time_s: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaBlockBegins:
    """Another replica of the training runs a block at full speed from iteration `apply_at_iteration` on."""

    apply_at_iteration: int


@dataclass(frozen=True, slots=True)
class PowerTargetChanged:
    """The host's power budget requires this iteration time; None permits full speed."""

    power_time_s: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class PowerCutChanged:
    """Clocks are now lower than planned because the host's power exceeds its budget, or no longer are."""

    is_cut: bool


@dataclass(frozen=True, slots=True)
class RankReleased:
    """A rank's process released the rank or ended without a known failure."""

    pp_rank: int
    stage_rank: int = 0
    how: str = "was released"


@dataclass(frozen=True, slots=True)
class StageMemoryChanged:
    """A stage of a pipeline across hosts has reported the memory of its ranks; None if unknown."""

    pp_rank: int
    memory: RankMemory | None


@dataclass(frozen=True, slots=True)
class OrdersRefused:
    """The job must not change its instruction order any more, because a GPU ran out of memory in another order."""

    reason: str
    is_remembered: bool = False
    """Whether the refusal is from an earlier run."""


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank's process failed or its lease expired."""

    pp_rank: int
    reason: str
    stage_rank: int = 0


Event = (
    RankJoined
    | RankChangedMicrobatches
    | RankReported
    | IterationObserved
    | MergedIterationObserved
    | PlanDecided
    | PolicyFailed
    | GpuViewChanged
    | PastJobsFound
    | ControlLost
    | TrialPermissionChanged
    | TargetChanged
    | OperatorOrdered
    | StragglerChanged
    | ReplicaBlockBegins
    | PowerTargetChanged
    | PowerCutChanged
    | StageMemoryChanged
    | OrdersRefused
    | RankReleased
    | RankLost
)


# --- commands ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObserveIteration:
    """Match the reports of one iteration with the GPUs' samples; `IterationObserved` returns the result.

    There is one report per stage: several ranks of a stage are merged, see `core/measurement/stages.py`.
    """

    ranks: tuple[RankIteration, ...]
    plan_id: str | None
    is_regular: bool


@dataclass(frozen=True, slots=True)
class AskPolicy:
    """Ask for a plan; the answer is `PlanDecided` or `PolicyFailed`."""

    view: JobView


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Send every rank its slice of a plan; a plan without ranks means full speed."""

    plan: ClockPlan
    plan_epoch: int
    apply_at_iteration: int
    num_iterations: int | None = None
    """Length of a block at full speed; the next command then sends the current plan again."""


@dataclass(frozen=True, slots=True)
class LeaseGpus:
    """Lease these GPUs before the first clock change; the lease records their state in the journal."""

    gpu_uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestoreGpus:
    """Restore the original state of these GPUs at once, and drop pending clock requests."""

    gpu_uuids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RecordIteration:
    """Record an iteration in the history, as classified by the state machine."""

    observation: IterationObservation
    purpose: PlanPurpose | None
    """None for an iteration in which ranks followed different plans."""
    began_mono_ns: int
    spans: tuple[ObservedSpan, ...]


@dataclass(frozen=True, slots=True)
class RecordPhase:
    """Record that the job entered another phase."""

    phase: JobPhase
    reason: str


@dataclass(frozen=True, slots=True)
class RecordNotice:
    """Record an event that is not visible in the job's phase."""

    reason: str
    advice: OrderAdvice | None = None
    """Advice about the order of instructions, if this notice is one; shown in reports."""


@dataclass(frozen=True, slots=True)
class StoreOrderRefusal:
    """Store, for all later runs, why the job must not run another order of instructions."""

    reason: str


@dataclass(frozen=True, slots=True)
class StoreCurves:
    """Store the curves measured in this job, for later jobs."""

    learned: LearnedCurves


@dataclass(frozen=True, slots=True)
class EndJob:
    """Finish the job: it handles no more events."""

    reason: str


Command = (
    ObserveIteration
    | AskPolicy
    | SendPlan
    | LeaseGpus
    | RestoreGpus
    | RecordIteration
    | RecordPhase
    | RecordNotice
    | StoreOrderRefusal
    | StoreCurves
    | EndJob
)
