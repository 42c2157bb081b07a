"""Restore journal: the original state of each changed GPU, on disk (fsynced) before the first change.

Theory of operation. One small JSON file is replaced atomically (temporary file, fsync, rename, fsync of the folder), so
a reader sees the old list or the new one. A lock file next to it carries locks that the kernel releases when their
holder dies: one for the list, and one per GPU, held during each driver call that changes the GPU. So
`gpuenergyd restore` and a running worker exclude each other per GPU, and a hanging call for one GPU blocks no other.
"""

import contextlib
import dataclasses
import errno
import fcntl
import os
import stat
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.errors import JournalError
from gpuenergyd.gpu.process_identity import read_boot_id
from gpuenergyd.gpu.restore.journal_content import (
    BadPart,
    Control,
    DamagedJournalError,
    JournalContent,
    JournalEntry,
    KnownBy,
    decode,
    encode,
)

__all__ = [
    "Control",
    "DamagedJournalError",
    "Journal",
    "JournalContent",
    "JournalEntry",
    "KnownBy",
    "UntrustedJournalError",
]

_MAX_BYTES = 1 << 20
_LIST_LOCK = 0
_LOCK_WAIT_S = 5.0
_LOCK_POLL_S = 0.002
_NOT_OURS = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO})
"""Errors on opening the file which mean that someone else has put it there."""


class UntrustedJournalError(JournalError):
    """The file is not ours, or others may have written it, so its content is not read."""


