"""Helper processes of a daemon that are forked from one with their modules loaded, instead of importing them again.

A daemon of the tests forks its first GPU worker and its first policy host before it starts any thread; each waits until
the daemon starts it. Later ones, after a kill, are started as everywhere else. To import the policies, load their
compiled kernels and start an interpreter takes longer than most tests need otherwise.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from gpuenergyd.daemon.processes import policy_host
from gpuenergyd.daemon.processes.launch import ChildWorker, StartChild, process_launchers
from gpuenergyd.daemon.settings import SIMULATED, Settings
from gpuenergyd.gpu.worker.main import main as run_worker
from gpuenergyd.service_manager import child_environment

_POLICIES = ("bubble-aware", "uniform", "cost")
_loaded: list[str] = []


def load_policies() -> None:
    """Load the policies that daemons of the tests use, with their kernels: their helpers are forked from now on."""
    for name in _POLICIES:
        error = policy_host.PolicyHost().answer(policy_host.PlanRequest(0, "", name)).error
        assert error is None, error
        _loaded.append(name)


def fork_helpers(settings: Settings) -> StartChild:
    """Fork the first helpers of a daemon, which has no other thread yet, and return what starts them and later ones.

    Without loaded policies, and for a library that the loader has to find, all are started by their commands.
    """
    forked: dict[str, ForkedChild] = {}
    if _loaded:
        limit = str(settings.policy_memory_limit_bytes or 0)
        forked["gpuenergyd.daemon.processes.policy_host"] = ForkedChild(
            lambda channel: _run_policy_host(channel, limit)
        )
        worker = process_launchers(settings).worker
        if settings.driver == SIMULATED and isinstance(worker, ChildWorker):
            arguments = worker.command[4:]  # python -I -m MODULE ARGUMENT...
            forked["gpuenergyd.gpu.worker.main"] = ForkedChild(lambda _: run_worker(arguments))

    async def start(*command: str, **options: Any) -> Any:
        module = next((word for word in command if word in forked), None)
        if module is None:
            return await asyncio.create_subprocess_exec(*command, **options)
        child = forked.pop(module)
        await child.start()
        return child

    return start


class ForkedChild:
    """A child process that waits to be started, with the interface of those of `asyncio.create_subprocess_exec`."""

    def __init__(self, program: Callable[[socket.socket], int]) -> None:
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None
        self._status: int | None = None
        self._connection, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._connection.close()
            _run(program, theirs)
        theirs.close()

    async def start(self) -> None:
        self._connection.send(b"!")
        self.stdout, self.stdin = await asyncio.open_connection(sock=self._connection, limit=policy_host.MAX_LINE_BYTES)

    @property
    def returncode(self) -> int | None:
        """The exit status; None while the process runs."""
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    async def wait(self) -> int:
        while (status := self.returncode) is None:
            with contextlib.suppress(ChildProcessError):  # another caller found it ended meanwhile, and its status
                await asyncio.to_thread(os.waitid, os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return status

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)


def _run(program: Callable[[socket.socket], int], connection: socket.socket) -> None:
    """Be a helper as one that was started by its command, and end."""
    status = 1
    try:
        if connection.recv(1):  # else the daemon has ended without starting it
            os.setsid()
            os.closerange(3, connection.fileno())
            os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
            environment = child_environment()
            os.environ.clear()
            os.environ.update(environment)
            status = program(connection)
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run_policy_host(connection: socket.socket, memory_limit_bytes: str) -> int:
    os.dup2(connection.fileno(), 0)
    os.dup2(connection.fileno(), 1)
    connection.close()
    sys.argv = ["policy_host", memory_limit_bytes]
    policy_host.main()
    return 0
