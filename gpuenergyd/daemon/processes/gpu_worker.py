"""Supervision of the GPU worker process: starts or connects to it, pings and restarts it, and sends it commands."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.daemon.processes.launch import WorkerProcess
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.client import LinkEvent, WorkerLink, WorkerLost
from gpuenergyd.gpu.link.messages import Command, GpuHealthChange, GpuSettingsRead, Ping, ReplyT, Restore, Welcome
from gpuenergyd.gpu.restore.policy import RestoreRules

log = logging.getLogger(__name__)

_CONNECT_LIMIT_S = 15.0
_PING_PERIOD_S = 1.0
_HUNG_LIMIT_S = 0.5
_RESTORE_AND_EXIT_LIMIT_S = 40.0
"""A worker that has lost the daemon restores every GPU before it exits, and driver calls can be this slow."""


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has started and found these GPUs."""

    identities: tuple[GpuIdentity, ...]


WorkerEvent = WorkerReady | LinkEvent


class GpuWorker:
    """The daemon's GPU worker across restarts of the process.

    Implements the worker port with the connected worker. Without a worker, commands raise GpuError and clock requests
    are dropped.
    """

    def __init__(self, settings: Settings, process: WorkerProcess, on_event: Callable[[WorkerEvent], None]) -> None:
        self._settings = settings
        self._process = process
        self._on_event = on_event
        self._link: WorkerLink | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_shutting_down = False
        self._lost = asyncio.Event()
        self._is_hung = False
        self._early: list[LinkEvent] | None = None
        """Events received before the GPUs are known; None afterwards."""
        self._heartbeat_mono_s: float | None = None
        self.trouble: str | None = "the GPU worker has not started yet"
        self.num_restarts = 0
        self.has_taken_over = False
        """Whether the worker has kept the previous daemon's leases for this one."""
        self._token = ""

    @property
    def is_alive(self) -> bool:
        """Whether a worker runs and can be reached."""
        return self._process.is_running and self._link is not None and self._link.is_open

    @property
    def welcome(self) -> Welcome | None:
        """What the worker reported at its start: process ids, and what its driver lacks; None without a worker."""
        return self._link.welcome if self._link is not None and self.is_alive else None

    @property
    def heartbeat_age_s(self) -> float | None:
        """Time since the last sign of life of the worker, None before the first one."""
        return None if self._heartbeat_mono_s is None else time.monotonic() - self._heartbeat_mono_s

    async def start(self, token: str = "") -> None:
        """Start a worker and its supervision; returns when the first worker is ready or has failed to start.

        `token` is the previous daemon's hand-over token, which takes over the leases that the worker has kept.
        """
        self._token = token
        await self._start_process()
        self._token = ""
        self._supervision = asyncio.create_task(self._supervise(), name="worker supervision")

    def announce_shutdown(self) -> None:
        """Mark later restores as part of the shutdown, from which `restore_policy = "keep"` exempts some GPUs."""
        self._is_shutting_down = True

    async def close(self) -> None:
        """Close the link and wait until the worker has restored every GPU and exited."""
        self._is_closing = True
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        await self._end_process()

    async def do(self, command: Command[ReplyT], pidfds: Sequence[int] = ()) -> ReplyT:
        """Have the worker execute a command; the next worker repeats a restore that fails."""
        wanted: Command[Any] = command
        if isinstance(wanted, Restore) and self._is_shutting_down:
            command = cast("Command[ReplyT]", replace(wanted, is_daemon_ending=True))
        return await self._reachable().do(command, pidfds)

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        if self._link is not None:
            self._link.request_clock(gpu_uuid, request)

    def _reachable(self) -> WorkerLink:
        if self._link is None or not self._link.is_open:
            raise GpuError("no GPU worker is running; the daemon is restarting it")
        return self._link

    async def _supervise(self) -> None:
        backoff = RestartBackoff()
        while True:
            started_mono_s = time.monotonic()
            was_ready = self.is_alive
            if was_ready:
                await self._watch()
            lifetime_s = time.monotonic() - started_mono_s
            await self._end_process()
            has_unrestored_gpus = self._process.has_unrestored_gpus()
            delay_s = backoff.next_delay_s(lifetime_s=lifetime_s, was_ready=was_ready, is_urgent=has_unrestored_gpus)
            await asyncio.sleep(delay_s)
            self.num_restarts += 1
            await self._start_process()

    async def _watch(self) -> None:
        """Ping the worker; return when the link is cut or the worker does not answer."""
        while not self._lost.is_set():
            try:
                await self._reachable().do(Ping())
                self._heartbeat_mono_s = time.monotonic()
            except GpuError as error:
                self._is_hung = not self._lost.is_set()
                self._handle(WorkerLost(f"the GPU worker does not answer: {error}"))
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), _PING_PERIOD_S)

    async def _start_process(self) -> None:
        self._lost.clear()
        self._is_hung = False
        self._early = []
        try:
            await self._process.start()
            connecting = asyncio.create_task(self._connect())
            dying = asyncio.create_task(self._process.wait())
            await asyncio.wait({connecting, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
                self._set_trouble(dying.result())
                return
            dying.cancel()
            self._link = connecting.result()
        except (GpuError, OSError) as error:
            self._set_trouble(str(error))
            return
        self.has_taken_over = self._link.welcome.has_taken_over
        self._heartbeat_mono_s = time.monotonic()
        self._set_trouble(None)
        log.info("GPU worker %d is ready", self._link.welcome.pid)
        early, self._early = self._early, None
        for event in (WorkerReady(self._link.welcome.identities), *early):
            self._on_event(event)

    async def _connect(self) -> WorkerLink:
        return await WorkerLink.connect(
            self._settings.worker_link_path,
            self._handle,
            rules=RestoreRules(self._settings.restore_policy, self._settings.baseline_sm_clock_mhz),
            timeout_s=_CONNECT_LIMIT_S,
            token=self._token,
            worker_pid=self._process.pid,
        )

    async def _end_process(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        await self._process.end(_HUNG_LIMIT_S if self._is_hung else _RESTORE_AND_EXIT_LIMIT_S)

    def _handle(self, event: LinkEvent) -> None:
        """Pass an event on: health and settings once the GPUs are known, the loss of the worker only once."""
        match event:
            case WorkerLost():
                if not (self._lost.is_set() or self._is_closing):
                    self._lost.set()
                    self._set_trouble(event.reason)
                    self._on_event(event)
            case GpuHealthChange() | GpuSettingsRead() if self._early is not None:
                self._early.append(event)
            case _:
                self._on_event(event)

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble not in {None, self.trouble}:
            log.warning("%s", trouble)
        self.trouble = trouble


_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 10.0
_RESET_AFTER_S = 30.0
_MAX_FAILED_STARTS = 3


@dataclass(slots=True)
class RestartBackoff:
    """Delays between restarts of one process; a process that lived for 30 s resets them."""

    _delay_s: float = 0.0
    _num_failed_starts: int = 0

    def next_delay_s(self, *, lifetime_s: float, was_ready: bool, is_urgent: bool) -> float:
        """Return the delay before the restart of a process that has just been lost.

        `was_ready`: the process had finished starting. `is_urgent`: GPUs stay changed until the next process restores
        them. An urgent restart is not delayed, unless several processes in a row were lost before they were ready.
        """
        if lifetime_s > _RESET_AFTER_S:
            self._delay_s = 0.0
        delay_s = self._delay_s
        self._delay_s = min(max(_FIRST_DELAY_S, 2 * delay_s), _MAX_DELAY_S)
        self._num_failed_starts = 0 if was_ready else self._num_failed_starts + 1
        return 0.0 if is_urgent and self._num_failed_starts < _MAX_FAILED_STARTS else delay_s