class Journal:
    """The journal at a path; its folder must exist."""

    def __init__(self, path: Path, *, boot_id: Callable[[], str] | None = None) -> None:
        self._path = path
        self._lock_path = path.with_name(path.name + ".lock")
        self._boot_id = boot_id or read_boot_id
        self._seen: tuple[tuple[int, int] | None, frozenset[tuple[str, Control]]] = (None, frozenset())

    @property
    def path(self) -> Path:
        return self._path

    def is_of_this_boot(self, content: JournalContent) -> bool:
        """Return whether content was written since the host booted; a reboot clears the driver's settings."""
        return content.boot_id == self._boot_id()

    def read(self) -> JournalContent:
        """Return the content; a missing file has no entries.

        Raises:
            UntrustedJournalError: the file has the wrong owner, mode or type.
            DamagedJournalError: it is not a journal, or a value is invalid.
            JournalError: it cannot be read.
        """
        body = self._body()
        if body is None:
            return JournalContent(self._boot_id(), ())
        content, bad = self._decoded(body)
        if bad:
            raise DamagedJournalError(self._damage(bad))
        return content

    def repair(
        self, repaired: Callable[[JournalContent, Sequence[BadPart]], JournalContent]
    ) -> tuple[str, Path | None, JournalContent] | None:
        """Replace a damaged or incomplete journal with the result of `repaired` for its valid and its bad parts.

        The old file is kept. Return what was wrong, the path of the old file, and the new content; None without damage.

        Raises:
            JournalError: the old file cannot be moved, or the new one cannot be written.
        """
        with self._lock(_LIST_LOCK):
            now = self._boot_id()
            content, bad = JournalContent(now, (), is_incomplete=True), tuple[BadPart, ...]()
            body: bytes | None = None
            aside: Path | None = None
            try:
                body = self._body()
                if body is None:
                    return None
                content, bad = self._decoded(body)
            except (DamagedJournalError, UntrustedJournalError) as error:
                reason, aside = str(error), self._keep_aside(body)
            else:
                if not bad and not content.is_incomplete:
                    return None
                reason = self._damage(bad) if bad else f"the journal {self._path} lacks GPUs of a damaged one"
                aside = self._keep_aside(body) if bad else None
            content = repaired(content, bad) if content.boot_id == now else JournalContent(now, ())
            self._write(content)
        return reason, aside, content

    def _decoded(self, body: bytes) -> tuple[JournalContent, tuple[BadPart, ...]]:
        try:
            return decode(body, self._boot_id())
        except DamagedJournalError as error:
            raise DamagedJournalError(f"the journal {self._path} is damaged: {error}") from None

    def _damage(self, bad: Sequence[BadPart]) -> str:
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        return f"the journal {self._path} is damaged: {bad[0].reason}{more}"

    def _body(self) -> bytes | None:
        """Return the text of the file, None without one; raise UntrustedJournalError or JournalError as in `read`."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._check_ownership(fd)
                return os.read(fd, _MAX_BYTES)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            kind = UntrustedJournalError if error.errno in _NOT_OURS else JournalError
            raise kind(f"cannot read the journal {self._path}: {error.strerror}") from None

    def add(self, entries: Iterable[JournalEntry]) -> None:
        """Add entries and make them durable; if a GPU's control is listed already, its first saved value is kept.

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
        """Record the lock that may be in force, None for no lock; until settled, the higher of it and the last one.

        Raises:
            JournalError: the record is not durable.
        """
        with self._lock(_LIST_LOCK):
            content = self.read()
            entries = tuple(_with_lock(e, gpu_uuid, sm_clock_mhz, is_settled=is_settled) for e in content.entries)
            self._write(dataclasses.replace(content, entries=entries))

    def mark_unconfirmed(self, entry: JournalEntry) -> None:
        """Record that a lock was removed but not confirmed; raise JournalError if the journal cannot be written."""
        marked = dataclasses.replace(entry, is_unconfirmed=True, is_lock_settled=True)
        with self._lock(_LIST_LOCK):
            content = self.read()
            entries = tuple(marked if e == entry else e for e in content.entries)
            self._write(dataclasses.replace(content, entries=entries))

    def record_foreign_lock(self, gpu_uuid: str, sm_clock_mhz: int | None) -> None:
        """Record another program's clock lock, or None for no lock; raise JournalError if that is not durable."""
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
                left = dataclasses.replace(content, entries=kept)
                self._write(left if kept else self._of_this_boot(left), boot_id=content.boot_id if kept else None)

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

    def entry(self, gpu_uuid: str, control: Control) -> JournalEntry | None:
        """Return the entry of this boot for one control of a GPU; raise JournalError if the journal is unreadable."""
        return self._of_this_boot().entry(gpu_uuid, control)

    def our_power_profile(self, gpu_uuid: str) -> int | None:
        """Return the workload power profile added by gpuenergyd, or None; raise JournalError if unreadable."""
        entry = self.entry(gpu_uuid, Control.POWER_PROFILE)
        return None if entry is None or entry.intended_value is None else round(entry.intended_value)

    @contextlib.contextmanager
    def gpu_lock(self, gpu_uuid: str, *, wait_s: float = _LOCK_WAIT_S) -> Iterator[None]:
        """Hold the lock for driver calls that change one GPU.

        Raises:
            JournalError: another process holds it for longer than `wait_s`.
        """
        with self._lock(1 + zlib.crc32(gpu_uuid.encode()), wait_s=wait_s):
            yield

    def _keep_aside(self, body: bytes | None) -> Path:
        """Keep a copy of `body`, or the file itself if None, for the administrator; return its path."""
        aside = self._path.with_name(f"{self._path.name}.corrupt-{time.time_ns()}")
        try:
            if body is None:
                self._path.rename(aside)
            else:
                replace_file(aside, body, owner=self._owner(), is_durable=True)
        except OSError as error:
            raise JournalError(f"cannot move {self._path} aside: {error.strerror}") from None
        return aside

    def _of_this_boot(self, content: JournalContent | None = None) -> JournalContent:
        """Return the content, which is empty if it was written before the host booted."""
        content = self.read() if content is None else content
        return content if self.is_of_this_boot(content) else JournalContent(self._boot_id(), ())

    def _write(self, content: JournalContent, *, boot_id: str | None = None) -> None:
        """Write content of this boot, or of another one with `boot_id`, so that it is not taken for this boot's."""
        body = encode(dataclasses.replace(content, boot_id=boot_id or self._boot_id()))
        try:
            replace_file(self._path, body, owner=self._owner(), is_durable=True, is_locked=True)
        except OSError as error:
            raise JournalError(f"cannot write the journal {self._path}: {error.strerror}") from None

    def _owner(self) -> tuple[int, int] | None:
        """Return the owner for files that root writes, which is the owner of the folder."""
        folder = self._path.parent.stat()
        return (folder.st_uid, folder.st_gid) if os.geteuid() == 0 else None

    def _check_ownership(self, fd: int) -> None:
        status = os.fstat(fd)
        owners = {os.geteuid(), 0}
        if os.geteuid() == 0:
            owners.add(self._path.parent.stat().st_uid)
        if not stat.S_ISREG(status.st_mode):
            raise UntrustedJournalError(f"the journal {self._path} is not a regular file")
        if status.st_uid not in owners:
            raise UntrustedJournalError(
                f"the journal {self._path} belongs to uid {status.st_uid}; expected uid {os.geteuid()}"
            )
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise UntrustedJournalError(f"the journal {self._path} is writable by other users; its mode must be 0600")

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
