"""The facts about a host that a diagnosis rests on; whoever looks them up changes nothing."""

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU as anybody may see it."""

    name: str
    num_clocks: int
    observe_only_reason: str | None
    is_persistent: bool | None


@dataclass(frozen=True, slots=True)
class DriverFacts:
    """What the driver answers; `trouble` is its error, which says what to do."""

    kind: str
    gpus: tuple[GpuFacts, ...] = ()
    trouble: str | None = None


@dataclass(frozen=True, slots=True)
class CallerFacts:
    """Who asks, and whether such a process could change a GPU."""

    user: str
    may_change_gpus: bool


class SocketState(StrEnum):
    """What happens when somebody connects."""

    ANSWERS = "answers"
    SILENT = "silent"
    DENIED = "denied"
    STALE = "stale"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """The daemon's socket, and what it says of itself."""

    socket_path: str
    socket_state: SocketState
    socket_group: str | None = None
    detail: str = ""
    is_observing: bool = False
    degraded_reasons: tuple[str, ...] = ()
    uncontrolled_gpus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JournalFacts:
    """What a daemon that is not there has left changed."""

    path: str
    gpu_uuids: tuple[str, ...] = ()
    damage: str | None = None
    unreadable: str | None = None


@dataclass(frozen=True, slots=True)
class HistoryFacts:
    """The history's database."""

    path: str
    is_there: bool
    trouble: str | None = None
    last_record_at: datetime | None = None
    set_aside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """Where the history is kept, or would be."""

    folder: str
    free_bytes: int
    is_read_only: bool


@dataclass(frozen=True, slots=True)
class CarbonFacts:
    """The zone whose intensity is wanted, and the last that a source said about it."""

    zone: str
    trouble: str | None = None
    newest_at: datetime | None = None
    is_fetched: bool = False
    """Whether a process of its own has to ask for it."""


@dataclass(frozen=True, slots=True)
class UnitFacts:
    """What the service manager knows; states are systemd's own words, by unit."""

    is_managed: bool
    active_states: dict[str, str]
    enabled_states: dict[str, str]
    rivals: tuple[str, ...] = ()
    """Active services that set the same clocks."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything that was looked up; None is what could not be, because the settings are wrong."""

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
