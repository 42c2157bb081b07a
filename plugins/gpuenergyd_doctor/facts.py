"""Facts about a host, the input of its diagnosis."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """Facts about one GPU that need no privilege."""

    name: str
    num_clocks: int | None
    """Number of SM clocks that can be set; None if only the daemon's GPU worker knows."""
    observe_only_reason: str | None
    is_persistent: bool | None


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """State of the driver; `trouble` is its error with the remedy."""

    kind: str
    gpus: tuple[GpuFacts, ...] = ()
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class CallerFacts:
    """User of the diagnosing process, and whether such a process may change GPUs."""

    user: str
    may_change_gpus: bool


class SocketState(StrEnum):
    """Result of connecting to the daemon's socket."""

    ANSWERS = "answers"
    SILENT = "silent"
    DENIED = "denied"
    STALE = "stale"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """State of the daemon's socket and of the daemon itself."""

    socket_path: str
    socket_state: SocketState
    socket_group: str | None = None
    detail: str = ""
    is_observing: bool = False
    mode_note: str | None = None
    """The daemon's hint if the mode was never set explicitly."""
    has_worker: bool = True
    """Whether the GPU worker runs; without it the daemon neither reads nor sets a GPU."""
    degraded_reasons: tuple[str, ...] = ()
    uncontrolled_gpus: tuple[str, ...] = ()
    late_plans: str | None = None
    """A lasting problem of the policy host that makes plans late."""


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """Restore journal of a daemon that is not running."""

    path: str
    gpu_uuids: tuple[str, ...] = ()
    damage: str | None = None
    unreadable: str | None = None


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """State of the history database."""

    path: str
    is_there: bool
    trouble: str | None = None
    last_record_at: datetime | None = None
    set_aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """State of the file system of the history database."""

    folder: str
    free_bytes: int
    is_read_only: bool


@dataclass(frozen=True, slots=True)
class CarbonFacts:
    """Configured zone and the latest fetch of its intensities."""

    zone: str
    trouble: str | None = None
    newest_at: datetime | None = None
    is_fetched: bool = False
    """Whether the intensities come from the fetcher process, which must then be running."""


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """State of the service manager; states are those of systemd, by unit."""

    is_managed: bool
    active_states: dict[str, str]
    enabled_states: dict[str, str]
    rivals: tuple[str, ...] = ()
    """Other active services that set GPU clocks."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """All facts about a host; a fact is None if invalid settings prevented reading it."""

    now: datetime
    driver: DriverFacts
    caller: CallerFacts
    daemon: DaemonFacts
    units: UnitFacts
    is_time_synchronised: bool | None
    settings_trouble: str | None = None
    journal: JournalFacts | None = None
    history: HistoryFacts | None = None
    disk: DiskFacts | None = None
    carbon: CarbonFacts | None = None
