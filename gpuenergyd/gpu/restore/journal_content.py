"""Content of a restore journal: its entries, and a decoder that checks each value and reports the invalid ones.

Every entry is checked separately, so that an invalid entry does not invalidate the others.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import Any

from gpuenergyd.errors import JournalError
from gpuenergyd.gpu.restore.policy import RestorePolicy

VERSION = 4
_READABLE = frozenset({1, 2, 3, 4})
"""Readable versions; earlier ones lack fields that have a default, and workload power profiles."""
_MAX_NUMBER = 1e9
_MAX_CLOCK_MHZ = 1_000_000
_MAX_CHARS = 4_096
_PID_BITS, _UID_BITS, _TIME_BITS = 31, 32, 63


class DamagedJournalError(JournalError):
    """The file exists and is ours, but it is not a journal or has invalid values."""


class Control(StrEnum):
    """A GPU setting that the worker changes."""

    SM_CLOCK_LOCK = "sm_clock_lock"
    POWER_LIMIT = "power_limit"
    POWER_PROFILE = "power_profile"


class KnownBy(StrEnum):
    """The source of the saved value."""

    READ = "read"
    CONFIGURED = "configured"
    ASSUMED_DEFAULT = "assumed_default"


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One setting of one GPU that is or may soon be changed; `saved_value` None means the driver's default.

    Values are MHz for a clock lock and watts for a power limit. A restore opens `driver` with `world_path`.
    A power limit other than `intended_value` was set by another program; if that is None, as during a driver call, any
    limit may be ours. For a workload power profile, `intended_value` is the number of the added one; nothing is saved.
    """

    gpu_uuid: str
    control: Control
    saved_value: float | None
    known_by: KnownBy
    lease_id: str
    job_id: str
    owner_pid: int
    owner_uid: int
    owner_start_ticks: int | None
    driver: str
    world_path: str | None
    recorded_boottime_ns: int
    intended_value: float | None = None
    restore_policy: RestorePolicy = RestorePolicy.ONLY_IF_OURS
    locked_sm_clock_mhz: int | None = None
    """The highest lock that may be in force; None if there is none, or if the driver reliably confirms a reset."""
    is_lock_settled: bool = False
    """Whether the call that set the lock has returned; until then, the previous lock may still be in force."""
    is_unconfirmed: bool = False
    """Whether the lock was removed but the GPU has not been seen above it since."""

    @property
    def key(self) -> tuple[str, Control]:
        """The GPU and control, which identify an entry."""
        return (self.gpu_uuid, self.control)


@dataclass(frozen=True, slots=True)
class JournalContent:
    """The entries, and the id of the boot in which they were written."""

    boot_id: str
    entries: tuple[JournalEntry, ...]
    foreign_locks_mhz: Mapping[str, int] = field(default_factory=dict)
    """Clock locks of other programs, by GPU."""
    is_incomplete: bool = False
    """Whether an earlier journal was damaged and it is unknown which GPUs it listed."""

    def entry(self, gpu_uuid: str, control: Control) -> JournalEntry | None:
        """Return the entry for one control of a GPU; None if it is not listed."""
        return next((entry for entry in self.entries if entry.key == (gpu_uuid, control)), None)


@dataclass(frozen=True, slots=True)
class BadPart:
    """An invalid part of a journal; `is_change` says whether it may record a change of a GPU."""

    reason: str
    value: Any
    is_change: bool = True

    def texts(self) -> Iterator[str]:
        """Yield every text in the part, to find out which GPU it is about."""
        left = [self.value]
        while left:
            value = left.pop()
            if isinstance(value, str):
                yield value
            elif isinstance(value, dict):
                left += [*value.keys(), *value.values()]
            elif isinstance(value, list):
                left += value

    def valid(self, name: str) -> Any:
        """Return the value of one field; None if it is missing or invalid."""
        try:
            return _CHECKS[name](self.value[name])
        except (TypeError, KeyError, IndexError, ValueError, OverflowError):
            return None


def encode(content: JournalContent) -> bytes:
    document = {
        "version": VERSION,
        "boot_id": content.boot_id,
        "entries": [{f.name: getattr(entry, f.name) for f in fields(entry)} for entry in content.entries],
        "foreign_locks_mhz": dict(content.foreign_locks_mhz),
    }
    if content.is_incomplete:
        document["is_incomplete"] = True
    return json.dumps(document, indent=1).encode()


