"""How the processes beside the core come to be: started as its children, or reached where units of their own listen.

The one seam between the two: everything else talks to a worker by its link and to a policy host by its channel and
does not know who started them. A child is ended by its parent. A unit belongs to the service manager: it is told by
its connection being cut, and its own watchdog or guard ends it when it does not listen.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gpuenergyd.daemon.processes.policy_host import MAX_LINE_BYTES
from gpuenergyd.daemon.settings import Mode, Processes, Settings
from gpuenergyd.errors import GpuError, JournalError
from gpuenergyd.gpu.link.client import require_trusted_listener
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.service_manager import child_environment

log = logging.getLogger(__name__)

POLICY_HOST_COMMAND = (sys.executable, "-I", "-m", "gpuenergyd.daemon.processes.policy_host")


class WorkerProcess(Protocol):
    """The process behind the link to the GPU worker."""

    @property
    def is_running(self) -> bool:
        """Whether it can be expected to answer."""
        ...

    async def start(self) -> None:
        """See to it that one runs.

        Raises:
            OSError: it cannot be started.
        """
        ...

    async def wait(self) -> str:
        """Return why it ended, once it has."""
        ...

    async def end(self, limit_s: float) -> None:
        """End it, by force after the limit; its link has been cut."""
        ...

    def has_left_gpus(self) -> bool:
        """Return whether GPUs wait for its successor to put them back."""
        ...


@dataclass(slots=True)
class ChildWorker:
    """A worker that the core starts, and ends."""

    command: Sequence[str]
    journal_path: Path
    _process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether the child lives."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start a child in a session of its own: Ctrl-C in a terminal reaches the core alone."""
        self._process = await asyncio.create_subprocess_exec(
            *self.command, start_new_session=True, env=child_environment()
        )

    async def wait(self) -> str:
        """Return its exit status in words."""
        status = None if self._process is None else await self._process.wait()
        return f"the GPU worker ended with status {status}; its last lines say why"

    async def end(self, limit_s: float) -> None:
        """Ask it to end, and kill it when it does not: the next one restores."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            log.warning("GPU worker %d does not end; it is killed, and the next one restores", process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def has_left_gpus(self) -> bool:
        """Return whether the journal still lists any; one that cannot be read is for the successor to judge."""
        try:
            return bool(Journal(self.journal_path).read().entries)
        except JournalError:
            return True


@dataclass(slots=True)
class WorkerUnit:
    """A worker that is a unit of its own: connecting starts it, its watchdog ends it, `ExecStopPost=` restores."""

    is_running: bool = True

    async def start(self) -> None:
        """Leave that to the connection."""

    async def wait(self) -> str:
        """Never return: the end of the link is all that is heard of it."""
        await asyncio.Event().wait()
        raise AssertionError

    async def end(self, limit_s: float) -> None:
        """Leave that to the service manager."""

    def has_left_gpus(self) -> bool:
        """Return no: `ExecStopPost=` has put them back."""
        return False


@dataclass(slots=True)
class PolicyChannel:
    """Two-way lines to a policy host; `kill` ends it whatever it is doing."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int | None
    is_alive: Callable[[], bool]
    why_ended: Callable[[], Awaitable[str]]
    kill: Callable[[], Awaitable[None]]


StartPolicyHost = Callable[[], Awaitable[PolicyChannel]]


async def start_policy_child(memory_limit_bytes: int | None, command: Sequence[str]) -> PolicyChannel:
    """Start a policy host as a child and return its channel.

    Raises:
        OSError: it cannot be started.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        str(memory_limit_bytes or 0),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=MAX_LINE_BYTES,
        start_new_session=True,
        env=child_environment(),
    )
    assert process.stdin is not None
    assert process.stdout is not None
    writer = process.stdin

    async def why_ended() -> str:
        return f"exit status {await process.wait()}"

    async def kill() -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        await _close(writer)

    return PolicyChannel(
        process.stdout, writer, process.pid, lambda: process.returncode is None, why_ended=why_ended, kill=kill
    )


async def connect_policy_unit(path: Path) -> PolicyChannel:
    """Connect to where the policy host's unit listens: each connection gets a host of its own.

    Raises:
        OSError: nobody listens.
        DriverError: somebody listens whom we do not trust.
    """
    reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
    try:
        require_trusted_listener(writer.get_extra_info("socket"), path)
    except GpuError:
        await _close(writer)
        raise

    async def why_ended() -> str:
        return "its unit closed the connection"

    async def kill() -> None:
        # Its guard sees the connection end and kills it.
        await _close(writer)

    return PolicyChannel(
        reader,
        writer,
        None,
        lambda: not (writer.is_closing() or reader.at_eof()),
        why_ended=why_ended,
        kill=kill,
    )


@dataclass(frozen=True, slots=True)
class ProcessLaunchers:
    """Who starts what."""

    worker: WorkerProcess
    policy_host: StartPolicyHost = field(repr=False)


def process_launchers(settings: Settings) -> ProcessLaunchers:
    """Return how worker and policy host come to be under these settings."""
    match settings.processes:
        case Processes.CHILDREN:
            limit_bytes = settings.policy_memory_limit_bytes
            return ProcessLaunchers(
                ChildWorker([*worker_command(settings), "--exit-with-core"], settings.journal_path),
                lambda: start_policy_child(limit_bytes, POLICY_HOST_COMMAND),
            )
        case Processes.UNITS:
            return ProcessLaunchers(WorkerUnit(), lambda: connect_policy_unit(settings.policy_socket_path))


def worker_command(settings: Settings) -> list[str]:
    """Return the worker's command line: standard library and driver only, told everything it needs to know."""
    command = [sys.executable, "-I", "-m", "gpuenergyd.gpu.worker.main"]
    command += ["--link", str(settings.worker_link_path), "--journal", str(settings.journal_path)]
    command += ["--driver", settings.driver, "--sample-period-s", f"{settings.sample_period_s:g}"]
    if settings.world_path is not None:
        command += ["--world", str(settings.world_path)]
    if settings.mode is Mode.OBSERVE:
        command.append("--observe-only")
    return command


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
