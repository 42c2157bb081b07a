"""Which lease each GPU is under in the worker, and the processes whose death ends a lease.

The core hands over a pidfd of every process of a job. So when one dies the worker knows as soon as the core does, and
restores at once: however busy the core is, no GPU waits for it.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Watch(Protocol):
    """Something that calls back when a file descriptor can be read."""

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Begin to watch."""
        ...

    def unwatch(self, fd: int) -> None:
        """Stop to watch."""
        ...


class Leases:
    """The leases in force. `drop` and `of` may be called on any thread, the rest on the one that serves the core.

    `on_death` gets a lease's id and its GPUs when one of its processes has died; the lease has ended by then.
    """

    def __init__(self, watch: Watch, on_death: Callable[[str, Sequence[str]], None]) -> None:
        self._watch = watch
        self._on_death = on_death
        self._lease_of: dict[str, str] = {}
        self._pidfds: dict[int, str] = {}

    def of(self, gpu_uuid: str) -> str | None:
        """Return the lease that a GPU is under."""
        return self._lease_of.get(gpu_uuid)

    def grant(self, lease_id: str, gpu_uuids: Sequence[str], pidfds: Sequence[int]) -> None:
        """Put GPUs under a lease; the pidfds are ours from now on and replace those of an earlier grant."""
        self._lease_of.update(dict.fromkeys(gpu_uuids, lease_id))
        self._forget_processes(fd for fd, known in self._pidfds.items() if known == lease_id)
        for fd in pidfds:
            self._pidfds[fd] = lease_id
            self._watch.watch(fd, lambda fd=fd: self._died(fd))  # type: ignore[misc]  # mypy cannot infer a default

    def drop(self, gpu_uuids: Iterable[str]) -> None:
        """Take GPUs out of their leases."""
        for uuid in gpu_uuids:
            self._lease_of.pop(uuid, None)

    def end(self, gpu_uuids: Iterable[str]) -> None:
        """Take GPUs out of their leases, and forget the processes of leases without a GPU."""
        self.drop(gpu_uuids)
        left = set(self._lease_of.values())
        self._forget_processes(fd for fd, lease_id in self._pidfds.items() if lease_id not in left)

    def end_all(self) -> None:
        """End every lease."""
        self.end(tuple(self._lease_of))

    def _died(self, fd: int) -> None:
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
            self._watch.unwatch(fd)
            os.close(fd)
