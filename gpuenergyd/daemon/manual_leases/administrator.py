"""What an administrator sets by hand: clocks and power limits, held until released, for a time, or the daemon stops.

The lease lives with the daemon, not with a command.
"""

from dataclasses import dataclass

from gpuenergyd.daemon.gpus.inventory import ClaimKind, Gpus
from gpuenergyd.daemon.manual_leases.leases import LeaseHolder, ManualLeases, supported_no_slower_than
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials
from gpuenergyd.errors import JobError, UsageError
from gpuenergyd.wire.messages import LeaseGranted, LeaseRelease, LeaseReleased, LeaseRequest

_MAX_LIFETIME_S = 30 * 86_400.0
_MAX_POWER_LIMIT_W = 10_000.0


@dataclass(slots=True)
class AdministratorLeases:
    """What administrators ask for, checked and handed on; who is one was checked before."""

    leases: ManualLeases
    gpus: Gpus
    is_observing: bool = False

    async def grant(self, request: LeaseRequest, peer: PeerCredentials) -> LeaseGranted:
        """Lock a clock, limit the power, or both; a lease the GPU is under already is extended.

        Raises:
            GpuNotFoundError: no such GPU.
            UsageError: a clock, a limit or a lifetime that cannot be.
            JobError: a job or a process owns the GPU, or the daemon only observes.
            GpuError: the driver refuses; a lease that this request began has ended again.
        """
        gpu = self.gpus.find(request.gpu)
        _check_amounts(request)
        clock_mhz = request.sm_clock_mhz
        sm_clock_mhz = None if clock_mhz is None else supported_no_slower_than(gpu, clock_mhz)
        if self.is_observing:
            raise JobError("mode = 'observe': this daemon changes no GPU; start it with mode = 'control'")
        holder, gpu_uuid = LeaseHolder(ClaimKind.ADMINISTRATOR, peer.uid), gpu.identity.gpu_uuid
        if request.is_dry_run:
            self.leases.require_free_for(gpu_uuid, holder)
            known = self.leases.get(gpu_uuid)
            return LeaseGranted(
                gpu_uuid=gpu_uuid,
                lease_id=known.lease_id if known is not None else None,
                sm_clock_mhz=sm_clock_mhz,
                power_limit_w=request.power_limit_w,
                remaining_s=request.lifetime_s,
                is_dry_run=True,
            )
        async with self.leases.turn(gpu_uuid):
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
        """Put a GPU back and end its lease, an administrator's or a process's.

        Raises:
            GpuNotFoundError: no such GPU.
            JobError: it is under no lease.
        """
        gpu_uuid = self.gpus.find(request.gpu).identity.gpu_uuid
        lease = self.leases.get(gpu_uuid)
        if lease is None:
            self.gpus.require_free(gpu_uuid)
            raise JobError(f"GPU {gpu_uuid} is under no lease: nobody has locked or limited it outside a job")
        if request.is_dry_run:
            return LeaseReleased(gpu_uuid, lease.lease_id, (), is_dry_run=True)
        async with self.leases.turn(gpu_uuid):
            lease = self.leases.get(gpu_uuid)
            if lease is None:
                raise JobError(f"GPU {gpu_uuid} is under no lease any more")
            told = await self.leases.end(lease, f"released by {peer}")
        return LeaseReleased(gpu_uuid, lease.lease_id, told, is_dry_run=False)


def _check_amounts(request: LeaseRequest) -> None:
    if request.sm_clock_mhz is None and request.power_limit_w is None:
        raise UsageError("a lease is of a clock or of a power limit: name sm_clock_mhz or power_limit_w")
    if request.power_limit_w is not None and not 0 < request.power_limit_w <= _MAX_POWER_LIMIT_W:
        raise UsageError(f"{request.power_limit_w:g} W: a power limit is above 0 and at most {_MAX_POWER_LIMIT_W:g} W")
    if request.lifetime_s is not None and not 0 < request.lifetime_s <= _MAX_LIFETIME_S:
        raise UsageError(f"{request.lifetime_s:g} s: a lease lives above 0 and at most {_MAX_LIFETIME_S:g} s")
