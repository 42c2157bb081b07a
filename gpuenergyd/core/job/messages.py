"""What happens to a job (events) and what shall be done about it (commands). Instants are host monotonic seconds."""

from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import GpuView, JobView
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd.core.policy_api.target import PerformanceTarget


class JobPhase(StrEnum):
    """Where a job stands."""

    JOINING = "joining"
    """Some ranks have not registered yet."""
    WARMUP = "warmup"
    """First iterations, which nobody should measure."""
    BASELINE = "baseline"
    """Un-tuned iterations that all savings will refer to."""
    PROFILING = "profiling"
    """The policy tries clocks."""
    TUNED = "tuned"
    """The policy saves energy."""
    FALLBACK = "fallback"
    """The guard or a failure took the job back to full speed."""
    ENDED = "ended"


# --- events: what happened -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankJoined:
    """A training process registered as one pipeline rank."""

    pp_rank: int
    order: tuple[Instruction, ...]
    gpu: GpuView


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank finished an iteration."""

    report: RankIteration


@dataclass(frozen=True, slots=True)
class IterationObserved:
    """The observation that `ObserveIteration` asked for."""

    observation: IterationObservation


@dataclass(frozen=True, slots=True)
class ObservedElsewhere:
    """An iteration whose ranks reported to their own hosts' daemons; `plan_epoch` None: not all followed one plan."""

    observation: IterationObservation
    plan_epoch: int | None


@dataclass(frozen=True, slots=True)
class PlanDecided:
    """The policy answered."""

    plan: ClockPlan


@dataclass(frozen=True, slots=True)
class PolicyFailed:
    """The policy raised, took too long or answered nonsense."""

    reason: str


@dataclass(frozen=True, slots=True)
class GpuViewChanged:
    """Something was learned about a rank's GPU: for instance how long its clock changes take."""

    pp_rank: int
    gpu: GpuView


@dataclass(frozen=True, slots=True)
class ModelRecalled:
    """The history knows an earlier run of this job."""

    model: PreviousRun


@dataclass(frozen=True, slots=True)
class ControlLost:
    """Clocks of this job cannot be set for now: worker gone, GPU lost, no permission."""

    reason: str


@dataclass(frozen=True, slots=True)
class ProfilingJudged:
    """Whether the job may be profiled: `refusal` says why not, None that it may."""

    refusal: str | None


@dataclass(frozen=True, slots=True)
class TargetChanged:
    """Another performance is owed from now on; what a straggler imposes stays as it is."""

    target: PerformanceTarget


@dataclass(frozen=True, slots=True)
class StragglerChanged:
    """Another replica of the training takes this long for an iteration, so this one waits; None: none does any more."""

    straggler_time_s: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class RankReleased:
    """A rank left in order."""

    pp_rank: int


@dataclass(frozen=True, slots=True)
class RankLost:
    """A rank's process died or its lease expired."""

    pp_rank: int
    reason: str


Event = (
    RankJoined
    | RankReported
    | IterationObserved
    | ObservedElsewhere
    | PlanDecided
    | PolicyFailed
    | GpuViewChanged
    | ModelRecalled
    | ControlLost
    | ProfilingJudged
    | TargetChanged
    | StragglerChanged
    | RankReleased
    | RankLost
)


# --- commands: what shall be done ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ObserveIteration:
    """Put the reports of one iteration together with the GPUs' samples; answer with `IterationObserved`."""

    ranks: tuple[RankIteration, ...]
    plan_id: str | None
    is_regular: bool


@dataclass(frozen=True, slots=True)
class AskPolicy:
    """Ask the policy; answer with `PlanDecided` or `PolicyFailed`."""

    view: JobView


@dataclass(frozen=True, slots=True)
class SendPlan:
    """Give every rank its slice of a plan; un-tuned when the plan has no ranks."""

    plan: ClockPlan
    plan_epoch: int
    apply_at_iteration: int


@dataclass(frozen=True, slots=True)
class LeaseGpus:
    """Take the right to change these GPUs and journal their state, before the first change."""

    gpu_uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestoreGpus:
    """Put these GPUs back as they were found, at once, and drop what is still wished for them."""

    gpu_uuids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class RecordPhase:
    """The job entered another phase."""

    phase: JobPhase
    reason: str


@dataclass(frozen=True, slots=True)
class RecordNotice:
    """Something was noticed of the job that its phase does not show."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeepModel:
    """Keep what this run has shown for the next one, in place of what is kept; None: forget that."""

    model: PreviousRun | None


@dataclass(frozen=True, slots=True)
class EndJob:
    """Nothing more will come of this job."""

    reason: str


Command = (
    ObserveIteration | AskPolicy | SendPlan | LeaseGpus | RestoreGpus | RecordPhase | RecordNotice | KeepModel | EndJob
)
