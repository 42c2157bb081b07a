"""Job accounts on disk, so that a job keeps its account when the daemon is killed and restarted.

A daemon that stops normally hands its jobs over to the next one. After a kill, the training processes register again as
new jobs with new ids. Each account is therefore saved with the processes of its job: a job whose processes still run
gets its account back, and a new run with the same job name starts with an empty one.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.errors import ProtocolError
from gpuenergyd.gpu.process_identity import process_start_ticks, read_boot_id
from gpuenergyd.wire.daemon_codec import decode, encode

log = logging.getLogger(__name__)

_VERSION = 2
_MAX_BYTES = 64 * 2**20

Process = tuple[int, int]
"""A pid and the start time in clock ticks since boot, since pids are reused."""


Account = TypeVar("Account")


@dataclass(frozen=True, slots=True)
class SavedAccount(Generic[Account]):
    """The saved account of one job."""

    job_name: str
    processes: tuple[Process, ...]
    account: Account


@dataclass(frozen=True, slots=True)
class FileContent(Generic[Account]):
    """What is in an account file."""

    version: int
    boot_id: str
    jobs: tuple[SavedAccount[Account], ...]


class AccountFile(Generic[Account]):
    """The file and the accounts that the previous daemon left in it; file errors are logged, never raised.

    `content_type` is the type of the file's content for this kind of account; `what` names the accounts in the log.
    """

    def __init__(self, path: Path, content_type: type[FileContent[Account]], *, what: str) -> None:
        self._path, self._content_type, self._what = path, content_type, what
        self._unclaimed: tuple[SavedAccount[Account], ...] = ()
        self._is_read = False
        self._written: bytes = b""

    def _read(self) -> None:
        self._is_read = True
        try:
            with self._path.open("rb") as file:
                saved = decode(file.read(_MAX_BYTES + 1), self._content_type, max_bytes=_MAX_BYTES)
        except FileNotFoundError:
            return
        except (OSError, ProtocolError) as error:
            log.warning("cannot read saved %s: %s: %s", self._what, self._path, error)
            return
        if saved.version == _VERSION and saved.boot_id == read_boot_id():
            self._unclaimed = saved.jobs

    def take_over(self, job_name: str, pids: Mapping[int, int]) -> Account | None:
        """Remove and return the saved account of the job to which these processes (pid by rank) belonged."""
        if not self._is_read:
            self._read()
        processes = set(running_processes(pids))
        for saved in self._unclaimed:
            if saved.job_name == job_name and processes & set(saved.processes):
                self._unclaimed = tuple(other for other in self._unclaimed if other is not saved)
                return saved.account
        return None

    def save(self, jobs: Iterable[SavedAccount[Account]]) -> None:
        """Save the accounts of running jobs and of jobs yet to register again, if anything has changed.

        The file is replaced atomically.
        """
        if not self._is_read:
            self._read()
        unclaimed = tuple(saved for saved in self._unclaimed if any(is_alive(process) for process in saved.processes))
        body = encode(FileContent(_VERSION, read_boot_id(), (*unclaimed, *jobs)))
        if body == self._written:
            return
        try:
            replace_file(self._path, body)
            self._written = body
        except OSError as error:
            log.warning("cannot save %s: %s: %s", self._what, self._path, error.strerror)


def running_processes(pids: Mapping[int, int]) -> tuple[Process, ...]:
    """Return pid and start time of the processes that are running."""
    found = ((pid, process_start_ticks(pid)) for _, pid in sorted(pids.items()))
    return tuple((pid, ticks) for pid, ticks in found if ticks is not None)


def is_alive(process: Process) -> bool:
    """Return whether the process with this pid and start time is running."""
    return process_start_ticks(process[0]) == process[1]
