"""Messages of operators' commands: changes and fits of running jobs, past jobs, and released GPUs.

HTTP/1.1 with JSON bodies on the daemon's Unix socket; (A) is for administrators:

    PATCH /v1/jobs/{job_id}       JobPatch           -> JobPatched
    GET   /v1/jobs/{job_id}/fit                      -> JobFit
    POST  /v1/gpus/release        GpuRelease         -> GpusReleased      (A)
    POST  /v1/gpus/reopen         GpuReopen          -> GpusReleased      (A)
    GET   /v1/past-jobs                              -> PastJobList       own and imported ones
    GET   /v1/past-jobs/all                          -> PastJobList       of all users (A)
    POST  /v1/past-jobs/import    PastJobFile        -> PastJobsChanged   (A)
    POST  /v1/past-jobs/forget    PastJobsForget     -> PastJobsChanged
    POST  /v1/energy              CounterQuery       -> CounterReadings
"""

from dataclasses import dataclass, fields

from gpuenergyd.core.pipeline.fitted import FittedPipeline
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.errors import UsageError
from gpuenergyd.wire import MAX_CONTROL_MESSAGE_BYTES
from gpuenergyd.wire.daemon_codec import decode


@dataclass(frozen=True, slots=True)
class JobPatch:
    """Changes of a running job; null leaves a value as it is."""

    policy: str | None = None
    max_slowdown_ratio: float | None = None
    priority: int | None = None
    """Priority among the jobs of the host, 0 highest (administrators)."""
    is_paused: bool | None = None
    """Whether the job runs at full speed with its GPUs restored, until it is resumed."""
    is_released: bool = False
    """Withdraws all earlier orders, so that the values of the job's registration apply again."""


@dataclass(frozen=True, slots=True)
class JobPatched:
    """A job after a change; `changes` has one text per changed value, e.g. `priority 0 -> 2`."""

    job_id: str
    job_name: str
    phase: str
    policy: str
    max_slowdown_ratio: float
    priority: int
    is_paused: bool
    changes: tuple[str, ...]


def decode_job_patch(body: bytes) -> JobPatch:
    """Return a change of a job.

    Raises:
        ProtocolError: the body is not a JSON object of this form.
        UsageError: a key is unknown, or nothing is to be changed.
    """
    patch = decode(body, JobPatch, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
    names = [field.name for field in fields(JobPatch)]
    given = decode(body, dict, max_bytes=MAX_CONTROL_MESSAGE_BYTES)
    for key in given:
        if key not in names:
            raise UsageError(f"unknown key {str(key)[:100]!r}; valid: {', '.join(names)}")
    if patch == JobPatch():
        raise UsageError(f"nothing to change: give one of {', '.join(names)}")
    if patch.is_released and patch != JobPatch(is_released=True):
        raise UsageError("is_released withdraws all orders, and cannot be combined with another change")
    return patch


@dataclass(frozen=True, slots=True)
class JobFit:
    """The fitted pipeline of a job and the plan in force; a plan without ranks means full speed."""

    job_id: str
    job_name: str
    policy: str
    phase: str
    phase_reason: str
    plan: ClockPlan
    fitted: FittedPipeline


ALL_GPUS = "all"


@dataclass(frozen=True, slots=True)
class GpuRelease:
    """Request to release a GPU's driver handles for at most `lifetime_s`; `gpu` is a UUID, an index, or `all`."""

    gpu: str
    lifetime_s: float = 900.0


@dataclass(frozen=True, slots=True)
class GpuReopen:
    """Request to open a released GPU, or `all` released GPUs, again now."""

    gpu: str


@dataclass(frozen=True, slots=True)
class GpusReleased:
    """Reply: the GPUs, whether they are released now, and the processes and jobs on them."""

    gpu_uuids: tuple[str, ...]
    is_released: bool
    remaining_s: float | None
    """Time until they are reopened; None if they are open."""
    pids: tuple[int, ...] = ()
    """Processes of all users on the GPUs, which must end before a reset."""
    job_ids: tuple[str, ...] = ()
    """Jobs on the GPUs, which run at full speed meanwhile."""


MAX_IMPORTED = 256
FILE_FORMAT = "gpuenergyd past jobs 1"


@dataclass(frozen=True, slots=True)
class OwnedPastJob:
    """A past job with the uid of its user; None for an imported one."""

    uid: int | None
    job: PastJob


@dataclass(frozen=True, slots=True)
class PastJobList:
    """Past jobs, newest first."""

    past_jobs: tuple[OwnedPastJob, ...]


@dataclass(frozen=True, slots=True)
class PastJobFile:
    """Past jobs to import, and the content of a file of exported past jobs; names no user."""

    format: str
    past_jobs: tuple[PastJob, ...]


@dataclass(frozen=True, slots=True)
class PastJobsForget:
    """Request to forget the past jobs of the caller, or those of all users and the imported ones (administrators)."""

    is_for_all_users: bool = False


@dataclass(frozen=True, slots=True)
class PastJobsChanged:
    """Reply: how many past jobs were imported or forgotten."""

    num_past_jobs: int


@dataclass(frozen=True, slots=True)
class CounterQuery:
    """GPUs whose energy counters are wanted; all GPUs if none is named."""

    gpu_uuids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CounterReading:
    """A GPU's energy counter, read after the request; None if the driver does not give it."""

    gpu_uuid: str
    total_energy_j: float | None


@dataclass(frozen=True, slots=True)
class CounterReadings:
    """Reply: the energy counter of each GPU."""

    gpus: tuple[CounterReading, ...]
