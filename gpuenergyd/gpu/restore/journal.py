"""Restore journal: the original state of each changed GPU, on disk (fsynced) before the first change.

Theory of operation. One small JSON file is replaced atomically (temporary file, fsync, rename, fsync of the folder), so
a reader sees the old list or the new one. A lock file beside it carries locks that the kernel releases when their
holder dies: one for the list, and one per GPU, held during each driver call that changes the GPU. So
`gpuenergyd restore` and a running worker exclude each other per GPU, and a hanging call for one GPU blocks no other.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.errors import JournalError
from gpuenergyd.gpu.process_identity import read_boot_id
from gpuenergyd.gpu.restore.policy import RestorePolicy

_VERSION = 4
_READABLE = frozenset({1, 2, 3, 4})
"""Earlier versions lack fields that have a default, and workload power profiles."""
_MAX_BYTES = 1 << 20
_LIST_LOCK = 0
_LOCK_WAIT_S = 5.0
_LOCK_POLL_S = 0.002


class DamagedJournalError(JournalError):
    """The file exists and is ours, but its content is not a journal."""


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
    """One control of one GPU that is changed, or is about to be; `saved_value` None means the driver's default.

    Values are MHz for a clock lock and watts for a power limit. A restore opens `driver` with `world_path`.
    A power limit other than `intended_value` is another program's. None: any may be ours, as during a driver call.
    For a workload power profile `intended_value` is its number: only that one is ours, nothing is saved.
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
    """The highest lock that may be in force; None without one, and where the driver's word is proof of a reset."""
    is_lock_settled: bool = False
    """Whether the call that set the lock has returned: until then the one before may be in force, too."""
    is_unconfirmed: bool = False
    """Whether the lock was removed, but the GPU has not been seen above it since."""

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


