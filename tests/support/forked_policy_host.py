"""A policy host that is forked from a process with all policies loaded, instead of importing them again.

A daemon of the tests forks its first policy host before it starts any thread. Later ones, after a kill, are started as
everywhere else. Importing the policies and loading their compiled kernels takes longer than most tests need otherwise.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.daemon.processes import launch, policy_host
from gpuenergyd.daemon.processes.launch import POLICY_HOST_COMMAND, PolicyChannel, StartChild, start_policy_child
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.service_manager import child_environment

_POLICIES = ("bubble-aware", "uniform", "cost")
_loaded: list[str] = []


def load_policies() -> None:
    """Load the policies that daemons of the tests use, with their kernels: their hosts are forked from now on."""
    for name in _POLICIES:
        error = policy_host.PolicyHost().answer(policy_host.PlanRequest(0, "", name)).error
        assert error is None, error
        _loaded.append(name)


def fork_policy_host(settings: Settings) -> None:
    """Fork the first policy host of a daemon, which has no other thread yet; without loaded policies do nothing."""
    if not _loaded:
        return
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        _run_host(theirs, settings.policy_memory_limit_bytes or 0)
    theirs.close()
    forked = [_ForkedHost(pid, ours)]

    async def start(
        memory_limit_bytes: int | None, command: Sequence[str], start_child: StartChild = asyncio.create_subprocess_exec
    ) -> PolicyChannel:
        if forked and tuple(command) == POLICY_HOST_COMMAND:
            return await forked.pop().channel()
        return await start_policy_child(memory_limit_bytes, command, start_child)

    launch.start_policy_child = start


@dataclass(slots=True)
class _ForkedHost:
    """A forked policy host, a child of this process."""

    pid: int
    connection: socket.socket
    status: int | None = None

    async def channel(self) -> PolicyChannel:
        reader, writer = await asyncio.open_unix_connection(sock=self.connection, limit=policy_host.MAX_LINE_BYTES)

        async def kill() -> None:
            if self.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)
            await self.exit_reason()
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

        return PolicyChannel(reader, writer, self.pid, is_alive=self.is_alive, exit_reason=self.exit_reason, kill=kill)

    def is_alive(self) -> bool:
        if self.status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if ended else None
        return self.status is None

    async def exit_reason(self) -> str:
        if self.is_alive():
            with contextlib.suppress(ChildProcessError):  # another caller found it ended meanwhile, and its status
                await asyncio.to_thread(os.waitid, os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            self.is_alive()
        return f"exit status {self.status}"


def _run_host(connection: socket.socket, memory_limit_bytes: int) -> None:
    """Be a policy host as one that was started by its command, and end."""
    status = 1
    try:
        os.setsid()
        os.dup2(connection.fileno(), 0)
        os.dup2(connection.fileno(), 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        environment = child_environment()
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = ["policy_host", str(memory_limit_bytes)]
        policy_host.main()
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)
