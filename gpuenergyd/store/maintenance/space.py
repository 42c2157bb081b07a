"""The space that a history takes and needs: a full disk, and a write-ahead log that cannot be emptied.

Some space is kept in reserve for the moment the disk is full: without it even deleting what is old would fail.
"""

import contextlib
import logging
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpuenergyd.store.database import write_ahead_bytes

log = logging.getLogger(__name__)

_ROOM_FOR_IT = 4
"""The reserve is taken only where this many times its size is free: it must not be what fills the disk."""
_NEARLY_NOTHING_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Reserve:
    """A file that holds nothing but space; 0 bytes is no reserve."""

    path: Path
    num_bytes: int

    @classmethod
    def beside(cls, database: Path, num_bytes: int) -> "Reserve":
        """Return the reserve of a database."""
        return cls(database.with_name(database.name + ".reserve"), num_bytes)

    def hold(self) -> bool:
        """Take the space where there is plenty; return whether it is held. Never raises."""
        if self.num_bytes == 0:
            return False
        try:
            if self.path.stat().st_size == self.num_bytes:
                return True
        except OSError:
            pass
        if free_bytes(self.path.parent) < _ROOM_FOR_IT * self.num_bytes:
            return False
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, self.num_bytes)
            finally:
                os.close(descriptor)
        except OSError:
            self.give_up()
            return False
        return True

    def give_up(self) -> bool:
        """Give the space back to the disk; return whether there was any. Never raises."""
        try:
            had_any = self.path.stat().st_size > 0
            self.path.unlink()
        except OSError:
            return False
        return had_any


@dataclass(slots=True)
class SpaceWatch:
    """What the writer must know of its disk. The writer's thread looks, anybody may read `notices`."""

    path: Path
    reserve_bytes: int
    max_write_ahead_bytes: int
    look_period_s: float
    is_short: bool = False
    """Whether the disk was full, and there has not been plenty of room since."""
    _notices: dict[str, str] = field(default_factory=dict)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _look_at_mono_s: float = 0.0

    @property
    def reserve(self) -> Reserve:
        """The space held back."""
        return Reserve.beside(self.path, self.reserve_bytes)

    @property
    def notices(self) -> tuple[str, ...]:
        """What is wrong with the space now, in words."""
        with self._guard:
            return tuple(self._notices.values())

    def is_full(self) -> bool:
        """Return whether there is no room for a database's next page."""
        return self.path.parent.is_dir() and free_bytes(self.path.parent) < _NEARLY_NOTHING_BYTES

    def give_up_reserve(self) -> None:
        """Make room for what matters; nothing else is to be taken until there is plenty again."""
        self.is_short = True
        if self.reserve.give_up():
            log.error("history: the disk is full; the reserve is used for jobs, plans and control events")
        self._note("space", "the disk is full: readings and timelines are not recorded until there is room")

    def look(self) -> None:
        """See whether there is room again and whether the write-ahead log is being emptied, now and then."""
        now_s = time.monotonic()
        if now_s < self._look_at_mono_s:
            return
        self._look_at_mono_s = now_s + self.look_period_s
        if self.is_short and (self.reserve.hold() if self.reserve_bytes else not self.is_full()):
            self.is_short = False
            self._note("space", None)
        has_grown = write_ahead_bytes(self.path) > self.max_write_ahead_bytes
        self._note(
            "write-ahead log",
            f"its write-ahead log has grown beyond {self.max_write_ahead_bytes >> 20} MiB because somebody reads the"
            f" history in one long transaction; `fuser {self.path}` names who"
            if has_grown
            else None,
        )

    def _note(self, about: str, text: str | None) -> None:
        with self._guard:
            is_news = self._notices.get(about) != text
            if text is None:
                self._notices.pop(about, None)
            else:
                self._notices[about] = text
        if is_news:
            log.warning("history: %s", text or f"no more trouble with {about}")


def free_bytes(folder: Path) -> int:
    """Return how much this user can still write there; 0 where nobody can tell."""
    with contextlib.suppress(OSError):
        return shutil.disk_usage(folder).free
    return 0
