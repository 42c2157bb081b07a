"""Clock and power changes of zeusd client programs: one lease per process and GPU, which ends with the process.

For requests that do not wait for the effect, only the newest pending change of each kind is kept per GPU, so that a
flood of requests causes few changes.
"""

import logging
import os
from dataclasses import dataclass, field, replace

from gpuenergyd.daemon.gpus.inventory import Gpu
from gpuenergyd.daemon.manual_leases.leases import (
    LeaseHolder,
    ManualLeases,
    require_power_limit_in_range,
    supported_no_slower_than,
)
from gpuenergyd.daemon.ports import WorkerPort
from gpuenergyd.errors import GpuEnergyError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ZeusdChange:
    """The change that one request makes to each of its GPUs."""

    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    is_clock_reset: bool = False
    ignored: str | None = None
    """A setting that is accepted and recorded, but not applied."""

    def merged_with(self, newer: "ZeusdChange") -> "ZeusdChange":
        """Merge this change and a newer one; the newer values win."""
        clock = newer if newer.sm_clock_mhz is not None or newer.is_clock_reset else self
        limit_w = self.power_limit_w if newer.power_limit_w is None else newer.power_limit_w
        return replace(
            newer, sm_clock_mhz=clock.sm_clock_mhz, is_clock_reset=clock.is_clock_reset, power_limit_w=limit_w
        )


@dataclass(slots=True)
class ZeusdChanges:
    """Applies changes under leases; owned by the event loop."""

    leases: ManualLeases
    worker: WorkerPort
    _queued: dict[tuple[str, LeaseHolder], ZeusdChange] = field(default_factory=dict)

    async def apply(self, gpu: Gpu, holder: LeaseHolder, pidfd: int, change: ZeusdChange, *, shall_wait: bool) -> None:
        """Apply a change for a process whose rights were checked; unless `shall_wait`, failures are only logged.

        Raises:
            JobError: the GPU is in use by a job or leased to another process.
            UsageError: the clock or limit is out of the GPU's range.
            GpuError: the driver refuses.
        """
        if change.sm_clock_mhz is not None:
            change = replace(change, sm_clock_mhz=supported_no_slower_than(gpu, change.sm_clock_mhz))
        await self.leases.end_if_orphaned(gpu.identity.gpu_uuid)
        self.leases.require_free_for(gpu.identity.gpu_uuid, holder)
        if change.power_limit_w is not None:
            await require_power_limit_in_range(self.worker, gpu, change.power_limit_w)
        if shall_wait:
            async with self.leases.lock_gpu(gpu.identity.gpu_uuid):
                await self._apply_locked(gpu, holder, pidfd, change)
            return
        key = (gpu.identity.gpu_uuid, holder)
        if key in self._queued:
            self._queued[key] = self._queued[key].merged_with(change)
            return
        self._queued[key] = change
        self.leases.spawn(self._apply_queued(gpu, holder, os.dup(pidfd)))

    async def _apply_queued(self, gpu: Gpu, holder: LeaseHolder, pidfd: int) -> None:
        key = (gpu.identity.gpu_uuid, holder)
        try:
            async with self.leases.lock_gpu(gpu.identity.gpu_uuid):
                # From now on a newer change is queued separately instead of merged into this one.
                await self._apply_locked(gpu, holder, pidfd, self._queued.pop(key))
        except GpuEnergyError as error:
            log.warning("%s: a queued change failed: %s", holder, error)
        finally:
            os.close(pidfd)

    async def _apply_locked(self, gpu: Gpu, holder: LeaseHolder, pidfd: int, change: ZeusdChange) -> None:
        gpu_uuid = gpu.identity.gpu_uuid
        if change.ignored is not None:
            self.leases.record("accepted", gpu_uuid, holder, change.ignored, "", "not applied")
        if change.is_clock_reset:
            await self._reset_clock(gpu, holder)
        if change.sm_clock_mhz is not None or change.power_limit_w is not None:
            await self.leases.set(
                gpu, holder, sm_clock_mhz=change.sm_clock_mhz, power_limit_w=change.power_limit_w, pidfd=pidfd
            )

    async def _reset_clock(self, gpu: Gpu, holder: LeaseHolder) -> None:
        """Remove the clock limit of a lease; without one, do nothing."""
        lease = self.leases.get(gpu.identity.gpu_uuid)
        if lease is None or lease.sm_clock_mhz is None:
            return
        if lease.power_limit_w is None:
            await self.leases.end(lease, "the clock limit was reset")
        else:
            await self.leases.set(gpu, holder, sm_clock_mhz=gpu.max_sm_clock_mhz)
