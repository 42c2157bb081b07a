"""Watches free disk space and the size of the write-ahead log.

A reserve file is deleted when the disk is full, because without free space even deleting expired rows would fail.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpuenergyd.store.database import wal_bytes

log = logging.getLogger(__name__)

_MIN_FREE_RATIO = 4
"""The reserve is allocated only if this many times its size is free, so that it does not fill the disk itself."""
_FULL_BELOW_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Reserve:
    """A file that reserves disk space; 0 bytes means no reserve."""

    path: Path
    num_bytes: int

    @classmethod
    def beside(cls, database: Path, num_bytes: int) -> "Reserve":
        return cls(database.with_name(database.name + ".reserve"), num_bytes)

    def allocate(self) -> bool:
        """Allocate the reserve if there is enough free space; return whether it is allocated. Never raises."""
        if self.num_bytes == 0:
            return False
        try:
            if self.path.stat().st_size == self.num_bytes:
                return True
        except OSError:
            pass
        if free_bytes(self.path.parent) < _MIN_FREE_RATIO * self.num_bytes:
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self.num_bytes)
            finally:
                os.close(descriptor)
        except OSError:
            self.release()
            return False
        return True

    def release(self) -> bool:
        """Delete the reserve; return whether there was one. Never raises."""
        try:
            was_allocated = self.path.stat().st_size > 0
            self.path.unlink()
        except OSError:
            return False
        return was_allocated


@dataclass(slots=True)
class DiskMonitor:
    """Monitors the writer's disk; `warnings` may be read from any thread, the rest from the writer's thread."""

    path: Path
    reserve_bytes: int
    max_wal_bytes: int
    check_period_s: float
    is_short: bool = False
    """Whether the disk was full and the reserve has not been allocated again."""
    _warnings: dict[str, str] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _check_at_mono_s: float = 0.0

    @property
    def reserve(self) -> Reserve:
        return Reserve.beside(self.path, self.reserve_bytes)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The current problems, as text."""
        with self._guard:
            return tuple(self._warnings.values())

    def is_full(self) -> bool:
        """Return whether the database cannot grow."""
        return self.path.parent.is_dir() and free_bytes(self.path.parent) < _FULL_BELOW_BYTES

    def release_reserve(self) -> None:
        """Make room for important records; readings are not recorded until there is enough space again."""
        self.is_short = True
        if self.reserve.release():
            log.error("history: disk full; using the reserve for jobs, plans and control events")
        self._set_warning("disk space", "disk full: readings and timelines are not recorded until there is space")

    def check(self) -> None:
        """Check free space and the size of the write-ahead log, at most once per period."""
        now_s = time.monotonic()
        if now_s < self._check_at_mono_s:
            return
        self._check_at_mono_s = now_s + self.check_period_s
        if self.is_short and (self.reserve.allocate() if self.reserve_bytes else not self.is_full()):
            self.is_short = False
            self._set_warning("disk space", None)
        has_grown = wal_bytes(self.path) > self.max_wal_bytes
        self._set_warning(
            "write-ahead log",
            f"the write-ahead log exceeds {self.max_wal_bytes >> 20} MiB because a process reads the history in one"
            f" long transaction; find it with `fuser {self.path}`"
            if has_grown
            else None,
        )

    def _set_warning(self, subject: str, text: str | None) -> None:
        with self._guard:
            has_changed = self._warnings.get(subject) != text
            if text is None:
                self._warnings.pop(subject, None)
            else:
                self._warnings[subject] = text
        if has_changed:
            log.warning("history: %s", text or f"{subject} is back to normal")


def free_bytes(folder: Path) -> int:
    """Return the free space available to this user, 0 if unknown."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0
