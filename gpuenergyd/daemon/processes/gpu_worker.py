"""The one GPU worker of this daemon: started or reached, watched, replaced when it dies; the next restores."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.daemon.processes.launch import WorkerProcess
from gpuenergyd.daemon.processes.restart_backoff import RestartBackoff
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.client import (
    ClockSet,
    GpuLook,
    GpuSample,
    GpuStateChange,
    LeaseOwner,
    RestoreOutcome,
    WorkerLink,
)
from gpuenergyd.gpu.restore.policy import RestoreRules

log = logging.getLogger(__name__)

_CONNECT_LIMIT_S = 15.0
_PING_PERIOD_S = 1.0
_HUNG_LIMIT_S = 0.5
_RESTORE_AND_EXIT_LIMIT_S = 40.0
"""A worker whose core has gone restores first; a driver call may take this long."""


class WorkerListener(Protocol):
    """Who hears what the worker says."""

    def handle_worker_ready(self, identities: Sequence[GpuIdentity]) -> None:
        """Take the GPUs that a new worker found."""
        ...

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Take readings."""
        ...

    def handle_clock_set(self, change: ClockSet) -> None:
        """Take a clock change."""
        ...

    def handle_gpu_state(self, change: GpuStateChange) -> None:
        """Take how a GPU is."""
        ...

    def handle_worker_lost(self, reason: str) -> None:
        """Know that nobody can set clocks now."""
        ...


