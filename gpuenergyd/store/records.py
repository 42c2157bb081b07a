"""The values written to the history; queries return some of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

from gpuenergyd.core.carbon.intensity import (
    CarbonForecast,
    CarbonSignal,
    EmissionFactor,
    IntensityBasis,
    SampleStatus,
    SignalKind,
)
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose

MAX_REASON_CHARS = 1024


def pipeline_id_of(leader_job_id: str) -> str:
    """Return the id for the estimate and targets of a whole pipeline across hosts, whose jobs are only its members."""
    return f"{leader_job_id}-whole"


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The start of a job."""

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
    energy_scope: str | None = None
    """What its GPUs' energy counters cover, an `EnergyScope`; None if an earlier version recorded the job."""


@dataclass(frozen=True, slots=True)
class JobEndRecord:
    """The end of a job."""

    job_id: str
    ended_at: datetime
    end_reason: str
    outcome: str = ""
    """Kind of the job's outcome; empty if unknown."""
    outcome_reason: str = ""


@dataclass(frozen=True, slots=True)
class JobResumedRecord:
    """A job recorded as ended continues, because a restarted daemon took it over."""

    job_id: str


@dataclass(frozen=True, slots=True)
class RankRecord:
    """A training process that joined a job."""

    job_id: str
    pp_rank: int
    gpu_uuid: str
    gpu_model_name: str
    pid: int
    uid: int
    joined_at: datetime
    stage_rank: int = 0
    """Index of the rank among the tensor-, context- and expert-parallel ranks of its stage."""


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """Time and energy of one iteration; its timeline is stored only if `spans` are given.

    `energy_low_j` and `energy_high_j` are the 95 % interval of an estimated energy, None for a measured one.
    """

    job_id: str
    iteration_index: int
    started_at: datetime
    iteration_time_s: float
    energy_j: float | None
    plan_id: str | None
    plan_purpose: PlanPurpose | None
    is_regular: bool
    spans: tuple[ObservedSpan, ...] = ()
    energy_low_j: float | None = None
    energy_high_j: float | None = None


@dataclass(frozen=True, slots=True)
class EstimateRecord:
    """The daemon's newest estimate of what a job's plans save; it replaces the previous one."""

    job_id: str
    since_iteration: int
    """First iteration included; earlier ones ran before the job changed."""
    baseline_time_s: float
    baseline_energy_j: float | None
    iteration_time_s: float | None
    energy_per_iteration_j: float | None
    num_compared_baseline_iterations: int | None
    num_compared_tuned_iterations: int | None
    saving_ratio: float | None
    saving_low_ratio: float | None
    saving_high_ratio: float | None
    slowdown_ratio: float | None
    slowdown_low_ratio: float | None
    slowdown_high_ratio: float | None
    cost_s: float | None = None
    """Time that the daemon has cost the job's training; None if not measured."""
    cost_ratio: float | None = None
    num_experiments: int | None = None
    num_tokens: int | None = None
    """Tokens of measured iterations; None if the program does not report them."""
    tokens_energy_j: float | None = None


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """A plan issued to the ranks of a job; the same plan may be issued more than once."""

    job_id: str
    plan_epoch: int
    plan: ClockPlan
    issued_at: datetime
    apply_at_iteration: int


ORDER_ADVICE, SLOWDOWN_ADVICE = "order_advice", "slowdown_advice"
"""Actions of log entries with advice about the instruction order and the permitted slowdown; reports show the newest of
each."""


@dataclass(frozen=True, slots=True)
class ControlEventRecord:
    """One entry of the audit log: who changed what, why, and the values before and after."""

    at: datetime
    action: str
    actor: str
    job_id: str | None
    gpu_uuid: str | None
    reason: str
    before: str = ""
    after: str = ""


