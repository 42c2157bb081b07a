"""Supervision of the GPU worker process: start or connect, ping, restart, and forward requests to it."""

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
from gpuenergyd.gpu.link.client import GpuListener, WorkerLink
from gpuenergyd.gpu.link.messages import (
    ClockChangeReport,
    GpuHealthChange,
    GpuSample,
    GpuSettingsRead,
    GpuSnapshot,
    LeaseOwner,
)
from gpuenergyd.gpu.restore.executor import RestoreOutcome
from gpuenergyd.gpu.restore.policy import RestoreRules

log = logging.getLogger(__name__)

_CONNECT_LIMIT_S = 15.0
_PING_PERIOD_S = 1.0
_HUNG_LIMIT_S = 0.5
_RESTORE_AND_EXIT_LIMIT_S = 40.0
"""A worker that has lost the daemon restores every GPU before it exits; driver calls can be this slow."""


class WorkerListener(GpuListener, Protocol):
    """Receiver of the GPU worker's events."""

    def handle_worker_ready(self, identities: Sequence[GpuIdentity]) -> None:
        """Handle the start of a worker, which found these GPUs."""
        ...

    def handle_worker_lost(self, reason: str) -> None:
        """Handle the loss of the worker: no clock can be set until the next one is ready."""
        ...