class Journal:
    """The journal at a path; its folder must exist."""

    def __init__(self, path: Path, *, boot_id: Callable[[], str] | None = None) -> None:
        self._path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._boot_id = boot_id or read_boot_id
        self._seen: tuple[tuple[int, int] | None, frozenset[tuple[str, Control]]] = (None, frozenset())

    @property
    def path(self) -> Path:
        """The path of the journal."""
        return self._path

    @property
    def is_of_this_boot(self) -> bool:
        """Whether the journal was written since the host booted; a reboot clears the driver's settings."""
        return self.read().boot_id == self._boot_id()

    def read(self) -> JournalContent:
        """Return the entries; a missing file has none.

        Raises:
            JournalError: the file cannot be read, has a wrong owner or mode, or is not a journal.
        """
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return JournalContent(self._boot_id(), ())
        except OSError as error:
            raise JournalError(f"cannot read the journal {self._path}: {error.strerror}") from None
        try:
            self._check_ownership(fd)
            body = os.read(fd, _MAX_BYTES)
        finally:
            os.close(fd)
        return _decode(body, self._path)

    def add(self, entries: Iterable[JournalEntry]) -> None:
        """Add entries and make them durable; an entry for a control that is listed already keeps the first saved value.

        Raises:
            JournalError: the entries are not durable, so the GPU must not be changed.
        """
        with self._lock(_LIST_LOCK):
            content = self._of_this_boot()
            kept = {e.key: e for e in content.entries}
            for entry in entries:
                before = kept.get(entry.key)
                kept[entry.key] = (
                    entry
                    if before is None
                    else dataclasses.replace(
                        entry,
                        saved_value=before.saved_value,
                        known_by=before.known_by,
                        locked_sm_clock_mhz=before.locked_sm_clock_mhz,
                        is_lock_settled=before.is_lock_settled,
                    )
                )
            self._write(dataclasses.replace(content, entries=tuple(kept.values())))

    def record_lock(self, gpu_uuid: str, sm_clock_mhz: int | None, *, is_settled: bool) -> None:
        """Record the lock that may be in force, None for no lock; until it is settled, the higher of it and the last.

        Raises:
            JournalError: the record is not durable.
        """
        with self._lock(_LIST_LOCK):
            content = self.read()
            entries = tuple(_with_lock(e, gpu_uuid, sm_clock_mhz, is_settled=is_settled) for e in content.entries)
            self._write(dataclasses.replace(content, entries=entries))

    def mark_unconfirmed(self, entry: JournalEntry) -> None:
        """Record that a lock was removed without proof, or raise JournalError if the journal cannot be written."""
        marked = dataclasses.replace(entry, is_unconfirmed=True, is_lock_settled=True)
        with self._lock(_LIST_LOCK):
            content = self.read()
            entries = tuple(marked if e == entry else e for e in content.entries)
            self._write(dataclasses.replace(content, entries=entries))

    def record_foreign_lock(self, gpu_uuid: str, sm_clock_mhz: int | None) -> None:
        """Record the clock lock of another program, None for none; raise JournalError if that is not durable."""
        with self._lock(_LIST_LOCK):
            content = self._of_this_boot()
            known = {uuid: mhz for uuid, mhz in content.foreign_locks_mhz.items() if uuid != gpu_uuid}
            if sm_clock_mhz is not None:
                known[gpu_uuid] = sm_clock_mhz
            if known != content.foreign_locks_mhz:
                self._write(dataclasses.replace(content, foreign_locks_mhz=known))

    def foreign_locks_mhz(self) -> Mapping[str, int]:
        """Return the clock locks of other programs, which a reboot clears, by GPU; raise JournalError if unreadable."""
        return self._of_this_boot().foreign_locks_mhz

    def remove(self, keys: Collection[tuple[str, Control]]) -> None:
        """Remove entries, or raise JournalError if the journal cannot be written."""
        with self._lock(_LIST_LOCK):
            content = self.read()
            kept = tuple(e for e in content.entries if e.key not in keys)
            if kept != content.entries:
                self._write(dataclasses.replace(self._of_this_boot(), entries=kept))

    def holds(self, gpu_uuid: str, control: Control) -> bool:
        """Return whether an entry exists now; reads the file only when it has changed."""
        try:
            status = self._path.lstat()
        except OSError:
            return False
        stamp = (status.st_ino, status.st_mtime_ns)
        seen = self._seen  # another thread may replace it
        if stamp != seen[0]:
            self._seen = seen = (stamp, frozenset(e.key for e in self.read().entries))
        return (gpu_uuid, control) in seen[1]

    def our_power_profile(self, gpu_uuid: str) -> int | None:
        """Return the workload power profile that we have added; None without one; raise JournalError if unreadable."""
        key = (gpu_uuid, Control.POWER_PROFILE)
        ours = [e.intended_value for e in self._of_this_boot().entries if e.key == key]
        return round(ours[0]) if ours and ours[0] is not None else None

    @contextlib.contextmanager
    def gpu_lock(self, gpu_uuid: str, *, wait_s: float = _LOCK_WAIT_S) -> Iterator[None]:
        """Hold the lock for driver calls that change one GPU.

        Raises:
            JournalError: another process holds it for longer than `wait_s`.
        """
        with self._lock(1 + zlib.crc32(gpu_uuid.encode()), wait_s=wait_s):
            yield

    def set_aside(self) -> Path:
        """Move a damaged journal aside and return its new path."""
        aside = self._path.with_name(f"{self._path.name}.corrupt-{time.time_ns()}")
        try:
            self._path.rename(aside)
        except OSError as error:
            raise JournalError(f"cannot move {self._path} aside: {error.strerror}") from None
        return aside

    def _of_this_boot(self) -> JournalContent:
        """Return the content; what was set before the host booted is gone."""
        content = self.read()
        return content if content.boot_id == self._boot_id() else JournalContent(self._boot_id(), ())

    def _write(self, content: JournalContent) -> None:
        body = json.dumps(
            {
                "version": _VERSION,
                "boot_id": self._boot_id(),
                "entries": [{f.name: getattr(e, f.name) for f in dataclasses.fields(e)} for e in content.entries],
                "foreign_locks_mhz": dict(content.foreign_locks_mhz),
            },
            indent=1,
        ).encode()
        try:
            folder = self._path.parent.stat()
            owner = (folder.st_uid, folder.st_gid) if os.geteuid() == 0 else None
            replace_file(self._path, body, owner=owner, is_durable=True, is_locked=True)
        except OSError as error:
            raise JournalError(f"cannot write the journal {self._path}: {error.strerror}") from None

    def _check_ownership(self, fd: int) -> None:
        status = os.fstat(fd)
        owners = {os.geteuid(), 0}
        if os.geteuid() == 0:
            owners.add(self._path.parent.stat().st_uid)
        if not stat.S_ISREG(status.st_mode):
            raise JournalError(f"the journal {self._path} is not a regular file")
        if status.st_uid not in owners:
            raise JournalError(f"the journal {self._path} belongs to uid {status.st_uid}; expected uid {os.geteuid()}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise JournalError(f"the journal {self._path} is writable by other users; its mode must be 0600")

    @contextlib.contextmanager
    def _lock(self, position: int, *, wait_s: float = _LOCK_WAIT_S) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(self._lock_path, flags, 0o600)
        except OSError as error:
            raise JournalError(f"cannot lock the journal {self._lock_path}: {error.strerror}") from None
        try:
            if os.geteuid() == 0:
                folder = self._path.parent.stat()
                os.fchown(fd, folder.st_uid, folder.st_gid)
            request = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0)
            deadline = time.monotonic() + wait_s
            while True:
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise JournalError(
                            f"another process has held a lock in {self._lock_path} for {wait_s:g} s"
                        ) from None
                    time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(fd)


def _with_lock(entry: JournalEntry, gpu_uuid: str, sm_clock_mhz: int | None, *, is_settled: bool) -> JournalEntry:
    if entry.key != (gpu_uuid, Control.SM_CLOCK_LOCK):
        return entry
    if sm_clock_mhz is not None and not is_settled:
        sm_clock_mhz = max(sm_clock_mhz, entry.locked_sm_clock_mhz or 0)
    return dataclasses.replace(
        entry, locked_sm_clock_mhz=sm_clock_mhz, is_lock_settled=is_settled, is_unconfirmed=False
    )


def _decode(body: bytes, path: Path) -> JournalContent:
    try:
        document = json.loads(body)
        if document["version"] not in _READABLE:
            raise JournalError(f"the journal {path} has version {document['version']}; expected {_VERSION}")
        entries = tuple(_entry(fields) for fields in document["entries"])
        boot_id = str(document["boot_id"])
        foreign = {str(uuid): int(mhz) for uuid, mhz in document.get("foreign_locks_mhz", {}).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DamagedJournalError(f"the journal {path} is damaged: {error!r}") from None
    return JournalContent(boot_id, entries, foreign)


def _entry(fields: dict[str, Any]) -> JournalEntry:
    saved_value = fields["saved_value"]
    fields["saved_value"] = None if saved_value is None else float(saved_value)
    fields["control"] = Control(fields["control"])
    fields["known_by"] = KnownBy(fields["known_by"])
    if "restore_policy" in fields:
        fields["restore_policy"] = RestorePolicy(fields["restore_policy"])
    return JournalEntry(**fields)
