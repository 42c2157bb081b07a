"""Launching helper processes: GPU worker and policy host as child processes, or as systemd units to connect to.

The rest of the daemon uses the worker's link and the policy host's channel, and does not know which of the two it is.
The daemon ends its children. A unit ends when its connection is closed; if it hangs, its watchdog or guard process
kills it.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpuenergyd.daemon.processes.policy_host import MAX_LINE_BYTES
from gpuenergyd.daemon.settings import Processes, Settings
from gpuenergyd.errors import GpuError, JournalError
from gpuenergyd.gpu.link.client import require_trusted_listener
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.service_manager import child_environment

log = logging.getLogger(__name__)

POLICY_HOST_COMMAND = (sys.executable, "-I", "-m", "gpuenergyd.daemon.processes.policy_host")


StartChild = Callable[..., Awaitable[Any]]
"""Starts a child process, like `asyncio.create_subprocess_exec`, from its command line."""


@dataclass(slots=True)
class ChildWorker:
    """A GPU worker that runs as a child process of the daemon."""

    command: Sequence[str]
    journal_path: Path
    start_child: StartChild = asyncio.create_subprocess_exec
    _process: asyncio.subprocess.Process | None = None

    @property
    def is_running(self) -> bool:
        """Whether the child process runs."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        """Process id of the child that was started last."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the child in a session of its own, so that Ctrl-C in a terminal reaches only the daemon.

        Raises:
            OSError: it cannot be started.
        """
        self._process = await self.start_child(*self.command, start_new_session=True, env=child_environment())

    async def wait(self) -> str:
        """Wait until the child exits and return a message with its exit status."""
        status = None if self._process is None else await self._process.wait()
        return f"the GPU worker exited with status {status}; its last log lines give the reason"

    async def end(self, limit_s: float) -> None:
        """Send SIGTERM, then SIGKILL after the limit; the next worker restores what a killed worker left."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), limit_s)
        except TimeoutError:
            log.warning("GPU worker %d did not exit; killing it, the next worker restores the GPUs", process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def has_unrestored_gpus(self) -> bool:
        """Return whether the journal lists GPUs or cannot be read."""
        try:
            content = Journal(self.journal_path).read()
        except JournalError:
            return True
        return bool(content.entries) or content.is_incomplete


@dataclass(slots=True)
class WorkerUnit:
    """The GPU worker as a systemd unit: socket-activated, ended by its watchdog, restoring with `ExecStopPost=`."""

    is_running: bool = True
    pid: int | None = None

    async def start(self) -> None:
        """Do nothing: connecting to the socket starts the unit."""

    async def wait(self) -> str:
        """Wait forever, since the end of the unit is seen only as the end of the link."""
        await asyncio.Event().wait()
        raise AssertionError

    async def end(self, limit_s: float) -> None:
        """Do nothing: the service manager ends the unit."""

    def has_unrestored_gpus(self) -> bool:
        """Return False: `ExecStopPost=` restores the GPUs."""
        return False


WorkerProcess = ChildWorker | WorkerUnit


@dataclass(slots=True)
class PolicyChannel:
    """A line-based connection to a policy host; `kill` ends the host even while a policy computes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int | None
    is_alive: Callable[[], bool]
    exit_reason: Callable[[], Awaitable[str]]
    kill: Callable[[], Awaitable[None]]


StartPolicyHost = Callable[[], Awaitable[PolicyChannel]]


async def start_policy_child(
    memory_limit_bytes: int | None, command: Sequence[str], start_child: StartChild = asyncio.create_subprocess_exec
) -> PolicyChannel:
    """Start a policy host as a child process and return its channel; raise OSError if it cannot be started."""
    process = await start_child(
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

    async def exit_reason() -> str:
        return f"exit status {await process.wait()}"

    async def kill() -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()
        await _close(writer)

    return PolicyChannel(
        process.stdout, writer, process.pid, lambda: process.returncode is None, exit_reason=exit_reason, kill=kill
    )


async def connect_policy_unit(path: Path) -> PolicyChannel:
    """Connect to the socket of the policy host's unit, which starts one host per connection.

    Raises:
        OSError: nothing listens on the socket.
        DriverError: the listener runs as a user that is not trusted.
    """
    reader, writer = await asyncio.open_unix_connection(path, limit=MAX_LINE_BYTES)
    try:
        require_trusted_listener(writer.get_extra_info("socket"), path)
    except GpuError:
        await _close(writer)
        raise

    async def exit_reason() -> str:
        return "the unit closed the connection"

    async def kill() -> None:
        # The guard process of the unit kills the host when the connection ends.
        await _close(writer)

    return PolicyChannel(
        reader, writer, None, lambda: not (writer.is_closing() or reader.at_eof()), exit_reason=exit_reason, kill=kill
    )


@dataclass(frozen=True, slots=True)
class ProcessLaunchers:
    """Launchers of the two helper processes."""

    worker: WorkerProcess
    policy_host: StartPolicyHost = field(repr=False)


def process_launchers(settings: Settings, start_child: StartChild = asyncio.create_subprocess_exec) -> ProcessLaunchers:
    """Return the launchers of GPU worker and policy host for `settings.processes`."""
    match settings.processes:
        case Processes.CHILDREN:
            limit_bytes = settings.policy_memory_limit_bytes
            return ProcessLaunchers(
                # If the daemon were killed while the worker starts, the worker would not see its parent change.
                ChildWorker(
                    [*worker_command(settings), "--exit-with-daemon", "--parent-pid", str(os.getpid())],
                    settings.journal_path,
                    start_child,
                ),
                lambda: start_policy_child(limit_bytes, POLICY_HOST_COMMAND, start_child),
            )
        case Processes.UNITS:
            return ProcessLaunchers(WorkerUnit(), lambda: connect_policy_unit(settings.policy_socket_path))


def worker_command(settings: Settings) -> list[str]:
    """Return the GPU worker's command line, which contains all its settings."""
    command = [sys.executable, "-I", "-m", "gpuenergyd.gpu.worker.main"]
    command += ["--link", str(settings.worker_link_path), "--journal", str(settings.journal_path)]
    command += ["--driver", settings.driver, "--sample-period-s", f"{settings.sample_period_s:g}"]
    if (path := settings.driver_path) is not None:
        command += ["--world", str(path)]
    if settings.is_observing:
        command.append("--observe-only")
    return command


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
