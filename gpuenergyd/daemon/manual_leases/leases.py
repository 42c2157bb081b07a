"""GPUs that somebody holds outside any job: clocks and power limits, leased, journalled and put back like a job's.

A GPU works for one job or is under one lease, never both. A lease holds a clock lock, a power limit or both; it ends
when it is given up, when its time is over, when the process it belongs to dies, when its GPU is not fine, and when the
daemon stops.
"""

import asyncio
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.daemon.gpus.inventory import ClaimKind, Gpu, GpuClaim, Gpus, utc_at
from gpuenergyd.daemon.ports import HistoryPort, LimitingWorkerPort
from gpuenergyd.daemon.runtime.peer_credentials import is_dead
from gpuenergyd.errors import GpuError, UsageError
from gpuenergyd.gpu.link.messages import ClockChange, GpuHealth, GpuHealthChange, LeaseOwner
from gpuenergyd.store.records import ControlEventRecord

log = logging.getLogger(__name__)

_SET_LIMIT_S = 4.0
_LAST_RESTORES_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """On whose behalf a lease is held; with a pid it ends with that process, without it lives with the daemon."""

    kind: ClaimKind
    uid: int
    pid: int | None = None

    def __str__(self) -> str:
        if self.kind is ClaimKind.ADMINISTRATOR:
            return f"administrator uid {self.uid}"
        return f"{self.kind} uid {self.uid} pid {self.pid}"


@dataclass(slots=True)
class ManualLease:
    """One GPU in somebody's hands."""

    lease_id: str
    gpu: Gpu
    holder: LeaseHolder
    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    timer: asyncio.TimerHandle | None = None
    pidfd: int | None = None

    @property
    def gpu_uuid(self) -> str:
        """The GPU."""
        return self.gpu.identity.gpu_uuid

    @property
    def owner(self) -> LeaseOwner:
        """On whose behalf the journal says it was changed."""
        return LeaseOwner(self.lease_id, self.holder.pid or os.getpid(), self.holder.uid)