class RollupRecord(NamedTuple):
    """Energy, power and clock of one GPU in one time bucket for one job; an empty `job_id` means idle.

    `energy_j` was measured during `measured_s`, `estimated_j` estimated during `estimated_s`; for `missing_s` there is
    no reading. `assumed_host_j` is the GPU's share of the energy assumed for the rest of its host. It is None if there
    is none, and in one-second buckets, which are packed by minute. This is a named tuple, because creating a dataclass
    takes four times as long, and reports read thousands of these.
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
    assumed_host_j: float | None = None


@dataclass(frozen=True, slots=True)
class HostRollupRecord:
    """Energy of one RAPL domain of the host (a processor package, its memory) in one time bucket.

    `energy_j` was measured during `measured_s`; for `missing_s` there is no reading.
    """

    bucket_s: int
    started_at: datetime
    domain: str
    energy_j: float | None
    measured_s: float
    missing_s: float


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """One raw sample of one GPU; `total_energy_j` is the energy counter at its latest update.

    Values read back are rounded to the resolution of the packed series.
    """

    gpu_uuid: str
    at: datetime
    power_w: float | None
    total_energy_j: float | None
    sm_clock_mhz: float | None
    temperature_celsius: float | None


@dataclass(frozen=True, slots=True)
class IntensityRecord:
    """The carbon intensity from `valid_from` until before `valid_to`, in host time.

    `grid_from` is the start in grid time; it differs from `valid_from` only while a past trace is replayed.
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
class EstimatesWithdrawn:
    """Deletes the stored estimates of a carbon signal, because the provider has declared them fictitious."""

    signal: CarbonSignal


@dataclass(frozen=True, slots=True)
class ForecastRecord:
    """A carbon intensity forecast as issued, in grid time."""

    forecast: CarbonForecast


@dataclass(frozen=True, slots=True)
class TargetRecord:
    """A new iteration time target of a job; `permitted_time_s` None means full speed.

    `frontier` holds the job's `(iteration_time_s, energy_j)` points if they have changed since the previous target.
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
class PastJobRecord:
    """Data that a job leaves for later jobs, under its key `signature`; an empty `model` deletes it."""

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
    | EstimateRecord
    | PlanRecord
    | ControlEventRecord
    | RollupRecord
    | HostRollupRecord
    | SampleRecord
    | IntensityRecord
    | EstimatesWithdrawn
    | ForecastRecord
    | TargetRecord
    | PastJobRecord
)


def merge_rollups(parts: Sequence[RollupRecord]) -> RollupRecord:
    """Return the sum of several rollups of one bucket, since a job may leave a GPU and return within it."""
    if len(parts) == 1:
        return parts[0]
    return parts[0]._replace(
        energy_j=known_sum(part.energy_j for part in parts),
        mean_power_w=_weighted_mean([(part.mean_power_w, part.num_samples) for part in parts]),
        max_power_w=max((part.max_power_w for part in parts if part.max_power_w is not None), default=None),
        mean_sm_clock_mhz=_weighted_mean([(part.mean_sm_clock_mhz, part.num_samples) for part in parts]),
        num_samples=sum(part.num_samples for part in parts),
        estimated_j=known_sum(part.estimated_j for part in parts),
        measured_s=sum(part.measured_s for part in parts),
        estimated_s=sum(part.estimated_s for part in parts),
        assumed_host_j=known_sum(part.assumed_host_j for part in parts),
        missing_s=sum(part.missing_s for part in parts),
    )


def merge_host_rollups(parts: Sequence[HostRollupRecord]) -> HostRollupRecord:
    """Return the sum of several rollups of one bucket and domain."""
    return replace(
        parts[0],
        energy_j=known_sum(part.energy_j for part in parts),
        measured_s=sum(part.measured_s for part in parts),
        missing_s=sum(part.missing_s for part in parts),
    )


def known_sum(values: Iterable[float | None]) -> float | None:
    """Return the sum of those values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _weighted_mean(values: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in values if value is not None]
    total = sum(weight for _, weight in known)
    if not total:
        return known[0][0] if known else None
    return sum(value * weight for value, weight in known) / total
