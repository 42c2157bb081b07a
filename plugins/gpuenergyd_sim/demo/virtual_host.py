"""The demo's host in virtual time: daemon, GPU worker, policy host and training ranks in one process, on one clock.

The demo's folder holds the request; results and progress are written into it. The code is the same as on a real host:
the daemon's composition root, its sockets and messages, the worker with its journal, the database, torch. Only clocks,
sleeps, threads and processes are replaced by those of `gpuenergyd_sim.virtual_time`.
"""

import asyncio
import importlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from signal import SIGTERM
from typing import Any

from gpuenergyd.daemon.app import serve
from gpuenergyd.daemon.gpus.host_energy import HostEnergy
from gpuenergyd.daemon.processes import policy_host
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.gpu.worker.main import main as worker_main
from gpuenergyd.gpu.worker.restore_sentinel import wait_and_restore
from gpuenergyd_sim.demo.session import check_clocks_are_restored, run_session
from gpuenergyd_sim.demo.virtual_files import VirtualFiles
from gpuenergyd_sim.virtual_time.kernel import Process, VirtualKernel

_RANKS_MODULE = "gpuenergyd_sim.training.virtual_ranks"
_END_LIMIT_S = 60.0
_LOOK_PERIOD_S = 0.2
_PREPARATION_NS = 1_000_000_000
"""Virtual time reserved for preparing the policy, during which only readings of the clock advance time."""


class VirtualChild:
    """A virtual process with the interface of those that `asyncio.create_subprocess_exec` returns."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = os.getpid()
        """Pid of the real process, which all virtual processes share."""
        self.stdin: asyncio.StreamWriter | None = None
        self.stdout: asyncio.StreamReader | None = None

    @property
    def returncode(self) -> int | None:
        """The exit status; None while the process runs."""
        return self._process.exit_status

    async def wait(self) -> int:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.dup(self._process.ended_fd)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        assert self._process.exit_status is not None  # it has ended
        return self._process.exit_status

    def terminate(self) -> None:
        self._process.signal(SIGTERM)

    def kill(self) -> None:
        self._process.kill()


class VirtualHost:
    """Starts the demo's processes as virtual processes."""

    def __init__(self, kernel: VirtualKernel) -> None:
        self._kernel = kernel
        self._daemon: Process | None = None
        self._refusal: GpuEnergyError | None = None
        self._ranks: Any = None
        self._worker: Process | None = None

    def start_daemon(self, settings: Settings, config: Path) -> None:  # noqa: ARG002  the settings are read already
        no_counters = HostEnergy(settings.state_dir / "no-counters")  # those of this host count real time

        def run() -> int:
            try:
                return serve(settings, start_child=self._start_child, host_energy=no_counters)
            except GpuEnergyError as error:
                self._refusal = error
                return error.exit_code

        self._daemon = self._kernel.start_process("daemon", run)

    async def _start_child(self, *command: str, **_: Any) -> VirtualChild:
        """Start the program of a command line: the GPU worker, or the policy host on a channel to the daemon."""
        module, arguments = command[3], list(command[4:])  # python -I -m MODULE ARGUMENT...
        if module == "gpuenergyd.gpu.worker.main":
            self._worker = self._kernel.start_process(
                "gpu-worker", lambda: worker_main(arguments, start_sentinel=self._start_sentinel)
            )
            return VirtualChild(self._worker)
        ours, theirs = socket.socketpair()
        child = VirtualChild(self._kernel.start_process("policy-host", lambda: _run_policy_host(theirs)))
        child.stdout, child.stdin = await asyncio.open_connection(sock=ours, limit=policy_host.MAX_LINE_BYTES)
        return child

    def _start_sentinel(self, journal_path: Path) -> int:
        """Start the process that restores the GPUs if the running GPU worker is killed."""
        ended_fd = self._kernel.current.process.ended_fd
        self._kernel.start_process("sentinel", lambda: wait_and_restore(ended_fd, journal_path))
        return os.getpid()

    def start_training(self, arguments: list[str], variables: Mapping[str, str]) -> None:
        os.environ.update(variables)
        self._ranks = importlib.import_module(_RANKS_MODULE).Ranks(self._kernel, arguments)

    def training_step(self) -> str | None:
        """Return None, because nothing takes virtual time before the job registers."""
        return None

    def has_training_ended(self) -> bool:
        return any(not rank.is_alive for rank in self._rank_processes())

    def check(self) -> None:
        """Raise if the daemon has refused its settings, or a process has failed."""
        if self._refusal is not None:
            raise self._refusal
        for process in filter(None, [self._daemon, *self._rank_processes()]):
            if process.exit_status:
                raise GpuEnergyError(f"{process.name} failed; see the end of the log above")

    def kill_worker(self, status: Mapping[str, Any]) -> None:  # noqa: ARG002  it is known here
        """Kill the most recently started GPU worker."""
        if self._worker is not None:
            self._worker.kill()

    def stop_training(self) -> None:
        """Stop all ranks after the same iteration, and wait for that."""
        self._ranks.stop()
        _wait_until(lambda: not any(rank.is_alive for rank in self._rank_processes()))
        self.check()

    def _rank_processes(self) -> tuple[Process, ...]:
        processes: tuple[Process, ...] = self._ranks.processes if self._ranks is not None else ()
        return processes

    def stop_daemon(self) -> None:
        if self._daemon is not None and self._daemon.is_alive:
            self._daemon.signal(SIGTERM)
            _wait_until(lambda: self._daemon is None or not self._daemon.is_alive)


def run_demo(kernel: VirtualKernel, folder: Path, *, real_mono_ns: Callable[[], int]) -> int:
    """Run the demo whose request is in the folder; return the exit status."""
    files = VirtualFiles(folder)
    request = files.read_request()
    prepare_policy(kernel, request.policy, files.announce)
    host = VirtualHost(kernel)
    try:
        outcome = run_session(request, folder, host, files)
        if request.is_held:
            files.end(outcome.reason)
            kernel.keep_real_time(real_mono_ns)
            while not files.is_released():
                time.sleep(_LOOK_PERIOD_S)
        host.stop_daemon()
        check_clocks_are_restored(outcome.world)
    except GpuEnergyError as error:
        print("gpuenergyd:", error, file=sys.stderr)  # noqa: T201  the command line shows it
        return error.exit_code
    files.end(outcome.reason)
    return 0


def prepare_policy(kernel: VirtualKernel, policy: str, announce: Callable[[str], None]) -> None:
    """Let a policy compile or load its code, so that clock and random numbers afterwards do not depend on which.

    Each reading of the virtual clock advances it. numba reads it 208,000 times to compile and 6,000 times to load its
    cache, and draws random file names.
    """
    ready_ns, draw = kernel.now_ns + _PREPARATION_NS, os.urandom
    os.urandom = os.getrandom
    policy_host.PolicyHost(announce).answer(policy_host.PlanRequest(0, "", policy))  # the daemon reports an error
    os.urandom = draw
    kernel.wait(until_ns=ready_ns)


def _run_policy_host(channel: socket.socket) -> None:
    with channel:
        policy_host.run(channel.makefile("rb"), channel.makefile("wb"))


def _wait_until(is_done: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _END_LIMIT_S
    while not is_done():
        if time.monotonic() > until_s:
            raise GpuEnergyError(f"a process did not end within {_END_LIMIT_S:g} s of virtual time")
        time.sleep(0.01)
