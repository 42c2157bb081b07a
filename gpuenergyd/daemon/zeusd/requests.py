"""What programs written for zeusd change of GPUs: a lease per process and GPU that ends with the process.

Where nobody waits for the effect, only the newest change of each kind is kept per GPU: a flood of them sets few clocks.
"""

import logging
import os
from dataclasses import dataclass, field, replace

from gpuenergyd.daemon.gpus.inventory import Gpu
from gpuenergyd.daemon.manual_leases.leases import LeaseHolder, ManualLeases, supported_no_slower_than
from gpuenergyd.daemon.ports import AskableWorker
from gpuenergyd.errors import GpuEnergyError, UsageError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ZeusdChange:
    """What one request asks of each of its GPUs."""

    sm_clock_mhz: int | None = None
    power_limit_w: float | None = None
    is_clock_reset: bool = False
    noted: str | None = None
    """What is accepted and recorded, and changes nothing."""

    def followed_by(self, newer: "ZeusdChange") -> "ZeusdChange":
        """Return what is left to do of both."""
        clock = newer if newer.sm_clock_mhz is not None or newer.is_clock_reset else self
        limit_w = self.power_limit_w if newer.power_limit_w is None else newer.power_limit_w
        return replace(
            newer, sm_clock_mhz=clock.sm_clock_mhz, is_clock_reset=clock.is_clock_reset, power_limit_w=limit_w
        )


@dataclass(slots=True)
class ZeusdChanges:
    """Carries changes out under leases; owned by the event loop."""

    leases: ManualLeases
    worker: AskableWorker
    _queued: dict[tuple[str, LeaseHolder], ZeusdChange] = field(default_factory=dict)

    async def apply(self, gpu: Gpu, holder: LeaseHolder, pidfd: int, change: ZeusdChange, *, shall_wait: bool) -> None:
        """Carry a change out for a process that may have it; without waiting, what fails is only logged.

        Raises:
            JobError: the GPU works for a job, or somebody else holds it.
            UsageError: a clock that the GPU does not have.
            GpuError: the driver refuses.
        """
        if change.sm_clock_mhz is not None:
            change = replace(change, sm_clock_mhz=supported_no_slower_than(gpu, change.sm_clock_mhz))
        await self.leases.end_if_orphaned(gpu.identity.gpu_uuid)
        self.leases.require_free_for(gpu.identity.gpu_uuid, holder)
        if change.power_limit_w is not None:
            await self._require_possible(gpu, change.power_limit_w)
        if shall_wait:
            await self._carry_out(gpu, holder, pidfd, change)
            return
        key = (gpu.identity.gpu_uuid, holder)
        if key in self._queued:
            self._queued[key] = self._queued[key].followed_by(change)
            return
        self._queued[key] = change
        self.leases.spawn(self._carry_out_queued(gpu, holder, os.dup(pidfd)))

    async def _require_possible(self, gpu: Gpu, power_limit_w: float) -> None:
        details = (await self.worker.snapshot(gpu.identity.gpu_uuid)).details
        low_w, high_w = details.min_power_limit_w, details.max_power_limit_w
        if low_w is not None and high_w is not None and not low_w <= power_limit_w <= high_w:
            raise UsageError(f"{power_limit_w:g} W: GPU {gpu.identity.gpu_uuid} takes {low_w:g} to {high_w:g} W")

    async def _carry_out_queued(self, gpu: Gpu, holder: LeaseHolder, pidfd: int) -> None:
        key = (gpu.identity.gpu_uuid, holder)
        try:
            async with self.leases.turn(gpu.identity.gpu_uuid):
                # From here on a newer change is queued for itself: this one no longer hears of it.
                await self._in_turn(gpu, holder, pidfd, self._queued.pop(key))
        except GpuEnergyError as error:
            log.warning("%s: a change it did not wait for failed: %s", holder, error)
        finally:
            os.close(pidfd)

    async def _carry_out(self, gpu: Gpu, holder: LeaseHolder, pidfd: int, change: ZeusdChange) -> None:
        async with self.leases.turn(gpu.identity.gpu_uuid):
            await self._in_turn(gpu, holder, pidfd, change)

    async def _in_turn(self, gpu: Gpu, holder: LeaseHolder, pidfd: int, change: ZeusdChange) -> None:
        gpu_uuid = gpu.identity.gpu_uuid
        if change.noted is not None:
            self.leases.record("accepted", gpu_uuid, holder, change.noted, "", "not carried out")
        if change.is_clock_reset:
            await self._reset_clock(gpu, holder)
        if change.sm_clock_mhz is not None or change.power_limit_w is not None:
            await self.leases.set(
                gpu, holder, sm_clock_mhz=change.sm_clock_mhz, power_limit_w=change.power_limit_w, pidfd=pidfd
            )

    async def _reset_clock(self, gpu: Gpu, holder: LeaseHolder) -> None:
        """Let the clock of a GPU rise as far as it can; what the process has not lowered is left as it is."""
        lease = self.leases.get(gpu.identity.gpu_uuid)
        if lease is None or lease.sm_clock_mhz is None:
            return
        if lease.power_limit_w is None:
            await self.leases.end(lease, "its clock was reset")
        else:
            await self.leases.set(gpu, holder, sm_clock_mhz=gpu.max_sm_clock_mhz)
