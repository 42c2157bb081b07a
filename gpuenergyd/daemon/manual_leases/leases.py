"""Leases of GPUs outside any job: clock locks and power limits, journaled and restored like those of a job.

A GPU is in use by one job or under one lease, never both. A lease holds a clock lock, a power limit or both. It ends
when it is released, when its lifetime is over, when its process ends, when its GPU is unhealthy, and when the daemon
stops.
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
from gpuenergyd.daemon.ports import HistoryPort, WorkerPort
from gpuenergyd.daemon.runtime.peer_credentials import is_dead
from gpuenergyd.errors import GpuError, UsageError
from gpuenergyd.gpu.link.messages import (
    USABLE_HEALTH,
    AcquireLease,
    ClockChangeReport,
    GpuHealthChange,
    LeaseOwner,
    Restore,
    SetPowerLimit,
    TakeSnapshot,
)
from gpuenergyd.store.records import ControlEventRecord

log = logging.getLogger(__name__)

_SET_LIMIT_S = 4.0
_LAST_RESTORES_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class LeaseHolder:
    """The holder of a lease: an administrator, or a process (`pid`) whose end also ends the lease."""

    kind: ClaimKind
    uid: int
    pid: int | None = None

    def __str__(self) -> str:
        if self.kind is ClaimKind.ADMINISTRATOR:
            return f"administrator uid {self.uid}"
        return f"{self.kind} uid {self.uid} pid {self.pid}"


@dataclass(slots=True)
class ManualLease:
    """The lease of one GPU."""

    lease_id: str
    gpu: Gpu
    holder: LeaseHolder
    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    timer: asyncio.TimerHandle | None = None
    pidfd: int | None = None

    @property
    def gpu_uuid(self) -> str:
        return self.gpu.identity.gpu_uuid

    @property
    def remaining_s(self) -> float | None:
        """Time until its lifetime is over; None if it lasts until it is released."""
        if self.timer is None:
            return None
        return max(0.0, self.timer.when() - asyncio.get_running_loop().time())

    @property
    def owner(self) -> LeaseOwner:
        """The owner that the restore journal records for the change."""
        return LeaseOwner(self.lease_id, self.holder.pid or os.getpid(), self.holder.uid)


@dataclass(slots=True)
class ManualLeases:
    """All leases outside jobs; owned by the event loop."""

    worker: WorkerPort
    gpus: Gpus
    history: HistoryPort
    _leases: dict[str, ManualLease] = field(default_factory=dict)
    _locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _pending_clocks: dict[str, tuple[int, asyncio.Future[ClockChangeReport]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def get(self, gpu_uuid: str) -> ManualLease | None:
        return self._leases.get(gpu_uuid)

    @asynccontextmanager
    async def lock_gpu(self, gpu_uuid: str) -> AsyncIterator[None]:
        """Prevent other changes to the lease of a GPU inside the context."""
        async with self._locks[gpu_uuid]:
            yield

    def require_free_for(self, gpu_uuid: str, holder: LeaseHolder) -> None:
        """Check that a holder may lease a GPU; raise JobError if a job uses it or another holder has leased it.

        Administrators share their leases; a zeusd client has its own, identified by its pid while it runs.
        """
        lease, administrators = self._leases.get(gpu_uuid), {ClaimKind.ADMINISTRATOR}
        if lease is None or not (lease.holder == holder or {lease.holder.kind, holder.kind} == administrators):
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
        """Lock a clock, limit the power, or both, under this holder's lease. The caller holds `lock_gpu`.

        Raises:
            JobError: the GPU is in use by a job or leased to another holder.
            GpuError: the driver refused; a lease created by this call has been ended.
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
                await self.end(lease, f"setting it failed: {error}")
            raise
        return lease

    async def change_clock(self, lease: ManualLease, sm_clock_mhz: int) -> ClockChangeReport:
        """Set a clock under a lease and wait for its effect; not recorded in the history. The caller holds `lock_gpu`.

        Raises:
            GpuError: the driver refused, or the worker did not answer.
        """
        change = await self._lock(lease, sm_clock_mhz)
        lease.sm_clock_mhz = sm_clock_mhz
        return change

    async def end_if_orphaned(self, gpu_uuid: str) -> None:
        """End the lease of a process that has ended, in case that was not handled yet."""
        lease = self._leases.get(gpu_uuid)
        if lease is not None and lease.holder.pid is not None and (lease.pidfd is None or is_dead(lease.pidfd)):
            await self._end_locked(lease, f"process {lease.holder.pid} ended")

    def limit_lifetime(self, lease: ManualLease, lifetime_s: float | None) -> None:
        """Set or replace the remaining lifetime of a lease; None means until it is released."""
        if lease.timer is not None:
            lease.timer.cancel()
            lease.timer = None
        if lifetime_s is not None:
            loop = asyncio.get_running_loop()
            lease.timer = loop.call_later(
                lifetime_s, self._end_soon, lease, f"its lifetime of {lifetime_s:g} s is over"
            )

    async def end(self, lease: ManualLease, reason: str) -> tuple[str, ...]:
        """Restore a GPU and end its lease; return the outcome for each control. The caller holds `lock_gpu`.

        The GPU becomes free for a job only after it is restored.
        """
        self.limit_lifetime(lease, None)
        self._close_pidfd(lease)
        try:
            restored = await self.worker.do(Restore((lease.gpu_uuid,), f"lease {lease.lease_id} ends: {reason}"))
        except GpuError as error:
            # The journal still lists the change, so the next worker restores it.
            log.warning("lease %s: the next GPU worker will restore the GPU: %s", lease.lease_id, error)
            texts: tuple[str, ...] = (f"the next GPU worker will restore the GPU: {error}",)
        else:
            texts = tuple(f"{outcome.control}: {outcome.result}: {outcome.detail}" for outcome in restored.outcomes)
        lease.gpu.record_restored(time.monotonic_ns())
        self.gpus.release(lease.lease_id)
        del self._leases[lease.gpu_uuid]
        log.info("lease %s of GPU %s ended: %s", lease.lease_id, lease.gpu_uuid, reason)
        self.record("restore", lease.gpu_uuid, lease.holder, f"lease {lease.lease_id}", "leased", reason)
        return texts

    def handle_clock_change(self, change: ClockChangeReport) -> None:
        """Complete the request that waits for this clock change."""
        asked_mono_ns, result = self._pending_clocks.get(change.gpu_uuid, (0, None))
        if result is not None and change.due_mono_ns == asked_mono_ns and not result.done():
            result.set_result(change)

    def handle_gpu_health(self, change: GpuHealthChange) -> None:
        """End the lease of an unhealthy GPU, which may no longer apply its clock lock or power limit."""
        lease = self._leases.get(change.gpu_uuid)
        if lease is not None and change.health not in USABLE_HEALTH:
            self._end_soon(lease, f"the GPU is {change.health}: {change.detail}")

    def handle_worker_ready(self) -> None:
        """Apply every lease again, since the new worker has restored the GPUs of the lost one."""
        for lease in self._leases.values():
            self.spawn(self._reapply(lease))

    async def close(self, reason: str) -> None:
        """End every lease within a time limit; the worker restores the rest when its link is closed."""
        leases = list(self._leases.values())
        ends = [asyncio.create_task(self._end_locked(lease, reason)) for lease in leases]
        if ends:
            await asyncio.wait(ends, timeout=_LAST_RESTORES_LIMIT_S)
        unfinished = [*ends, *self._tasks]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        for lease in self._leases.values():
            self._close_pidfd(lease)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task until `close`."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def record(self, action: str, gpu_uuid: str, holder: LeaseHolder, reason: str, before: str, after: str) -> None:
        """Write a control event to the database."""
        self.history.write(
            ControlEventRecord(utc_at(time.monotonic_ns()), action, str(holder), None, gpu_uuid, reason, before, after)
        )

    # --- internals ---

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
        await self.worker.do(AcquireLease(lease.lease_id, (lease.gpu_uuid,), lease.owner))
        if sm_clock_mhz is not None and sm_clock_mhz != lease.sm_clock_mhz:
            await self._lock(lease, sm_clock_mhz)
            self._record_change(lease, "lock", f"{lease.sm_clock_mhz or 'no'} MHz", f"{sm_clock_mhz} MHz")
            lease.sm_clock_mhz = sm_clock_mhz
        if power_limit_w is not None:
            command = SetPowerLimit(lease.lease_id, lease.gpu_uuid, power_limit_w, lease.owner)
            limit_w = (await self.worker.do(command)).power_limit_w
            self._record_change(lease, "limit", f"{lease.power_limit_w or 'no'} W", f"{limit_w:g} W")
            lease.power_limit_w = limit_w

    async def _lock(self, lease: ManualLease, sm_clock_mhz: int) -> ClockChangeReport:
        """Request a clock and wait for the worker's result."""
        gpu_uuid, asked_mono_ns = lease.gpu_uuid, time.monotonic_ns()
        result: asyncio.Future[ClockChangeReport] = asyncio.get_running_loop().create_future()
        self._pending_clocks[gpu_uuid] = (asked_mono_ns, result)
        lease.gpu.requested_sm_clock_mhz = sm_clock_mhz
        self.worker.request_clock(gpu_uuid, ClockRequest(sm_clock_mhz, asked_mono_ns))
        try:
            async with asyncio.timeout(_SET_LIMIT_S):
                change = await result
        except TimeoutError:
            raise GpuError(
                f"GPU {gpu_uuid}: the GPU worker did not confirm {sm_clock_mhz} MHz within {_SET_LIMIT_S:g} s"
            ) from None
        finally:
            del self._pending_clocks[gpu_uuid]
        if change.error is not None:
            raise GpuError(f"GPU {gpu_uuid}: {change.error}")
        return change

    async def _reapply(self, lease: ManualLease) -> None:
        async with self._locks[lease.gpu_uuid]:
            if self._leases.get(lease.gpu_uuid) is not lease:
                return
            sm_clock_mhz, lease.sm_clock_mhz = lease.sm_clock_mhz, None
            try:
                await self._apply(lease, sm_clock_mhz, lease.power_limit_w)
            except GpuError as error:
                await self.end(lease, f"the new GPU worker could not apply it: {error}")

    def _process_died(self, lease: ManualLease) -> None:
        self._close_pidfd(lease)
        self._end_soon(lease, f"process {lease.holder.pid} ended")

    def _close_pidfd(self, lease: ManualLease) -> None:
        if lease.pidfd is not None:
            asyncio.get_running_loop().remove_reader(lease.pidfd)
            os.close(lease.pidfd)
            lease.pidfd = None

    def _end_soon(self, lease: ManualLease, reason: str) -> None:
        self.spawn(self._end_locked(lease, reason))

    async def _end_locked(self, lease: ManualLease, reason: str) -> None:
        async with self._locks[lease.gpu_uuid]:
            if self._leases.get(lease.gpu_uuid) is lease:
                await self.end(lease, reason)

    def _record_change(self, lease: ManualLease, action: str, before: str, after: str) -> None:
        self.record(action, lease.gpu_uuid, lease.holder, f"lease {lease.lease_id}", before, after)