def decode(body: bytes, present_boot_id: str) -> tuple[JournalContent, tuple[BadPart, ...]]:
    """Return the valid and the invalid parts of a journal's text.

    Without a valid boot id, it is treated as a journal of the present boot.

    Raises:
        DamagedJournalError: it is not a JSON object.
    """
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DamagedJournalError(f"{type(error).__name__}: {str(error)[:80]}") from None
    if not isinstance(document, dict):
        raise DamagedJournalError(f"{_shown(document)} instead of an object")
    bad: list[BadPart] = []
    version, boot_id = document.get("version"), document.get("boot_id")
    if type(boot_id) is not str or not boot_id:
        bad.append(BadPart(f"boot_id is {_shown(boot_id)}", None, is_change=False))
        boot_id = present_boot_id
    if type(version) is not int or version not in _READABLE:
        # The meaning of another version's fields is unknown, but the GPUs that it names can be found.
        bad += [
            BadPart(f"it has version {_shown(version)}; expected {VERSION}", part)
            for part in _listed(document.get("entries")) or (None,)
        ]
        return JournalContent(boot_id, ()), tuple(bad)
    entries: list[JournalEntry] = []
    if not isinstance(document.get("entries"), list):
        bad.append(BadPart(f"entries is {_shown(document.get('entries'))}", document.get("entries")))
    for value in _listed(document.get("entries")):
        try:
            entries.append(_entry(value))
        except (TypeError, ValueError, OverflowError) as error:
            bad.append(BadPart(str(error), value))
    foreign: dict[str, int] = {}
    known = document.get("foreign_locks_mhz", {})
    for uuid, clock_mhz in known.items() if isinstance(known, dict) else [("foreign_locks_mhz", known)]:
        if type(clock_mhz) is int and 0 < clock_mhz <= _MAX_CLOCK_MHZ:
            foreign[uuid] = clock_mhz
        else:
            bad.append(
                BadPart(f"the lock of another program of {uuid!r:.80} is {_shown(clock_mhz)}", None, is_change=False)
            )
    content = JournalContent(boot_id, tuple(entries), foreign, is_incomplete=bool(document.get("is_incomplete")))
    return content, tuple(bad)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _shown(value: Any) -> str:
    """Return a value for a message, without the content of objects and lists, which may be deeply nested."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return f"{value!r:.80}"


def _entry(value: Any) -> JournalEntry:
    """Return an entry.

    Raises:
        TypeError, ValueError, OverflowError: it is not an object, or a field is unknown, missing or invalid.
    """
    if not isinstance(value, dict):
        raise TypeError(f"an entry is {_shown(value)}")
    for name in value:
        if name not in _CHECKS:
            raise ValueError(f"an entry has the unknown field {name!r:.80}")
    for name in _REQUIRED:
        if name not in value:
            raise ValueError(f"an entry has no {name}")
    checked: dict[str, Any] = {}
    for name, given in value.items():
        try:
            checked[name] = _CHECKS[name](given)
        except (ValueError, OverflowError):
            raise ValueError(f"{name} of an entry is {_shown(given)}") from None
    return JournalEntry(**checked)


def _positive(value: Any) -> float:
    number = _number(value)
    if number <= 0:
        raise ValueError
    return number


def _number(value: Any) -> float:
    if type(value) not in {int, float} or not 0 <= float(value) <= _MAX_NUMBER or not math.isfinite(value):
        raise ValueError
    return float(value)


def _whole(num_bits: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not 0 <= value < 1 << num_bits:
            raise ValueError
        return value

    return check


def _clock(value: Any) -> int:
    if type(value) is not int or not 0 < value <= _MAX_CLOCK_MHZ:
        raise ValueError
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_CHARS or "\0" in value:
        raise ValueError
    value.encode("utf-8", "surrogateescape")  # a UnicodeEncodeError is a ValueError
    return value


def _name(value: Any) -> str:
    if not _text(value) or not value.isascii() or not value.isprintable():
        raise ValueError
    return str(value)


def _word(words: Iterable[StrEnum]) -> Callable[[Any], StrEnum]:
    known = {str(word): word for word in words}

    def check(value: Any) -> StrEnum:
        if type(value) is not str or value not in known:
            raise ValueError
        return known[value]

    return check


def _or_none(check: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else check(value)


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "gpu_uuid": _name,
    "control": _word(Control),
    "saved_value": _or_none(_positive),
    "known_by": _word(KnownBy),
    "lease_id": _text,
    "job_id": _text,
    "owner_pid": _whole(_PID_BITS),
    "owner_uid": _whole(_UID_BITS),
    "owner_start_ticks": _or_none(_whole(_TIME_BITS)),
    "driver": _name,
    "world_path": _or_none(_text),
    "recorded_boottime_ns": _whole(_TIME_BITS),
    "intended_value": _or_none(_number),
    "restore_policy": _word(RestorePolicy),
    "locked_sm_clock_mhz": _or_none(_clock),
    "is_lock_settled": _flag,
    "is_unconfirmed": _flag,
}
_REQUIRED = tuple(f.name for f in fields(JournalEntry) if f.default is MISSING)
