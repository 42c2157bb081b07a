"""What is written to the history, as frozen values; each names its table and gives its row."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpuenergyd.core.carbon.intensity import CarbonForecast, EmissionFactor, IntensityBasis, SampleStatus, SignalKind
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose

MAX_REASON_CHARS = 1024


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job began."""

    job_id: str
    job_name: str
    run_key: str
    dp_rank: int
    policy: str
    schedule_name: str
    framework: str
    is_simulated: bool
    num_ranks: int
    num_microbatches: int
    max_slowdown_ratio: float
    uid: int
    started_at: datetime
    tags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class JobEndRecord:
    """A job is over."""

    job_id: str
    ended_at: datetime
    end_reason: str


@dataclass(frozen=True, slots=True)
class JobResumedRecord:
    """A job that was taken for ended with its daemon goes on under the next."""

    job_id: str


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A training process joined a job."""

    job_id: str
    pp_rank: int
    gpu_uuid: str
    gpu_model_name: str
    pid: int
    uid: int
    joined_at: datetime


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """What one iteration took and cost; without `spans` its timeline is not kept."""

    job_id: str
    iteration_index: int
    started_at: datetime
    iteration_time_s: float
    energy_j: float | None
    plan_id: str | None
    plan_purpose: PlanPurpose | None
    is_regular: bool
    spans: tuple[ObservedSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan was given to the ranks of a job."""

    job_id: str
    plan_epoch: int
    plan: ClockPlan
    issued_at: datetime
    apply_at_iteration: int


@dataclass(frozen=True, slots=True)
class ControlEventRecord:
    """Somebody changed something: who, what, why, before and after."""

    at: datetime
    action: str
    actor: str
    job_id: str | None
    gpu_uuid: str | None
    reason: str
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class RollupRecord:
    """What one GPU did in one bucket of time for one job (empty: for nobody).

    `energy_j` was measured, during `measured_s`; `estimated_j` was not, during `estimated_s`; of `missing_s` nothing is
    known. Buckets of one second are packed a minute at a time.
    """

    bucket_s: int
    gpu_uuid: str
    started_at: datetime
    job_id: str
    energy_j: float | None
    mean_power_w: float | None
    max_power_w: float | None
    mean_sm_clock_mhz: float | None
    num_samples: int
    estimated_j: float | None = None
    measured_s: float = 0.0
    estimated_s: float = 0.0
    missing_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostRollupRecord:
    """What one domain of the host (a processor package, its memory) used in one bucket of time.

    `energy_j` was measured, during `measured_s`; of `missing_s` nothing is known.
    """

    bucket_s: int
    started_at: datetime
    domain: str
    energy_j: float | None
    measured_s: float
    missing_s: float


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One raw sample of one GPU; `total_energy_j` is the counter as it stood at its newest update."""

    gpu_uuid: str
    at: datetime
    power_w: float | None
    total_energy_j: float | None
    sm_clock_mhz: int | None
    temperature_celsius: float | None


@dataclass(frozen=True, slots=True)
class IntensityRecord:
    """What the grid emitted from `valid_from` until before `valid_to`, by the host's time.

    `grid_from` is the begin by the grid's time: another instant only where a past trace is lived again at speed.
    """

    zone: str
    source: str
    kind: SignalKind
    factor: EmissionFactor
    status: SampleStatus
    valid_from: datetime
    valid_to: datetime
    grid_from: datetime
    carbon_intensity_g_per_kwh: float
    fetched_at: datetime


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """A forecast as it was issued, by the grid's time."""

    forecast: CarbonForecast


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """Another performance is owed to a job; `permitted_time_s` None is full speed.

    `frontier` holds the job's `(iteration_time_s, energy_j)` points where they have changed, else nothing.
    """

    job_id: str
    decided_at: datetime
    policy: str
    permitted_time_s: float | None
    reason: str
    basis: IntensityBasis
    intensity: float | None
    unit: str
    slowdown_so_far_ratio: float | None
    budget_ratio: float
    host_power_w: float
    frontier: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What a run of a job showed, for the next run of the same `signature`; an empty `model` is a forgotten one."""

    signature: str
    job_id: str
    learned_at: datetime
    model: bytes


Record = (
    JobRecord
    | JobEndRecord
    | JobResumedRecord
    | RankRecord
    | IterationRecord
    | PlanRecord
    | ControlEventRecord
    | RollupRecord
    | HostRollupRecord
    | SampleRecord
    | IntensityRecord
    | ForecastRecord
    | TargetRecord
    | ModelRecord
)


def fields_of(record: Record) -> dict[str, Any]:
    """Return a record's fields by name."""
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}
