"""Finds what a test leaves behind: child processes, threads, sockets and asyncio tasks."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep  # the originals: a test may replace those of the module
from typing import Any, TypeVar

from tests.support import fork_server
from tests.support.processes import child_pids

T = TypeVar("T")
GRACE_S = 60.0
"""How long a resource that is being released may take until it counts as leaked."""
_FORK_SERVER_COMMAND = f"-m {fork_server.MODULE}"
_SHARED_COMMANDS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", _FORK_SERVER_COMMAND)
"""Helper processes that are started once and kept for the whole session."""


@dataclass(slots=True)
class PendingTasks:
    """Tasks that were still pending when the coroutine given to `asyncio.run` had returned."""

    names: list[str] = field(default_factory=list)

    async def watched(self, main: Coroutine[Any, Any, T]) -> T:
        """Await `main`, then record every other task that is still pending."""
        try:
            return await main
        finally:
            # A task that was cancelled, or has just got its last result, needs a few turns of the loop to end.
            for _ in range(10):
                await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            self.names += [repr(task) for task in left]


def open_resources() -> dict[str, str]:
    """Return this process's children, threads and open sockets: a unique key and a description for each."""
    children = {f"process {pid}": _command_line(pid) for pid in child_pids(os.getpid())}
    if fork_server.SERVER.pid is not None:
        children |= {f"process {pid}": "forked by the tests" for pid in child_pids(fork_server.SERVER.pid)}
    threads = {f"thread {thread.ident}": repr(thread) for thread in threading.enumerate()}
    return {**children, **threads, **_sockets()}


def leaked_since(before: Mapping[str, str]) -> list[str]:
    """Return what has been opened since `before` and is not closed within the grace period."""
    deadline = monotonic() + GRACE_S
    while True:
        left = [
            f"{key}: {what}"
            for key, what in open_resources().items()
            if key not in before and not any(command in what for command in _SHARED_COMMANDS)
        ]
        if not left or monotonic() > deadline:
            return left
        sleep(0.002)


def _sockets() -> dict[str, str]:
    found: dict[str, str] = {}
    with os.scandir("/proc/self/fd") as descriptors:
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # closed meanwhile
                target = os.readlink(descriptor)  # noqa: PTH115  twice in each test, and faster
                if target.startswith("socket:"):
                    found[target] = f"file descriptor {descriptor.name}"
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended"
