"""The daemon's link to the GPU worker with a method for each command, as tests and fakes of the worker name them."""

from collections.abc import Sequence
from typing import Any, cast

from gpuenergyd.gpu.device import GpuDetails, GpuIdentity
from gpuenergyd.gpu.link import client
from gpuenergyd.gpu.link.messages import (
    AcquireLease,
    Command,
    Done,
    GpuProcesses,
    GpuSnapshot,
    HandOver,
    LeaseOwner,
    ListProcesses,
    LowerPowerLimit,
    Ping,
    PowerLimit,
    PowerProfiles,
    ReleaseGpus,
    Reopened,
    ReopenGpus,
    ReplyT,
    Restore,
    Restored,
    SetPowerLimit,
    SetPowerProfile,
    TakeSnapshot,
    WorkerCounters,
)
from gpuenergyd.gpu.restore.executor import RestoreOutcome


class WorkerLink(client.WorkerLink):
    """A connection to a GPU worker."""

    async def lease(
        self,
        lease_id: str,
        gpu_uuids: Sequence[str],
        owner: LeaseOwner,
        pidfds: Sequence[int] = (),
        *,
        sets_clocks: bool = True,
    ) -> None:
        await self.do(AcquireLease(lease_id, tuple(gpu_uuids), owner, sets_clocks), pidfds)

    async def set_power_limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        """Set a power limit; return the limit read back."""
        return (await self.do(SetPowerLimit(lease_id, gpu_uuid, power_limit_w, owner))).power_limit_w

    async def lower_power_limit(
        self, lease_id: str, gpu_uuid: str, power_limit_w: float | None, owner: LeaseOwner
    ) -> float:
        """Lower a power limit, or return to the one before; return the limit read back."""
        return (await self.do(LowerPowerLimit(lease_id, gpu_uuid, power_limit_w, owner))).power_limit_w

    async def set_power_profile(
        self, lease_id: str, gpu_uuid: str, power_profile: int | None, owner: LeaseOwner
    ) -> tuple[int, ...]:
        """Add a workload power profile, or remove ours; return the requested ones read back."""
        return (await self.do(SetPowerProfile(lease_id, gpu_uuid, power_profile, owner))).requested

    async def restore(
        self, gpu_uuids: Sequence[str], reason: str, *, is_daemon_ending: bool = False
    ) -> tuple[RestoreOutcome, ...]:
        """Restore GPUs; return the outcomes."""
        return (await self.do(Restore(tuple(gpu_uuids), reason, is_daemon_ending))).outcomes

    async def release_gpus(self, gpu_uuids: Sequence[str], reason: str) -> None:
        """Let go of GPUs."""
        await self.do(ReleaseGpus(tuple(gpu_uuids), reason))

    async def reopen_gpus(self, gpu_uuids: Sequence[str]) -> tuple[GpuIdentity, ...]:
        """Open released GPUs again."""
        return (await self.do(ReopenGpus(tuple(gpu_uuids)))).identities

    async def ping(self) -> WorkerCounters:
        return await self.do(Ping())

    async def hand_over(self, token: str, keep_s: float) -> None:
        """Have the worker keep all leases when this link ends."""
        await self.do(HandOver(token, keep_s))


class WorkerByMethods:
    """A fake of the worker port that does nothing: one method for each command, to override."""

    async def do(self, command: Command[ReplyT], pidfds: Sequence[int] = ()) -> ReplyT:
        del pidfds
        return cast("ReplyT", await self._reply(command))

    async def _reply(self, command: Command[Any]) -> object:
        match command:
            case AcquireLease(lease_id, gpu_uuids, owner, sets_clocks):
                await self.lease(lease_id, gpu_uuids, owner, sets_clocks=sets_clocks)
                return Done()
            case Restore(gpu_uuids, reason):
                return Restored(await self.restore(gpu_uuids, reason))
            case LowerPowerLimit(lease_id, gpu_uuid, limit_w, owner):
                return PowerLimit(await self.lower_power_limit(lease_id, gpu_uuid, limit_w, owner))
            case SetPowerLimit(lease_id, gpu_uuid, limit_w, owner):
                return PowerLimit(await self.set_power_limit(lease_id, gpu_uuid, limit_w, owner))
            case SetPowerProfile(lease_id, gpu_uuid, profile, owner):
                return PowerProfiles(await self.set_power_profile(lease_id, gpu_uuid, profile, owner))
            case ListProcesses(gpu_uuid):
                return GpuProcesses(await self.process_ids(gpu_uuid))
            case TakeSnapshot(gpu_uuid):
                return await self.snapshot(gpu_uuid)
            case ReleaseGpus(gpu_uuids, reason):
                await self.release_gpus(gpu_uuids, reason)
                return Done()
            case ReopenGpus(gpu_uuids):
                return Reopened(await self.reopen_gpus(gpu_uuids))
            case _:
                raise AssertionError(f"no test sends {command}")

    async def lease(
        self, lease_id: str, gpu_uuids: Sequence[str], owner: LeaseOwner, *, sets_clocks: bool = True
    ) -> None:
        """Grant it."""

    async def restore(self, gpu_uuids: Sequence[str], reason: str) -> tuple[RestoreOutcome, ...]:
        del gpu_uuids, reason
        return ()

    async def lower_power_limit(
        self, lease_id: str, gpu_uuid: str, power_limit_w: float | None, owner: LeaseOwner
    ) -> float:
        del lease_id, gpu_uuid, owner
        return 400.0 if power_limit_w is None else power_limit_w

    async def set_power_limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        return await self.lower_power_limit(lease_id, gpu_uuid, power_limit_w, owner)

    async def set_power_profile(
        self, lease_id: str, gpu_uuid: str, power_profile: int | None, owner: LeaseOwner
    ) -> tuple[int, ...]:
        del lease_id, gpu_uuid, owner
        return () if power_profile is None else (power_profile,)

    async def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        del gpu_uuid
        return ()

    async def snapshot(self, gpu_uuid: str) -> GpuSnapshot:
        """Return unknown values."""
        del gpu_uuid
        return GpuSnapshot(None, None, GpuDetails())

    async def release_gpus(self, gpu_uuids: Sequence[str], reason: str) -> None:
        """Do nothing."""

    async def reopen_gpus(self, gpu_uuids: Sequence[str]) -> tuple[GpuIdentity, ...]:
        del gpu_uuids
        return ()
