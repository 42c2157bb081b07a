"""Clock locks and power limits of administrators, held until released, for a set time, or until the daemon stops.

The lease belongs to the daemon, not to the command that requested it.
"""

from dataclasses import dataclass

from gpuenergyd.daemon.gpus.inventory import ClaimKind, Gpus
from gpuenergyd.daemon.manual_leases.leases import (
    LeaseHolder,
    ManualLeases,
    require_power_limit_in_range,
    supported_no_slower_than,
)
from gpuenergyd.daemon.ports import WorkerPort
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.daemon.settings import REFUSED_IN_OBSERVE
from gpuenergyd.errors import JobError, UsageError
from gpuenergyd_locks.messages import LeaseGranted, LeaseRelease, LeaseReleased, LeaseRequest

_MAX_LIFETIME_S = 30 * 86_400.0
_MAX_POWER_LIMIT_W = 10_000.0


@dataclass(slots=True)
class AdministratorLeases:
    """Validates and applies lease requests of administrators; the caller has checked that the client is one."""

    leases: ManualLeases
    gpus: Gpus
    worker: WorkerPort
    is_observing: bool = False

    async def grant(self, request: LeaseRequest, peer: PeerCredentials) -> LeaseGranted:
        """Lock a clock, limit the power, or both; change an administrator's existing lease.

        Raises:
            GpuNotFoundError: no such GPU.
            UsageError: a clock, limit or lifetime is out of range.
            JobError: the GPU is in use by a job or leased to a process, or the daemon only observes.
            GpuError: the driver refused; a lease created by this request has been ended.
        """
        gpu = self.gpus.find(request.gpu)
        _check_amounts(request)
        clock_mhz = request.sm_clock_mhz
        sm_clock_mhz = None if clock_mhz is None else supported_no_slower_than(gpu, clock_mhz)
        if self.is_observing:
            raise JobError(REFUSED_IN_OBSERVE)
        if request.power_limit_w is not None:
            await require_power_limit_in_range(self.worker, gpu, request.power_limit_w)
        holder, gpu_uuid = LeaseHolder(ClaimKind.ADMINISTRATOR, peer.uid), gpu.identity.gpu_uuid
        if request.is_dry_run:
            self.leases.require_free_for(gpu_uuid, holder)
            present = self.leases.get(gpu_uuid)
            return LeaseGranted(
                gpu_uuid=gpu_uuid,
                lease_id=present.lease_id if present is not None else None,
                sm_clock_mhz=sm_clock_mhz,
                power_limit_w=request.power_limit_w,
                remaining_s=request.lifetime_s,
                is_dry_run=True,
            )
        async with self.leases.lock_gpu(gpu_uuid):
            lease = await self.leases.set(gpu, holder, sm_clock_mhz=sm_clock_mhz, power_limit_w=request.power_limit_w)
            self.leases.limit_lifetime(lease, request.lifetime_s)
            return LeaseGranted(
                gpu_uuid=gpu_uuid,
                lease_id=lease.lease_id,
                sm_clock_mhz=lease.sm_clock_mhz,
                power_limit_w=lease.power_limit_w,
                remaining_s=request.lifetime_s,
                is_dry_run=False,
            )

    async def release(self, request: LeaseRelease, peer: PeerCredentials) -> LeaseReleased:
        """Restore a GPU and end its lease, held by an administrator or a zeusd client.

        Raises:
            GpuNotFoundError: no such GPU.
            JobError: the GPU has no such lease.
        """
        gpu_uuid = self.gpus.find(request.gpu).identity.gpu_uuid
        lease = self.leases.get(gpu_uuid)
        if lease is None:
            self.gpus.require_free(gpu_uuid)
            raise JobError(f"GPU {gpu_uuid} has no lease: no clock lock or power limit is set outside a job")
        if request.is_dry_run:
            return LeaseReleased(gpu_uuid, lease.lease_id, (), is_dry_run=True)
        async with self.leases.lock_gpu(gpu_uuid):
            lease = self.leases.get(gpu_uuid)
            if lease is None:
                raise JobError(f"the lease of GPU {gpu_uuid} has ended already")
            outcomes = await self.leases.end(lease, f"released by {peer}")
        return LeaseReleased(gpu_uuid, lease.lease_id, outcomes, is_dry_run=False)


def _check_amounts(request: LeaseRequest) -> None:
    if request.sm_clock_mhz is None and request.power_limit_w is None:
        raise UsageError("specify sm_clock_mhz or power_limit_w")
    if request.power_limit_w is not None and not 0 < request.power_limit_w <= _MAX_POWER_LIMIT_W:
        raise UsageError(
            f"power_limit_w = {request.power_limit_w:g}: valid are values above 0 up to {_MAX_POWER_LIMIT_W:g}"
        )
    if request.lifetime_s is not None and not 0 < request.lifetime_s <= _MAX_LIFETIME_S:
        raise UsageError(f"lifetime_s = {request.lifetime_s:g}: valid are values above 0 up to {_MAX_LIFETIME_S:g}")
