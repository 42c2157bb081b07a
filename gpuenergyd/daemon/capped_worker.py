"""The GPU worker behind ceilings: no job, administrator or Zeus client sets a clock or limit above a GPU's ceiling.

A changed ceiling takes effect at once, under the existing lease of the GPU. A GPU without a lease is leased under a
separate id, which gives way to any other lease. The worker therefore journals every change, and restores it when a
process dies.
"""

import asyncio
import logging
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from gpuenergyd.core.clock_request import Ceiling, ClockRequest
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.ports import WorkerPort
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import (
    CEILING_LEASE,
    AcquireLease,
    Command,
    LeaseOwner,
    LowerPowerLimit,
    ReplyT,
    Restore,
    SetPowerLimit,
)
from gpuenergyd.gpu.restore.executor import RestoreResult

log = logging.getLogger(__name__)

_NO_CEILING = Ceiling()


@dataclass(slots=True)
class _Lease:
    """Who has leased a GPU, and what the holder wants: the newest clocks, and the newest power limit."""

    lease_id: str
    owner: LeaseOwner
    sets_clocks: bool
    clocks: ClockRequest | None = None
    limit_w: float | None = None

    @property
    def is_ours(self) -> bool:
        return self.lease_id == CEILING_LEASE


@dataclass(slots=True)
class CappedWorker:
    """Implements the worker port on another worker, within ceilings; owned by the event loop."""

    worker: WorkerPort
    gpus: Gpus
    may_set_clocks: bool = True
    """Whether the settings permit changing clocks; if not, only power limits are lowered."""
    _ceilings: dict[str, Ceiling] = field(default_factory=dict)
    _idle_clocks: dict[str, int] = field(default_factory=dict)
    """Lower clocks in MHz of GPUs that nobody has leased."""
    _lowered_clocks: set[str] = field(default_factory=set)
    """GPUs whose clock a ceiling may have lowered: added before the call, removed once the ceiling is lifted."""
    _lowered_limits: set[str] = field(default_factory=set)
    """GPUs whose power limit a ceiling may have lowered."""
    _failed: dict[str, str] = field(default_factory=dict)
    """Why the ceiling of a GPU could not be set or lifted."""
    _leases: dict[str, _Lease] = field(default_factory=dict)
    _locks: dict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """One change of lease or ceiling per GPU at a time; otherwise a ceiling could be lifted under a new lease."""
    _due: set[str] = field(default_factory=set)
    _applying: set[asyncio.Task[None]] = field(default_factory=set)
    """One task per GPU, so that none waits for the driver's calls for another."""

    # --- ceilings ---

    @property
    def trouble(self) -> str | None:
        """Why a ceiling could not be set or lifted; None if there is no such failure."""
        return next(iter(self._failed.values()), None)

    def set_ceilings(self, ceilings: Mapping[str, Ceiling]) -> None:
        """Replace all ceilings of all services; GPUs without one return to what their lease holders want."""
        changed = {u for u in {*ceilings, *self._ceilings} if ceilings.get(u) != self._ceilings.get(u)}
        self._ceilings = {uuid: ceiling for uuid, ceiling in ceilings.items() if ceiling != _NO_CEILING}
        self._apply_soon(changed)

    @property
    def idle_clocks(self) -> Mapping[str, int]:
        """The GPUs that are lowered because nothing runs on them, and their clocks in MHz."""
        return self._idle_clocks

    def set_idle_clock(self, gpu_uuid: str, sm_clock_mhz: int | None) -> None:
        """Lower the clock of a GPU while nobody leases it; None lifts it, and so do any other lease and any restore."""
        if sm_clock_mhz is None:
            self._idle_clocks.pop(gpu_uuid, None)
        else:
            self._idle_clocks[gpu_uuid] = sm_clock_mhz
        self._apply_soon({gpu_uuid})

    def adopt(self, gpu_uuids: Sequence[str], lease_id: str, owner: LeaseOwner) -> None:
        """Record a lease that an earlier daemon acquired."""
        for uuid in gpu_uuids:
            self._leases[uuid] = _Lease(lease_id, owner, self.may_set_clocks)

    def handle_worker_ready(self) -> None:
        """Set all ceilings again, since a new worker has no leases."""
        self._leases.clear()
        self._idle_clocks.clear()
        self._forget_lowered(tuple(self._lowered_clocks | self._lowered_limits))
        self._failed.clear()
        self._apply_soon(set(self._ceilings))

    async def retry(self) -> None:
        """Try again to set or lift the ceilings that failed."""
        self._apply_soon(set(self._failed))

    async def close(self) -> None:
        """Stop setting ceilings; the caller restores the GPUs."""
        self._ceilings, self._idle_clocks = {}, {}
        for task in self._applying:
            task.cancel()
        await asyncio.gather(*self._applying, return_exceptions=True)

    async def settled(self) -> None:
        """Wait until every present ceiling is set or has failed."""
        while self._applying:
            await asyncio.wait(self._applying)

    # --- the worker port ---

    async def do(self, command: Command[ReplyT], pidfds: Sequence[int] = ()) -> ReplyT:
        """Execute a command: power limits are capped at the ceilings, which outlast leases and restores."""
        wanted: Command[Any] = command  # mypy: no Command[ReplyT] is an AcquireLease
        match wanted:
            case AcquireLease(lease_id, gpu_uuids, owner, sets_clocks):
                async with self._alone(gpu_uuids):
                    await self._lift_idle(gpu_uuids)
                    reply = await self.worker.do(command, pidfds)
                    for uuid in gpu_uuids:
                        known = self._leases.get(uuid)
                        if known is None or known.lease_id != lease_id:
                            self._leases[uuid] = _Lease(lease_id, owner, sets_clocks)
                self._apply_soon({uuid for uuid in gpu_uuids if uuid in self._ceilings})
                return reply
            case Restore(gpu_uuids):
                try:
                    async with self._alone(gpu_uuids):
                        for uuid in gpu_uuids:
                            self._leases.pop(uuid, None)
                            self._idle_clocks.pop(uuid, None)
                        self._forget_lowered(gpu_uuids)
                        return await self.worker.do(command)
                finally:
                    self._apply_soon({uuid for uuid in gpu_uuids if uuid in self._ceilings})
            case LowerPowerLimit(lease_id, gpu_uuid, limit_w) | SetPowerLimit(lease_id, gpu_uuid, limit_w):
                lease = self._leases.get(gpu_uuid)
                if lease is not None and lease.lease_id == lease_id:
                    lease.limit_w = limit_w
                capped_w: Any = self._capped_limit_w(gpu_uuid, limit_w)  # a float if the limit is one
                command = cast("Command[ReplyT]", replace(wanted, power_limit_w=capped_w))
            case _:
                pass
        return await self.worker.do(command, pidfds)

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request clocks of a leased GPU, but not above the ceiling."""
        lease = self._leases.get(gpu_uuid)
        if lease is not None:
            lease.clocks = request
        self._send_clocks(gpu_uuid, request)

    # --- inside ---

    def _capped_limit_w(self, gpu_uuid: str, power_limit_w: float | None) -> float | None:
        ceiling_w = self._ceilings.get(gpu_uuid, _NO_CEILING).power_limit_w
        if ceiling_w is None or (power_limit_w is not None and power_limit_w <= ceiling_w):
            return power_limit_w
        self._lowered_limits.add(gpu_uuid)
        return ceiling_w

    def _send_clocks(self, gpu_uuid: str, request: ClockRequest) -> None:
        ceiling_mhz = self._ceiling(gpu_uuid).sm_clock_mhz
        if ceiling_mhz is not None:
            self._lowered_clocks.add(gpu_uuid)
            later = tuple(replace(c, sm_clock_mhz=min(c.sm_clock_mhz, ceiling_mhz)) for c in request.later)
            request = replace(request, sm_clock_mhz=min(request.sm_clock_mhz, ceiling_mhz), later=later)
        gpu = self.gpus.get(gpu_uuid)
        if gpu is not None:
            gpu.requested_sm_clock_mhz = request.first_sm_clock_mhz
        self.worker.request_clock(gpu_uuid, request)

    def _ceiling(self, gpu_uuid: str) -> Ceiling:
        """Return the ceiling of a GPU, with its lower clock while nobody leases it."""
        ceiling, idle_mhz = self._ceilings.get(gpu_uuid, _NO_CEILING), self._idle_clocks.get(gpu_uuid)
        lease = self._leases.get(gpu_uuid)
        if idle_mhz is None or not (lease is None or lease.is_ours):
            return ceiling
        return replace(ceiling, sm_clock_mhz=min(idle_mhz, ceiling.sm_clock_mhz or idle_mhz))

    async def _lift_idle(self, gpu_uuids: Sequence[str]) -> None:
        """Restore GPUs that are or were lowered for idleness: the next holder may not set clocks."""
        for uuid in gpu_uuids:
            was_idle, lease = self._idle_clocks.pop(uuid, None) is not None, self._leases.get(uuid)
            is_due = was_idle or self._ceiling(uuid) == _NO_CEILING
            if is_due and lease is not None and lease.is_ours:
                with self._noting_failure(uuid):
                    await self._set(uuid)

    def _apply_soon(self, gpu_uuids: set[str]) -> None:
        for uuid in sorted(gpu_uuids - self._due):
            task = asyncio.get_running_loop().create_task(self._apply(uuid), name="ceiling")
            self._applying.add(task)
            task.add_done_callback(self._applying.discard)
        self._due |= gpu_uuids

    async def _apply(self, gpu_uuid: str) -> None:
        """Set the present ceiling of a GPU, or lift the previous one."""
        async with self._alone((gpu_uuid,)):
            self._due.discard(gpu_uuid)
            with suppress(GpuError), self._noting_failure(gpu_uuid):
                await self._set_with_any_lease(gpu_uuid)

    @contextmanager
    def _noting_failure(self, gpu_uuid: str) -> Iterator[None]:
        """Have a ceiling that cannot be set or lifted shown as trouble and tried again; clear both at a success."""
        try:
            yield
        except GpuError as error:
            trouble = f"GPU {gpu_uuid}: the ceiling cannot be set or lifted: {error}"
            if self._failed.get(gpu_uuid) != trouble:
                log.warning("%s", trouble)
            self._failed[gpu_uuid] = trouble
            raise
        self._failed.pop(gpu_uuid, None)

    async def _set_with_any_lease(self, gpu_uuid: str) -> None:
        known = self._leases.get(gpu_uuid)
        try:
            await self._set(gpu_uuid)
        except GpuError:
            # The worker may have ended the lease known here, for instance because its process has just died.
            if known is None or self._ceiling(gpu_uuid) == _NO_CEILING:
                raise
            del self._leases[gpu_uuid]
            try:
                await self._set(gpu_uuid)
            except GpuError:
                self._leases[gpu_uuid] = known
                raise

    async def _set(self, gpu_uuid: str) -> None:
        ceiling, lease = self._ceiling(gpu_uuid), self._leases.get(gpu_uuid)
        if ceiling == _NO_CEILING and (lease is None or lease.is_ours):
            if lease is not None:
                restored = await self.worker.do(Restore((gpu_uuid,), "its ceiling is gone"))
                for outcome in restored.outcomes:
                    if outcome.result is RestoreResult.FAILED:
                        raise GpuError(f"{outcome.control} is not restored: {outcome.detail}")
                self._leases.pop(gpu_uuid, None)
                self._record_restored(gpu_uuid)
            self._forget_lowered((gpu_uuid,))
            return
        if lease is None:
            owner = LeaseOwner(CEILING_LEASE, os.getpid(), os.geteuid())
            await self.worker.do(AcquireLease(CEILING_LEASE, (gpu_uuid,), owner, self.may_set_clocks))
            lease = self._leases[gpu_uuid] = _Lease(CEILING_LEASE, owner, self.may_set_clocks)
        if lease.sets_clocks and (ceiling.sm_clock_mhz is not None or gpu_uuid in self._lowered_clocks):
            self._lowered_clocks.discard(gpu_uuid)
            self._send_clocks(gpu_uuid, self._clocks_now(gpu_uuid, lease))
        if ceiling.power_limit_w is not None or gpu_uuid in self._lowered_limits:
            self._lowered_limits.discard(gpu_uuid)
            limit_w = self._capped_limit_w(gpu_uuid, lease.limit_w)
            try:
                await self.worker.do(LowerPowerLimit(lease.lease_id, gpu_uuid, limit_w, lease.owner))
            except GpuError:
                self._lowered_limits.add(gpu_uuid)
                raise

    @asynccontextmanager
    async def _alone(self, gpu_uuids: Iterable[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for uuid in sorted(set(gpu_uuids)):
                await stack.enter_async_context(self._locks[uuid])
            yield

    def _forget_lowered(self, gpu_uuids: Iterable[str]) -> None:
        self._lowered_clocks.difference_update(gpu_uuids)
        self._lowered_limits.difference_update(gpu_uuids)

    def _clocks_now(self, gpu_uuid: str, lease: _Lease) -> ClockRequest:
        """Return the clocks that the holder of a lease wants now; full speed if it has requested none."""
        now_ns = time.monotonic_ns()
        full_mhz = self.gpus[gpu_uuid].max_sm_clock_mhz
        if lease.clocks is None:
            return ClockRequest(full_mhz, now_ns)
        past = [c.sm_clock_mhz for c in lease.clocks.later if c.at_mono_ns <= now_ns]
        later = tuple(c for c in lease.clocks.later if c.at_mono_ns > now_ns)
        present_mhz = past[-1] if past else lease.clocks.sm_clock_mhz or full_mhz
        return replace(lease.clocks, sm_clock_mhz=present_mhz, sent_mono_ns=now_ns, later=later)

    def _record_restored(self, gpu_uuid: str) -> None:
        gpu = self.gpus.get(gpu_uuid)
        if gpu is not None:
            gpu.record_restored(time.monotonic_ns())