class GpuWorker:
    """The one worker of this daemon, whichever process that is now."""

    def __init__(self, settings: Settings, process: WorkerProcess, listener: Callable[[], WorkerListener]) -> None:
        self._settings = settings
        self._process = process
        self._listener = listener
        self._link: WorkerLink | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_leaving = False
        self._lost = asyncio.Event()
        self._is_hung = False
        self._early_states: list[GpuStateChange] | None = None
        self._heard_mono_s: float | None = None
        self.trouble: str | None = "the GPU worker has not started yet"
        self.num_restarts = 0
        self.has_taken_over = False
        """Whether the worker kept the leases of an earlier core for this one."""
        self._token = ""

    @property
    def pid(self) -> int | None:
        """The worker's process id, None when there is none."""
        return self._link.worker_pid if self._link is not None and self.is_alive else None

    @property
    def is_alive(self) -> bool:
        """Whether a worker runs and can be reached."""
        return self._process.is_running and self._link is not None and self._link.is_open

    @property
    def keeper_pid(self) -> int | None:
        """The process that restores when the worker is killed."""
        return self._link.keeper_pid if self._link is not None and self.is_alive else None

    @property
    def heartbeat_age_s(self) -> float | None:
        """How long ago the worker was last heard of."""
        return None if self._heard_mono_s is None else time.monotonic() - self._heard_mono_s

    async def start(self, token: str = "") -> None:
        """Start a worker, then keep one running; returns when the first one is ready or has failed.

        With the token that an earlier core left, leases that the worker kept are taken over.
        """
        self._token = token
        await self._bring_up()
        self._token = ""
        self._supervision = asyncio.create_task(self._supervise(), name="worker supervision")

    def leave(self) -> None:
        """Know that from now on GPUs are restored because the daemon ends: some may be kept for the next one."""
        self._is_leaving = True

    async def close(self) -> None:
        """Cut the link, and wait until the worker has restored every GPU and ended."""
        self._is_closing = True
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        await self._bring_down()

    async def hand_over(self, token: str, keep_s: float) -> None:
        """Have the worker keep all leases for so long after `close`, for the core that shows the token.

        Raises:
            GpuError: refused, or no worker.
        """
        await self._reachable().hand_over(token, keep_s)

    async def lease(self, lease_id: str, gpu_uuids: Sequence[str], owner: LeaseOwner) -> None:
        """Get the right to change GPUs.

        Raises:
            GpuError: refused, or no worker.
        """
        await self._reachable().lease(lease_id, gpu_uuids, owner)

    async def limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        """Set a power limit under a lease, and return the limit that was read back.

        Raises:
            GpuError: refused, or no worker.
        """
        return await self._reachable().limit(lease_id, gpu_uuid, power_limit_w, owner)

    async def restore(self, gpu_uuids: Sequence[str], reason: str) -> tuple[RestoreOutcome, ...]:
        """Put GPUs back and end their leases.

        Raises:
            GpuError: no worker; its successor restores.
        """
        return await self._reachable().restore(gpu_uuids, reason, is_leaving=self._is_leaving)

    async def users(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of the processes that compute on a GPU.

        Raises:
            GpuError: the driver does not tell, or no worker.
        """
        return await self._reachable().users(gpu_uuid)

    async def look(self, gpu_uuid: str) -> GpuLook:
        """Return how a GPU is set and what it reads right now.

        Raises:
            GpuError: the driver does not tell, or no worker.
        """
        return await self._reachable().look(gpu_uuid)

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request a clock; dropped while no worker is connected."""
        if self._link is not None:
            self._link.request_clock(gpu_uuid, request)

    def _reachable(self) -> WorkerLink:
        if self._link is None or not self._link.is_open:
            raise GpuError("no GPU worker runs at the moment")
        return self._link

    async def _supervise(self) -> None:
        backoff = RestartBackoff()
        while True:
            up_since_s = time.monotonic()
            came_up = self.is_alive
            if came_up:
                await self._watch()
            lived_s = time.monotonic() - up_since_s
            await self._bring_down()
            is_awaited = self._process.has_left_gpus()
            await asyncio.sleep(backoff.next_delay_s(lived_s=lived_s, came_up=came_up, is_awaited=is_awaited))
            self.num_restarts += 1
            await self._bring_up()

    async def _watch(self) -> None:
        """Return when the worker is lost: its link cut, or its main thread no longer answering."""
        while not self._lost.is_set():
            try:
                await self._reachable().ping()
                self._heard_mono_s = time.monotonic()
            except GpuError as error:
                self._is_hung = not self._lost.is_set()
                self._on_lost(f"the GPU worker hangs: {error}")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), _PING_PERIOD_S)

    async def _bring_up(self) -> None:
        self._lost.clear()
        self._is_hung = False
        self._early_states = []
        try:
            await self._process.start()
            connecting = asyncio.create_task(self._connect())
            dying = asyncio.create_task(self._process.wait())
            await asyncio.wait({connecting, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                connecting.cancel()
                await asyncio.gather(connecting, return_exceptions=True)
                self._say(dying.result())
                return
            dying.cancel()
            self._link = connecting.result()
        except (GpuError, OSError) as error:
            self._say(str(error))
            return
        self.has_taken_over = self._link.has_taken_over
        self._heard_mono_s = time.monotonic()
        self._say(None)
        self._listener().handle_worker_ready(self._link.identities)
        for change in self._early_states:
            self._listener().handle_gpu_state(change)
        self._early_states = None

    async def _connect(self) -> WorkerLink:
        return await WorkerLink.connect(
            self._settings.worker_link_path,
            on_samples=lambda samples: self._listener().handle_samples(samples),
            on_clock_set=lambda change: self._listener().handle_clock_set(change),
            on_gpu_state=self._on_gpu_state,
            on_lost=self._on_lost,
            rules=RestoreRules(self._settings.restore_policy, self._settings.baseline_sm_clock_mhz),
            timeout_s=_CONNECT_LIMIT_S,
            token=self._token,
        )

    async def _bring_down(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            await link.close()
        await self._process.end(_HUNG_LIMIT_S if self._is_hung else _RESTORE_AND_EXIT_LIMIT_S)

    def _on_gpu_state(self, change: GpuStateChange) -> None:
        if self._early_states is None:
            self._listener().handle_gpu_state(change)
        else:
            # The first ones come before the GPUs themselves are known.
            self._early_states.append(change)

    def _on_lost(self, reason: str) -> None:
        if self._lost.is_set() or self._is_closing:
            return
        self._lost.set()
        self._say(reason)
        self._listener().handle_worker_lost(reason)

    def _say(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            if trouble is None:
                log.info("GPU worker %s is ready", self.pid)
            else:
                log.warning("%s", trouble)
        self.trouble = trouble