@dataclass(slots=True)
class ManualLeases:
    """All leases of this daemon that no job holds, owned by the event loop."""

    worker: LimitingWorkerPort
    gpus: Gpus
    history: HistoryPort
    _leases: dict[str, ManualLease] = field(default_factory=dict)
    _turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _awaited: dict[str, tuple[int, asyncio.Future[ClockChange]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def get(self, gpu_uuid: str) -> ManualLease | None:
        """Return the lease a GPU is under, None when nobody holds it outside a job."""
        return self._leases.get(gpu_uuid)

    @asynccontextmanager
    async def turn(self, gpu_uuid: str) -> AsyncIterator[None]:
        """Let nobody else change what is leased of this GPU meanwhile."""
        async with self._turns[gpu_uuid]:
            yield

    def require_free_for(self, gpu_uuid: str, holder: LeaseHolder) -> None:
        """Check that a holder could have a GPU.

        Raises:
            JobError: it works for a job, or somebody else holds it.
        """
        lease = self._leases.get(gpu_uuid)
        if lease is None or not _is_same_holder(lease.holder, holder):
            self.gpus.require_free(gpu_uuid)

    async def set(
        self,
        gpu: Gpu,
        holder: LeaseHolder,
        *,
        sm_clock_mhz: int | None = None,
        power_limit_w: float | None = None,
        pidfd: int | None = None,
    ) -> ManualLease:
        """Lock a clock, limit the power, or both, under this holder's lease; take the GPU's turn first.

        Raises:
            JobError: the GPU works for a job, or somebody else holds it.
            GpuError: the driver refuses; a lease that this began has ended again.
        """
        self.require_free_for(gpu.identity.gpu_uuid, holder)
        lease = self._leases.get(gpu.identity.gpu_uuid)
        is_new = lease is None
        if lease is None:
            lease = self._open(gpu, holder, pidfd)
        try:
            await self._apply(lease, sm_clock_mhz, power_limit_w)
        except GpuError as error:
            if is_new:
                await self.end(lease, f"it could not be set: {error}")
            raise
        return lease

    async def end_if_orphaned(self, gpu_uuid: str) -> None:
        """End the lease of a process that is dead already, before its death has been heard of."""
        lease = self._leases.get(gpu_uuid)
        if lease is not None and lease.holder.pid is not None and (lease.pidfd is None or is_dead(lease.pidfd)):
            await self._end_in_turn(lease, f"process {lease.holder.pid} ended")

    def limit_lifetime(self, lease: ManualLease, lifetime_s: float | None) -> None:
        """Let the newest request say how long the lease lives; None is until it is given up."""
        if lease.timer is not None:
            lease.timer.cancel()
            lease.timer = None
        if lifetime_s is not None:
            loop = asyncio.get_running_loop()
            lease.timer = loop.call_later(lifetime_s, self._end_soon, lease, f"its {lifetime_s:g} s are over")

    async def end(self, lease: ManualLease, reason: str) -> tuple[str, ...]:
        """Put a GPU back and end its lease; take the GPU's turn first. Return what became of each control.

        It is restored first: the GPU is not free for a job before it is back.
        """
        self.limit_lifetime(lease, None)
        self._forget_process(lease)
        try:
            outcomes = await self.worker.restore((lease.gpu_uuid,), f"lease {lease.lease_id} ends: {reason}")
        except GpuError as error:
            # A worker that died cut nothing loose: its successor restores what the journal holds.
            log.warning("lease %s: restore left to the next worker: %s", lease.lease_id, error)
            told: tuple[str, ...] = (f"left to the next worker: {error}",)
        else:
            told = tuple(f"{outcome.control}: {outcome.result}: {outcome.detail}" for outcome in outcomes)
        lease.gpu.record_restored(time.monotonic_ns())
        self.gpus.release(lease.lease_id)
        del self._leases[lease.gpu_uuid]
        log.info("lease %s of GPU %s ended: %s", lease.lease_id, lease.gpu_uuid, reason)
        self.record("restore", lease.gpu_uuid, lease.holder, f"lease {lease.lease_id}", "leased", reason)
        return told

    def handle_clock_change(self, change: ClockChange) -> None:
        """Note a clock change that somebody waits for."""
        asked_mono_ns, heard = self._awaited.get(change.gpu_uuid, (0, None))
        if heard is not None and change.due_mono_ns == asked_mono_ns and not heard.done():
            heard.set_result(change)

    def handle_gpu_health(self, change: GpuHealthChange) -> None:
        """End the lease of a GPU that is not fine: what it does no longer follows from what was asked."""
        lease = self._leases.get(change.gpu_uuid)
        if lease is not None and change.health is not GpuHealth.OK:
            self._end_soon(lease, f"the GPU is {change.health}: {change.detail}")

    def handle_worker_ready(self) -> None:
        """Set again what the worker that was lost has left to its successor to restore."""
        for lease in self._leases.values():
            self.spawn(self._set_again(lease))

    async def close(self, reason: str) -> None:
        """End every lease, within a limit; cutting the worker's link restores what is left."""
        leases = list(self._leases.values())
        ends = [asyncio.create_task(self._end_in_turn(lease, reason)) for lease in leases]
        if ends:
            await asyncio.wait(ends, timeout=_LAST_RESTORES_LIMIT_S)
        left = [*ends, *self._tasks]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        for lease in self._leases.values():
            self._forget_process(lease)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside, until it is done or the leases are closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def record(self, action: str, gpu_uuid: str, holder: LeaseHolder, reason: str, before: str, after: str) -> None:
        """Write down who changed what."""
        self.history.write(
            ControlEventRecord(utc_at(time.monotonic_ns()), action, str(holder), None, gpu_uuid, reason, before, after)
        )

    # --- inside ---

    def _open(self, gpu: Gpu, holder: LeaseHolder, pidfd: int | None) -> ManualLease:
        lease = ManualLease(f"{holder.kind}-{secrets.token_hex(3)}", gpu, holder)
        claim = GpuClaim(lease.lease_id, "", holder.uid, time.monotonic_ns(), kind=holder.kind, pid=holder.pid)
        self.gpus.claim(lease.gpu_uuid, claim)
        self._leases[lease.gpu_uuid] = lease
        if pidfd is not None:
            lease.pidfd = os.dup(pidfd)
            loop = asyncio.get_running_loop()
            loop.add_reader(lease.pidfd, self._process_died, lease)
        return lease

    async def _apply(self, lease: ManualLease, sm_clock_mhz: int | None, power_limit_w: float | None) -> None:
        await self.worker.lease(lease.lease_id, (lease.gpu_uuid,), lease.owner)
        if sm_clock_mhz is not None and sm_clock_mhz != lease.sm_clock_mhz:
            await self._lock(lease, sm_clock_mhz)
            self._record_change(lease, "lock", f"{lease.sm_clock_mhz or 'no'} MHz", f"{sm_clock_mhz} MHz")
            lease.sm_clock_mhz = sm_clock_mhz
        if power_limit_w is not None:
            limit_w = await self.worker.set_power_limit(lease.lease_id, lease.gpu_uuid, power_limit_w, lease.owner)
            self._record_change(lease, "limit", f"{lease.power_limit_w or 'no'} W", f"{limit_w:g} W")
            lease.power_limit_w = limit_w

    async def _lock(self, lease: ManualLease, sm_clock_mhz: int) -> None:
        """Set a clock and wait until the worker says what became of it."""
        gpu_uuid, asked_mono_ns = lease.gpu_uuid, time.monotonic_ns()
        heard: asyncio.Future[ClockChange] = asyncio.get_running_loop().create_future()
        self._awaited[gpu_uuid] = (asked_mono_ns, heard)
        lease.gpu.requested_sm_clock_mhz = sm_clock_mhz
        self.worker.request_clock(gpu_uuid, ClockRequest(sm_clock_mhz, asked_mono_ns))
        try:
            async with asyncio.timeout(_SET_LIMIT_S):
                change = await heard
        except TimeoutError:
            raise GpuError(f"GPU {gpu_uuid}: nothing was heard of {sm_clock_mhz} MHz for {_SET_LIMIT_S:g} s") from None
        finally:
            del self._awaited[gpu_uuid]
        if change.error is not None:
            raise GpuError(f"GPU {gpu_uuid}: {change.error}")

    async def _set_again(self, lease: ManualLease) -> None:
        async with self._turns[lease.gpu_uuid]:
            if self._leases.get(lease.gpu_uuid) is not lease:
                return
            sm_clock_mhz, lease.sm_clock_mhz = lease.sm_clock_mhz, None
            try:
                await self._apply(lease, sm_clock_mhz, lease.power_limit_w)
            except GpuError as error:
                await self.end(lease, f"a new worker could not set it again: {error}")

    def _process_died(self, lease: ManualLease) -> None:
        self._forget_process(lease)
        self._end_soon(lease, f"process {lease.holder.pid} ended")

    def _forget_process(self, lease: ManualLease) -> None:
        if lease.pidfd is not None:
            asyncio.get_running_loop().remove_reader(lease.pidfd)
            os.close(lease.pidfd)
            lease.pidfd = None

    def _end_soon(self, lease: ManualLease, reason: str) -> None:
        self.spawn(self._end_in_turn(lease, reason))

    async def _end_in_turn(self, lease: ManualLease, reason: str) -> None:
        async with self._turns[lease.gpu_uuid]:
            if self._leases.get(lease.gpu_uuid) is lease:
                await self.end(lease, reason)

    def _record_change(self, lease: ManualLease, action: str, before: str, after: str) -> None:
        self.record(action, lease.gpu_uuid, lease.holder, f"lease {lease.lease_id}", before, after)


def supported_no_slower_than(gpu: Gpu, sm_clock_mhz: int) -> int:
    """Return the slowest supported clock that is no slower than what is asked for.

    Raises:
        UsageError: it is none that the GPU could run at.
    """
    clocks_mhz = gpu.identity.supported_sm_clocks_mhz
    if not clocks_mhz or not min(clocks_mhz) <= sm_clock_mhz <= max(clocks_mhz):
        supported = f"{min(clocks_mhz)} to {max(clocks_mhz)}" if clocks_mhz else "none that is known"
        raise UsageError(f"{sm_clock_mhz} MHz: GPU {gpu.identity.gpu_uuid} supports {supported}")
    return min(clock for clock in clocks_mhz if clock >= sm_clock_mhz)


def _is_same_holder(one: LeaseHolder, other: LeaseHolder) -> bool:
    """Administrators share their leases; a process has its own, and its pid is no other's while its lease lives."""
    return one.kind is other.kind and (one.kind is ClaimKind.ADMINISTRATOR or one == other)
