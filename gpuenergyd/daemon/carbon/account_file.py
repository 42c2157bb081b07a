"""Slowdown accounts that outlive the core: a job goes on with what it has spent, whoever was restarted or killed.

A core that ends in order hands its jobs over, one that is killed does not: their processes register anew, as jobs with
new ids and a budget that nothing was spent of yet, unless somebody remembers. So accounts are kept in one small file,
each with the processes it belongs to: a process that lives on keeps its account, a new run of the same name gets none.
"""

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.core.carbon.account import WorkSlot
from gpuenergyd.core.carbon.slowdown_account import SlowdownAccount
from gpuenergyd.errors import ProtocolError
from gpuenergyd.gpu.process_identity import process_start_ticks, read_boot_id
from gpuenergyd.wire.daemon_codec import decode, encode

log = logging.getLogger(__name__)

_VERSION = 1
_MAX_BYTES = 64 * 2**20

Process = tuple[int, int]
"""pid, and when it began in clock ticks since boot: a pid alone is reused."""


@dataclass(frozen=True, slots=True)
class SavedAccount:
    """What is kept of one job."""

    job_name: str
    processes: tuple[Process, ...]
    account: SlowdownAccount
    slots: tuple[WorkSlot, ...]
    frontier: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    version: int
    boot_id: str
    jobs: tuple[SavedAccount, ...]


class AccountFile:
    """The file, and what an earlier core left in it; nothing here raises, for a budget is no reason not to serve."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._earlier: tuple[SavedAccount, ...] = ()
        self._is_read = False
        self._written: bytes = b""

    def _read(self) -> None:
        self._is_read = True
        try:
            with self._path.open("rb") as file:
                kept = decode(file.read(_MAX_BYTES + 1), _Kept, max_bytes=_MAX_BYTES)
        except FileNotFoundError:
            return
        except (OSError, ProtocolError) as error:
            log.warning("slowdown accounts of an earlier daemon are lost: %s: %s", self._path, error)
            return
        if kept.version == _VERSION and kept.boot_id == read_boot_id():
            self._earlier = kept.jobs

    def recall(self, job_name: str, pids: Mapping[int, int]) -> SavedAccount | None:
        """Return what was kept of the job that these processes (by rank) took part in before; it is told once."""
        if not self._is_read:
            self._read()
        processes = set(identified(pids))
        for kept in self._earlier:
            if kept.job_name == job_name and processes & set(kept.processes):
                self._earlier = tuple(other for other in self._earlier if other is not kept)
                return kept
        return None

    def keep(self, jobs: Iterable[SavedAccount]) -> None:
        """Write down the jobs there are, and those of which nobody has come back yet, if that is news.

        The file is there as a whole or not at all.
        """
        if not self._is_read:
            self._read()
        waiting = tuple(kept for kept in self._earlier if any(is_alive(process) for process in kept.processes))
        body = encode(_Kept(_VERSION, read_boot_id(), (*waiting, *jobs)))
        if body == self._written:
            return
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(body)
            unfinished.rename(self._path)
            self._written = body
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            log.warning("slowdown accounts are not kept: %s: %s", self._path, error.strerror)


def identified(pids: Mapping[int, int]) -> tuple[Process, ...]:
    """Return the processes among these that live, told apart from others with the same pid."""
    found = ((pid, process_start_ticks(pid)) for _, pid in sorted(pids.items()))
    return tuple((pid, ticks) for pid, ticks in found if ticks is not None)


def is_alive(process: Process) -> bool:
    """Return whether that very process still runs."""
    return process_start_ticks(process[0]) == process[1]
