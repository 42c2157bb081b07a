"""Messages between the daemon and the GPU worker.

The daemon sends commands: the reply to a `Command[X]` is an X, or `Failed`. A `RequestClock` has no reply. The worker
also sends samples, clock changes, health changes and settings without being asked.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Generic, TypeVar, get_args

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.gpu.device import GpuDetails, GpuIdentity, RefusedValues
from gpuenergyd.gpu.restore.executor import RestoreOutcome
from gpuenergyd.gpu.restore.policy import RestoreRules

ReplyT = TypeVar("ReplyT")


class GpuHealth(StrEnum):
    """The health of a GPU: whether it can be read and changed."""

    OK = "ok"
    DEGRADED = "degraded"
    WEDGED = "wedged"
    """A driver call for this GPU does not return."""
    LOST = "lost"
    UNRESTORED = "unrestored"
    """A restore failed; the worker retries."""
    UNCONFIRMED = "unconfirmed"
    """A command restored the GPU, but it has not computed since, which is needed to see the effect."""
    OBSERVE_ONLY = "observe_only"
    RELEASED = "released"
    """Neither read nor changed, while an administrator resets it or upgrades the driver."""


USABLE_HEALTH = frozenset({GpuHealth.OK, GpuHealth.UNCONFIRMED})
"""Health states in which a GPU can be leased and changed as usual."""

CEILING_LEASE = "ceiling"
"""Id of the lease under which the daemon lowers GPUs that nobody else has leased: for a power budget, a ramp, or as
they are idle. It gives way to any other lease."""


@dataclass(frozen=True, slots=True)
class LeaseOwner:
    """The job and process on whose behalf a GPU is changed."""

    job_id: str
    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class GpuHealthChange:
    """A GPU's health and the reason for it."""

    gpu_uuid: str
    health: GpuHealth
    detail: str


# Replies of the worker


@dataclass(frozen=True, slots=True)
class Welcome:
    """The worker's state at the start of a connection."""

    pid: int
    sentinel_pid: int
    """Process that restores GPUs when the worker is killed."""
    has_taken_over: bool
    """Whether this daemon takes over the leases of an earlier one."""
    identities: tuple[GpuIdentity, ...]
    health: tuple[GpuHealthChange, ...]
    missing_capabilities: tuple[str, ...]
    """Capabilities that the worker's driver lacks, in words."""


@dataclass(frozen=True, slots=True)
class Done:
    """The command succeeded."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The command was refused or failed; without a request id, the worker refuses the whole connection."""

    error: str


@dataclass(frozen=True, slots=True)
class WorkerCounters:
    """Counts since the worker started."""

    num_late_ticks: int
    """Number of skipped sampling instants."""
    num_samples_dropped: int
    num_sets_skipped: int
    """Number of clock requests skipped because that clock was already set."""


@dataclass(frozen=True, slots=True)
class PowerLimit:
    """The power limit read back from a GPU."""

    power_limit_w: float


@dataclass(frozen=True, slots=True)
class PowerProfiles:
    """The requested workload power profiles read back from a GPU, including those of other programs."""

    requested: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """The outcomes of a restore."""

    outcomes: tuple[RestoreOutcome, ...]


@dataclass(frozen=True, slots=True)
class GpuProcesses:
    """Host pids of the processes that compute on a GPU."""

    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GpuSnapshot:
    """A fresh reading of one GPU with its settings; values that the driver does not report are None."""

    power_w: float | None
    total_energy_j: float | None
    details: GpuDetails


@dataclass(frozen=True, slots=True)
class Reopened:
    """The reopened GPUs; their health is sent separately, before or after this reply."""

    identities: tuple[GpuIdentity, ...]


# Commands of the daemon


class Command(Generic[ReplyT]):
    """A command to the GPU worker; the reply is a `ReplyT`."""

    __slots__ = ()
    limit_s: ClassVar[float] = 5.0
    """Time limit of the reply, not counting the time that the worker waits for a CPU."""

    @classmethod
    def reply_type(cls) -> type[ReplyT]:
        """Return the type of the reply, which is the type argument of the base class."""
        found: type[ReplyT] = get_args(vars(cls)["__orig_bases__"][0])[0]
        return found


class SlowCommand(Command[ReplyT]):
    """A command that waits for restores, or for driver calls that may be slow."""

    __slots__ = ()
    limit_s = 35.0


@dataclass(frozen=True, slots=True)
class Hello(Command[Welcome]):
    """First request on a connection: the restore rules, and a hand-over token or ""."""

    token: str
    restore_rules: RestoreRules


@dataclass(frozen=True, slots=True)
class HandOver(Command[Done]):
    """Keep all leases for `keep_s` after this connection ends, for the next daemon, which has this token."""

    token: str
    keep_s: float


@dataclass(frozen=True, slots=True)
class Ping(Command[WorkerCounters]):
    """A liveness check."""


@dataclass(frozen=True, slots=True)
class AcquireLease(Command[Done]):
    """Lease GPUs; pidfds are sent with the datagram. The reply means that the GPUs' state is in the journal."""

    lease_id: str
    gpu_uuids: tuple[str, ...]
    owner: LeaseOwner
    sets_clocks: bool = True
    """If False, the lease is for power limits only, and no clock is journaled, set or restored."""