def supported_no_slower_than(gpu: Gpu, sm_clock_mhz: int) -> int:
    """Return the slowest supported clock that is at least the requested one.

    Raises:
        UsageError: the clock is out of the GPU's range.
    """
    clocks_mhz = gpu.identity.supported_sm_clocks_mhz
    if not clocks_mhz or not min(clocks_mhz) <= sm_clock_mhz <= max(clocks_mhz):
        supported = f"{min(clocks_mhz)} to {max(clocks_mhz)}" if clocks_mhz else "no known clocks"
        raise UsageError(f"{sm_clock_mhz} MHz is out of range; GPU {gpu.identity.gpu_uuid} supports {supported}")
    return min(clock for clock in clocks_mhz if clock >= sm_clock_mhz)


async def require_power_limit_in_range(worker: WorkerPort, gpu: Gpu, power_limit_w: float) -> None:
    """Check that a power limit is in the GPU's range, if the driver reports one.

    Raises:
        UsageError: it is out of range.
        GpuError: the driver does not answer, or there is no worker.
    """
    details = (await worker.do(TakeSnapshot(gpu.identity.gpu_uuid))).details
    low_w, high_w = details.min_power_limit_w, details.max_power_limit_w
    if low_w is not None and high_w is not None and not low_w <= power_limit_w <= high_w:
        raise UsageError(
            f"{power_limit_w:g} W is out of range; GPU {gpu.identity.gpu_uuid} supports {low_w:g} to {high_w:g} W"
        )