class GpuWorker:
    """The daemon's GPU worker across restarts of the process.

    Implements the worker ports on the connected worker. Without one, requests raise GpuError and clock requests are
    dropped.
    """

    def __init__(self, settings: Settings, process: WorkerProcess, listener: Callable[[], WorkerListener]) -> None:
        self._settings = settings
        self._process = process
        self._listener = listener
        self._link: WorkerLink | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._is_closing = False
        self._is_shutting_down = False
        self._lost = asyncio.Event()
        self._is_hung = False
        self._pending_states: list[GpuHealthChange] | None = None
        self._pending_settings: dict[str, GpuSettingsRead] = {}
        self._heartbeat_mono_s: float | None = None
        self.trouble: str | None = "the GPU worker has not started yet"
        self.num_restarts = 0
        self.has_taken_over = False
        """Whether the worker held the leases of the previous daemon for this one."""
        self._token = ""

    @property
    def pid(self) -> int | None:
        """The worker's process id, None when there is none."""
        return self._link.welcome.pid if self._link is not None and self.is_alive else None

    @property
    def is_alive(self) -> bool:
        """Whether a worker runs and can be reached."""
        return self._process.is_running and self._link is not None and self._link.is_open

    @property
    def sentinel_pid(self) -> int | None:
        """Process id of the restore sentinel, which restores the GPUs if the worker is killed."""
        return self._link.welcome.sentinel_pid if self._link is not None and self.is_alive else None

    @property
    def heartbeat_age_s(self) -> float | None:
        """Time since the last sign of life of the worker, None before the first one."""
        return None if self._heartbeat_mono_s is None else time.monotonic() - self._heartbeat_mono_s

    async def start(self, token: str = "") -> None:
        """Start a worker and its supervision; returns when the first worker is ready or has failed to start.

        `token` is the hand-over token that the previous daemon left; with it the worker's held leases are taken over.
        """
        self._token = token
        await self._start_process()
        self._token = ""
        self._supervision = asyncio.create_task(self._supervise(), name="worker supervision")

    def announce_shutdown(self) -> None:
        """Mark later restores as part of the daemon's shutdown: `restore_policy = "keep"` exempts some GPUs then."""
        self._is_shutting_down = True

    async def close(self) -> None:
        """Close the link and wait until the worker has restored every GPU and exited."""
        self._is_closing = True
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
        await self._end_process()

    async def hand_over(self, token: str, keep_s: float) -> None:
        """Have the worker hold all leases for `keep_s` after `close`, for the daemon that presents the token."""
        await self._reachable().hand_over(token, keep_s)

    async def lease(
        self,
        lease_id: str,
        gpu_uuids: Sequence[str],
        owner: LeaseOwner,
        pidfds: Sequence[int] = (),
        *,
        sets_clocks: bool = True,
    ) -> None:
        """Lease GPUs."""
        await self._reachable().lease(lease_id, gpu_uuids, owner, pidfds, sets_clocks=sets_clocks)

    async def lower_power_limit(
        self, lease_id: str, gpu_uuid: str, power_limit_w: float | None, owner: LeaseOwner
    ) -> float:
        """Lower a power limit under a lease, or return to the one before it; return the limit read back."""
        return await self._reachable().lower_power_limit(lease_id, gpu_uuid, power_limit_w, owner)

    async def set_power_profile(
        self, lease_id: str, gpu_uuid: str, power_profile: int | None, owner: LeaseOwner
    ) -> tuple[int, ...]:
        """Add a workload power profile under a lease, or remove ours; return the requested ones read back."""
        return await self._reachable().set_power_profile(lease_id, gpu_uuid, power_profile, owner)

    async def set_power_limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        """Set a power limit under a lease; return the limit read back."""
        return await self._reachable().set_power_limit(lease_id, gpu_uuid, power_limit_w, owner)

    async def restore(self, gpu_uuids: Sequence[str], reason: str) -> tuple[RestoreOutcome, ...]:
        """Restore GPUs and end their leases; when it fails, the next worker restores."""
        return await self._reachable().restore(gpu_uuids, reason, is_daemon_ending=self._is_shutting_down)

    async def release_gpus(self, gpu_uuids: Sequence[str], reason: str) -> None:
        """Restore GPUs, end their leases and let go of their driver handles."""
        await self._reachable().release_gpus(gpu_uuids, reason)

    async def reopen_gpus(self, gpu_uuids: Sequence[str]) -> tuple[GpuIdentity, ...]:
        """Open released GPUs again; return their identities."""
        return await self._reachable().reopen_gpus(gpu_uuids)

    async def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of the processes that compute on a GPU."""
        return await self._reachable().process_ids(gpu_uuid)

    async def snapshot(self, gpu_uuid: str) -> GpuSnapshot:
        """Return the present settings and readings of a GPU."""
        return await self._reachable().snapshot(gpu_uuid)

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request a clock."""
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
                await self._reachable().ping()
                self._heartbeat_mono_s = time.monotonic()
            except GpuError as error:
                self._is_hung = not self._lost.is_set()
                self.handle_link_lost(f"the GPU worker does not answer: {error}")
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), _PING_PERIOD_S)

    async def _start_process(self) -> None:
        self._lost.clear()
        self._is_hung = False
        self._pending_states = []
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
        self._listener().handle_worker_ready(self._link.welcome.identities)
        for change in self._pending_states:
            self._listener().handle_gpu_health(change)
        self._pending_states = None
        for read in self._pending_settings.values():
            self._listener().handle_gpu_settings(read)
        self._pending_settings.clear()

    async def _connect(self) -> WorkerLink:
        return await WorkerLink.connect(
            self._settings.worker_link_path,
            self,
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

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Deliver samples to the listener."""
        self._listener().handle_samples(samples)

    def handle_clock_change(self, change: ClockChangeReport) -> None:
        """Deliver a clock change to the listener."""
        self._listener().handle_clock_change(change)

    def handle_gpu_health(self, change: GpuHealthChange) -> None:
        """Deliver a GPU's health to the listener, once the GPUs themselves are known."""
        if self._pending_states is None:
            self._listener().handle_gpu_health(change)
        else:
            self._pending_states.append(change)

    def handle_gpu_settings(self, read: GpuSettingsRead) -> None:
        """Deliver what is set on a GPU, once the GPUs themselves are known."""
        if self._pending_states is None:
            self._listener().handle_gpu_settings(read)
        else:
            self._pending_settings[read.gpu_uuid] = read

    def handle_link_lost(self, reason: str) -> None:
        """Report the loss of the worker, once."""
        if self._lost.is_set() or self._is_closing:
            return
        self._lost.set()
        self._set_trouble(reason)
        self._listener().handle_worker_lost(reason)

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            if trouble is None:
                log.info("GPU worker %s is ready", self.pid)
            else:
                log.warning("%s", trouble)
        self.trouble = trouble
