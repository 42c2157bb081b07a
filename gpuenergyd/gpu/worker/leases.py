"""Leases of GPUs in the worker, and the processes whose death ends a lease.

The daemon sends a pidfd of every process of a job. So the worker sees a process die as soon as the daemon does, and
restores at once even when the daemon is busy.
"""

import hmac
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ProtocolError
from gpuenergyd.gpu.worker.daemon_connection import DaemonConnection


class Leases:
    """The leases in force. `drop` and `of` may be called on any thread, the rest on the main thread only.

    `on_death` gets the id and the GPUs of a lease that has ended because one of its processes died.
    """

    def __init__(self, watcher: DaemonConnection, on_death: Callable[[str, Sequence[str]], None]) -> None:
        self._watcher = watcher
        self._on_death = on_death
        self._lease_of: dict[str, str] = {}
        self._pidfds: dict[int, str] = {}

    def of(self, gpu_uuid: str) -> str | None:
        """Return the id of a GPU's lease."""
        return self._lease_of.get(gpu_uuid)

    def grant(self, lease_id: str, gpu_uuids: Sequence[str], pidfds: Sequence[int]) -> None:
        """Add GPUs to a lease; takes over the pidfds, which replace those of an earlier grant."""
        self._lease_of.update(dict.fromkeys(gpu_uuids, lease_id))
        self._forget_processes(fd for fd, known in self._pidfds.items() if known == lease_id)
        for fd in pidfds:
            self._pidfds[fd] = lease_id
            self._watcher.watch(fd, lambda fd=fd: self._end_of_dead(fd))  # type: ignore[misc]  # mypy: default of fd

    def drop(self, gpu_uuids: Iterable[str]) -> None:
        """Remove GPUs from their leases."""
        for uuid in gpu_uuids:
            self._lease_of.pop(uuid, None)

    def end(self, gpu_uuids: Iterable[str]) -> None:
        """Remove GPUs from their leases, and stop watching processes of leases without a GPU."""
        self.drop(gpu_uuids)
        left = set(self._lease_of.values())
        self._forget_processes(fd for fd, lease_id in self._pidfds.items() if lease_id not in left)

    def end_all(self) -> None:
        self.end(tuple(self._lease_of))

    def _end_of_dead(self, fd: int) -> None:
        """End the lease of a process that has died."""
        lease_id = self._pidfds.get(fd)
        if lease_id is None:  # forgotten since it became readable
            return
        uuids = tuple(uuid for uuid, known in self._lease_of.items() if known == lease_id)
        self._forget_processes(fd for fd, known in self._pidfds.items() if known == lease_id)
        self.drop(uuids)
        if uuids:
            self._on_death(lease_id, uuids)

    def _forget_processes(self, fds: Iterable[int]) -> None:
        for fd in tuple(fds):
            del self._pidfds[fd]
            self._watcher.unwatch(fd)
            os.close(fd)


MAX_KEEP_S = 60.0
"""Upper bound for every handover: nothing watches over the jobs during one."""
_MIN_TOKEN_CHARS = 32


class HandoverResult(Enum):
    """The fate of kept leases when a daemon connects."""

    NOTHING_KEPT = auto()
    TAKEN_OVER = auto()
    WRONG_TOKEN = auto()


@dataclass(slots=True)
class LeaseHandover:
    """A handover offered by the connected daemon; it begins when the connection ends."""

    _token: str = ""
    _keep_s: float = 0.0
    _until_mono_s: float | None = None

    def offer(self, token: str, keep_s: float) -> None:
        """Prepare to keep the leases when the connection ends.

        Raises:
            ProtocolError: a token that could be guessed, or a time out of range.
        """
        if len(token) < _MIN_TOKEN_CHARS or not 0.0 < keep_s <= MAX_KEEP_S:
            raise ProtocolError(
                f"handover of {keep_s:g} s with a token of {count_text(len(token), 'character')}: expected"
                f" up to {MAX_KEEP_S:g} s and at least {_MIN_TOKEN_CHARS} characters"
            )
        self._token, self._keep_s = token, keep_s

    def begin(self, now_mono_s: float) -> bool:
        """Start keeping the leases, if a handover was offered; return whether it was."""
        if not self._token:
            return False
        self._until_mono_s = now_mono_s + self._keep_s
        return True

    def has_expired(self, now_mono_s: float) -> bool:
        """Return, once, whether no daemon claimed the leases in time."""
        if self._until_mono_s is None or now_mono_s < self._until_mono_s:
            return False
        self._end()
        return True

    def claim(self, token: str) -> HandoverResult:
        """Decide whether a connecting daemon gets the kept leases; in any case the handover is over."""
        if self._until_mono_s is None:
            return HandoverResult.NOTHING_KEPT
        is_right = hmac.compare_digest(token.encode(), self._token.encode())
        self._end()
        return HandoverResult.TAKEN_OVER if is_right else HandoverResult.WRONG_TOKEN

    def _end(self) -> None:
        self._token, self._until_mono_s = "", None