@dataclass(frozen=True, slots=True)
class LowerPowerLimit(SlowCommand[PowerLimit]):
    """Set the power limit of a leased GPU, at most the limit from before the lease; None restores that limit."""

    lease_id: str
    gpu_uuid: str
    power_limit_w: float | None
    owner: LeaseOwner


@dataclass(frozen=True, slots=True)
class SetPowerLimit(SlowCommand[PowerLimit]):
    """Set the power limit of a leased GPU."""

    lease_id: str
    gpu_uuid: str
    power_limit_w: float
    owner: LeaseOwner


@dataclass(frozen=True, slots=True)
class SetPowerProfile(SlowCommand[PowerProfiles]):
    """Add a workload power profile to a leased GPU, replacing the one added before; None removes that one."""

    lease_id: str
    gpu_uuid: str
    power_profile: int | None
    owner: LeaseOwner


@dataclass(frozen=True, slots=True)
class Restore(SlowCommand[Restored]):
    """Restore GPUs and end their leases, because a job or the daemon ends."""

    gpu_uuids: tuple[str, ...]
    reason: str
    is_daemon_ending: bool = False
    """Whether the daemon ends rather than a job; clocks that the restore rules keep then stay set."""


@dataclass(frozen=True, slots=True)
class ListProcesses(Command[GpuProcesses]):
    """List the processes that compute on a GPU."""

    gpu_uuid: str


@dataclass(frozen=True, slots=True)
class TakeSnapshot(Command[GpuSnapshot]):
    """Read a GPU and its settings now."""

    gpu_uuid: str


@dataclass(frozen=True, slots=True)
class ReleaseGpus(SlowCommand[Done]):
    """Restore GPUs, end their leases and release their driver handles."""

    gpu_uuids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ReopenGpus(SlowCommand[Reopened]):
    """Open released GPUs again."""

    gpu_uuids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestClock:
    """Set clocks of a leased GPU. There is no reply; a ClockChangeReport follows."""

    gpu_uuid: str
    request: ClockRequest


# Sent by the worker without a request


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One reading of a GPU; unknown values are None.

    `total_energy_j` is the counter's value at its newest update, and `energy_edge_mono_ns` the instant of that update.
    The instant is None if no update of the last three seconds could be dated; the value is then the one just read.
    """

    gpu_uuid: str
    read_mono_ns: int
    power_w: float | None
    total_energy_j: float | None
    energy_edge_mono_ns: int | None
    sm_clock_mhz: int | None
    temperature_celsius: float | None
    is_power_capped: bool | None
    is_clock_limited: bool | None = None
    refused: tuple[RefusedValues, ...] = ()
    """Implausible values that the driver has reported since the last sample."""
    clock_age_ns: int = 0
    """How old the clock may be; 0 where drivers do not keep it, or it is not known."""
    utilization_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """The readings since the last message of this type."""

    samples: tuple[GpuSample, ...]


@dataclass(frozen=True, slots=True)
class ClockChangeReport:
    """One clock change, from the request to the effect.

    If there is an `error`, nothing was set. An idle GPU never shows a raised clock, so the effect may stay unknown.
    """

    gpu_uuid: str
    requested_sm_clock_mhz: int
    due_mono_ns: int
    """The instant for which the clock was requested: when the request was sent, or a later instant given in it."""
    called_mono_ns: int
    returned_mono_ns: int
    effective_mono_ns: int | None
    """When the clock was first read back."""
    actual_sm_clock_mhz: int | None
    error: str | None
    previous_sm_clock_mhz: int | None = None
    """The clock last read before the change; None if unknown, or if an idle GPU hid when the change took effect."""
    blocked_ns: int = 0
    """Part of the time from `due_mono_ns` to `called_mono_ns` that was spent in driver calls for other GPUs."""
    unseen_until_mono_ns: int | None = None
    """The last instant after the call at which readings still showed the previous clock."""
    clock_age_ns: int = 0
    """Maximum age of the clocks that readings showed."""


@dataclass(frozen=True, slots=True)
class GpuSettingsRead:
    """The settings of a GPU, sent when they are first read and after each change."""

    gpu_uuid: str
    details: GpuDetails
    is_our_power_limit: bool
    """Whether this worker set the power limit."""
    our_power_profile: int | None = None
    """The workload power profile that this worker has added."""


Request = (
    Hello
    | HandOver
    | Ping
    | AcquireLease
    | SetPowerLimit
    | LowerPowerLimit
    | SetPowerProfile
    | Restore
    | ListProcesses
    | TakeSnapshot
    | ReleaseGpus
    | ReopenGpus
    | RequestClock
)
Reply = (
    Welcome
    | Done
    | Failed
    | WorkerCounters
    | PowerLimit
    | PowerProfiles
    | Restored
    | GpuProcesses
    | GpuSnapshot
    | Reopened
)
Notice = Samples | ClockChangeReport | GpuHealthChange | GpuSettingsRead
Message = Request | Reply | Notice
