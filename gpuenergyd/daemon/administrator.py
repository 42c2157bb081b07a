"""What an administrator sets by hand: clocks and power limits, leased, journalled and put back like a job's.

A GPU works for one job or is leased to the administrator, never both. A lease holds a clock lock, a power limit or
both; it ends when it is released, when its time is over, when its GPU is not fine, and when the daemon stops.
"""

import asyncio
import logging
import os
import secrets
import time
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from gpuenergyd.daemon.gpus import Claim, Gpu, Gpus, utc_at
from gpuenergyd.daemon.peers import Peer
from gpuenergyd.daemon.ports import HistoryPort, LimitingWorkerPort
from gpuenergyd.errors import GpuError, JobError, UsageError
from gpuenergyd.gpu.link import ClockSet, GpuHealth, GpuStateChange, LeaseOwner
from gpuenergyd.store.records import ControlEventRecord
from gpuenergyd.wire.messages import LeaseGranted, LeaseRelease, LeaseReleased, LeaseRequest

log = logging.getLogger(__name__)

_NS_PER_S = 1_000_000_000
_SET_LIMIT_S = 4.0
_LAST_RESTORES_LIMIT_S = 5.0
_MAX_LIFETIME_S = 30 * 86_400.0
_MAX_POWER_LIMIT_W = 10_000.0


@dataclass(slots=True)
class _Lease:
    """One GPU in the administrator's hands."""

    lease_id: str
    gpu: Gpu
    uid: int
    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def owner(self) -> LeaseOwner:
        """On whose behalf the journal says it was changed: the lease lives with the daemon, not with a command."""
        return LeaseOwner(self.lease_id, os.getpid(), self.uid)


@dataclass(slots=True)
class AdministratorLeases:
    """All leases of this daemon that no job holds, owned by the event loop."""

    worker: LimitingWorkerPort
    gpus: Gpus
    history: HistoryPort
    is_observing: bool = False
    _leases: dict[str, _Lease] = field(default_factory=dict)
    _turns: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    _awaited: dict[str, tuple[int, asyncio.Future[ClockSet]]] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def grant(self, request: LeaseRequest, peer: Peer) -> LeaseGranted:
        """Lock a clock, limit the power, or both; a lease the GPU is under already is extended.

        Raises:
            GpuNotFoundError: no such GPU.
            UsageError: a clock, a limit or a lifetime that cannot be.
            JobError: a job owns the GPU, or the daemon only observes.
            GpuError: the driver refuses; a lease that this request began has ended again.
        """
        gpu = self.gpus.find(request.gpu)
        sm_clock_mhz = _checked_clock_mhz(request, gpu)
        _check_amounts(request)
        if self.is_observing:
            raise JobError("mode = 'observe': this daemon changes no GPU; start it with mode = 'control'")
        gpu_uuid = gpu.identity.gpu_uuid
        if request.is_dry_run:
            known = self._leases.get(gpu_uuid)
            if known is None:
                self.gpus.require_free(gpu_uuid)
            return LeaseGranted(
                gpu_uuid=gpu_uuid,
                lease_id=known.lease_id if known is not None else None,
                sm_clock_mhz=sm_clock_mhz,
                power_limit_w=request.power_limit_w,
                remaining_s=request.lifetime_s,
                is_dry_run=True,
            )
        async with self._turns[gpu_uuid]:
            lease = self._leases.get(gpu_uuid)
            is_new = lease is None
            if lease is None:
                lease = self._open(gpu, peer)
            try:
                await self._apply(lease, sm_clock_mhz, request.power_limit_w)
            except GpuError as error:
                if is_new:
                    await self._end(lease, f"it could not be set: {error}")
                raise
            self._start_timer(lease, request.lifetime_s)
            return LeaseGranted(
                gpu_uuid=gpu_uuid,
                lease_id=lease.lease_id,
                sm_clock_mhz=lease.sm_clock_mhz,
                power_limit_w=lease.power_limit_w,
                remaining_s=request.lifetime_s,
                is_dry_run=False,
            )

    async def release(self, request: LeaseRelease, peer: Peer) -> LeaseReleased:
        """Put a GPU back and end its lease.

        Raises:
            GpuNotFoundError: no such GPU.
            JobError: it is under no lease of an administrator.
        """
        gpu_uuid = self.gpus.find(request.gpu).identity.gpu_uuid
        if gpu_uuid not in self._leases:
            self.gpus.require_free(gpu_uuid)
            raise JobError(f"GPU {gpu_uuid} is under no lease: no administrator has locked or limited it")
        if request.is_dry_run:
            return LeaseReleased(gpu_uuid, self._leases[gpu_uuid].lease_id, (), is_dry_run=True)
        async with self._turns[gpu_uuid]:
            lease = self._leases.get(gpu_uuid)
            if lease is None:
                raise JobError(f"GPU {gpu_uuid} is under no lease any more")
            told = await self._end(lease, f"released by {peer}")
        return LeaseReleased(gpu_uuid, lease.lease_id, told, is_dry_run=False)

    def take_clock_set(self, change: ClockSet) -> None:
        """Note a clock change that somebody waits for."""
        asked_mono_ns, heard = self._awaited.get(change.gpu_uuid, (0, None))
        if heard is not None and change.asked_mono_ns == asked_mono_ns and not heard.done():
            heard.set_result(change)

    def take_gpu_state(self, change: GpuStateChange) -> None:
        """End the lease of a GPU that is not fine: what it does no longer follows from what was asked."""
        lease = self._leases.get(change.gpu_uuid)
        if lease is not None and change.health is not GpuHealth.OK:
            self._spawn(self._end_in_turn(lease, f"the GPU is {change.health}: {change.detail}"))

    def worker_ready(self) -> None:
        """Set again what the worker that was lost has left to its successor to restore."""
        for lease in self._leases.values():
            self._spawn(self._set_again(lease))

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

    # --- inside ---

    def _open(self, gpu: Gpu, peer: Peer) -> _Lease:
        lease = _Lease(f"administrator-{secrets.token_hex(3)}", gpu, peer.uid)
        claim = Claim(lease.lease_id, "", peer.uid, time.monotonic_ns(), is_administrators=True)
        self.gpus.claim(gpu.identity.gpu_uuid, claim)
        self._leases[gpu.identity.gpu_uuid] = lease
        return lease

    async def _apply(self, lease: _Lease, sm_clock_mhz: int | None, power_limit_w: float | None) -> None:
        gpu_uuid = lease.gpu.identity.gpu_uuid
        await self.worker.lease(lease.lease_id, (gpu_uuid,), lease.owner)
        if sm_clock_mhz is not None and sm_clock_mhz != lease.sm_clock_mhz:
            await self._lock(lease, sm_clock_mhz)
            self._record("lock", lease, f"{lease.sm_clock_mhz or 'no'} MHz", f"{sm_clock_mhz} MHz")
            lease.sm_clock_mhz = sm_clock_mhz
        if power_limit_w is not None:
            limit_w = await self.worker.limit(lease.lease_id, gpu_uuid, power_limit_w, lease.owner)
            self._record("limit", lease, f"{lease.power_limit_w or 'no'} W", f"{limit_w:g} W")
            lease.power_limit_w = limit_w

    async def _lock(self, lease: _Lease, sm_clock_mhz: int) -> None:
        """Set a clock and wait until the worker says what became of it."""
        gpu_uuid, asked_mono_ns = lease.gpu.identity.gpu_uuid, time.monotonic_ns()
        heard: asyncio.Future[ClockSet] = asyncio.get_running_loop().create_future()
        self._awaited[gpu_uuid] = (asked_mono_ns, heard)
        lease.gpu.requested_sm_clock_mhz = sm_clock_mhz
        self.worker.want(gpu_uuid, sm_clock_mhz, asked_mono_ns=asked_mono_ns, reason=lease.lease_id)
        try:
            async with asyncio.timeout(_SET_LIMIT_S):
                change = await heard
        except TimeoutError:
            raise GpuError(f"GPU {gpu_uuid}: nothing was heard of {sm_clock_mhz} MHz for {_SET_LIMIT_S:g} s") from None
        finally:
            del self._awaited[gpu_uuid]
        if change.error is not None:
            raise GpuError(f"GPU {gpu_uuid}: {change.error}")

    def _start_timer(self, lease: _Lease, lifetime_s: float | None) -> None:
        """Let the newest request say how long the lease lives."""
        if lease.timer is not None:
            lease.timer.cancel()
            lease.timer = None
        if lifetime_s is not None:
            loop = asyncio.get_running_loop()
            lease.timer = loop.call_later(lifetime_s, self._time_is_over, lease, lifetime_s)

    def _time_is_over(self, lease: _Lease, lifetime_s: float) -> None:
        self._spawn(self._end_in_turn(lease, f"its {lifetime_s:g} s are over"))

    async def _set_again(self, lease: _Lease) -> None:
        async with self._turns[lease.gpu.identity.gpu_uuid]:
            if self._leases.get(lease.gpu.identity.gpu_uuid) is not lease:
                return
            sm_clock_mhz, lease.sm_clock_mhz = lease.sm_clock_mhz, None
            try:
                await self._apply(lease, sm_clock_mhz, lease.power_limit_w)
            except GpuError as error:
                await self._end(lease, f"a new worker could not set it again: {error}")

    async def _end_in_turn(self, lease: _Lease, reason: str) -> None:
        async with self._turns[lease.gpu.identity.gpu_uuid]:
            if self._leases.get(lease.gpu.identity.gpu_uuid) is lease:
                await self._end(lease, reason)

    async def _end(self, lease: _Lease, reason: str) -> tuple[str, ...]:
        """Restore first: the GPU is not free for a job before it is back."""
        gpu_uuid = lease.gpu.identity.gpu_uuid
        self._start_timer(lease, None)
        try:
            outcomes = await self.worker.restore((gpu_uuid,), f"lease {lease.lease_id} ends: {reason}")
        except GpuError as error:
            # A worker that died cut nothing loose: its successor restores what the journal holds.
            log.warning("lease %s: restore left to the next worker: %s", lease.lease_id, error)
            told: tuple[str, ...] = (f"left to the next worker: {error}",)
        else:
            told = tuple(f"{outcome.control}: {outcome.result}: {outcome.detail}" for outcome in outcomes)
        lease.gpu.note_restored(time.monotonic_ns())
        self.gpus.release(lease.lease_id)
        del self._leases[gpu_uuid]
        log.info("lease %s of GPU %s ended: %s", lease.lease_id, gpu_uuid, reason)
        self._record("restore", lease, "leased", reason)
        return told

    def _record(self, action: str, lease: _Lease, before: str, after: str) -> None:
        actor, gpu_uuid = f"administrator uid {lease.uid}", lease.gpu.identity.gpu_uuid
        self.history.write(
            ControlEventRecord(
                utc_at(time.monotonic_ns()), action, actor, None, gpu_uuid, f"lease {lease.lease_id}", before, after
            )
        )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _checked_clock_mhz(request: LeaseRequest, gpu: Gpu) -> int | None:
    """Return the slowest supported clock that is no slower than what is asked for."""
    if request.sm_clock_mhz is None:
        return None
    clocks_mhz = gpu.identity.supported_sm_clocks_mhz
    if not min(clocks_mhz) <= request.sm_clock_mhz <= max(clocks_mhz):
        raise UsageError(
            f"{request.sm_clock_mhz} MHz: GPU {gpu.identity.gpu_uuid} supports {min(clocks_mhz)} to {max(clocks_mhz)}"
        )
    return min(clock for clock in clocks_mhz if clock >= request.sm_clock_mhz)


def _check_amounts(request: LeaseRequest) -> None:
    if request.sm_clock_mhz is None and request.power_limit_w is None:
        raise UsageError("a lease is of a clock or of a power limit: name sm_clock_mhz or power_limit_w")
    if request.power_limit_w is not None and not 0 < request.power_limit_w <= _MAX_POWER_LIMIT_W:
        raise UsageError(f"{request.power_limit_w:g} W: a power limit is above 0 and at most {_MAX_POWER_LIMIT_W:g} W")
    if request.lifetime_s is not None and not 0 < request.lifetime_s <= _MAX_LIFETIME_S:
        raise UsageError(f"{request.lifetime_s:g} s: a lease lives above 0 and at most {_MAX_LIFETIME_S:g} s")
