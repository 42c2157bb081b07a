"""GPU leases of a job: acquire, suspend while the job is idle, release."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.core.job.messages import ControlLost, Event, LeaseGpus, RestoreGpus
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.daemon.jobs.audit_log import DAEMON, AuditLog
from gpuenergyd.daemon.jobs.plan_delivery import PlanDelivery
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import AcquireLease, LeaseOwner, Restore
from gpuenergyd.gpu.restore.executor import RestoreResult

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LeasesSnapshot:
    """The state of `JobLeases` except the pidfds, which are valid in one process only."""

    accepts_from_epoch: int | None
    is_suspended: bool


@dataclass(slots=True)
class JobLeases:
    """The leases of one job; `handle` passes events to its state machine."""

    services: JobServices
    owner: LeaseOwner
    audit: AuditLog
    delivery: PlanDelivery
    handle: Callable[[Event], None]
    on_change: Callable[[], None] = lambda: None
    """Called when the GPUs were leased, or may no longer run at the clocks or limits that were set."""
    is_suspended: bool = False
    """Whether the job is idle, so that its GPUs run at full speed until its next report."""
    pidfds: dict[int, int] = field(default_factory=dict)
    """The pidfds of the registered processes, by `JobDescription.rank_index`."""
    _accepts_from_epoch: int | None = None
    """The first plan epoch sent after the last restore; None if nothing is leased."""

    @property
    def are_held(self) -> bool:
        """Whether GPUs of this job may be running at clocks that the daemon set."""
        return self._accepts_from_epoch is not None and not self.is_suspended

    def accept(self, plan_epoch: int) -> bool:
        """Return whether to accept a plan's clock requests: leased, not suspended, sent after the last restore."""
        first = self._accepts_from_epoch
        return first is not None and not self.is_suspended and plan_epoch >= first

    def lose(self) -> None:
        """Drop the leases without restoring, which the GPU worker or its successor does itself."""
        self._accepts_from_epoch = None
        self.on_change()

    async def suspend(self, gpu_uuids: tuple[str, ...], reason: str) -> None:
        """Restore the GPUs of an idle job, without telling its state machine."""
        if self.are_held:
            self.is_suspended = True
            self.on_change()
            await self._restore(gpu_uuids, reason)

    async def resume(self, gpu_uuids: tuple[str, ...]) -> None:
        """Lease the GPUs of an idle job again at its next report or clock request."""
        if self.is_suspended:
            self.is_suspended = False
            await self._lease(gpu_uuids)

    async def lease(self, command: LeaseGpus) -> None:
        """Lease GPUs, and accept clock requests of plans sent from now on."""
        await self._lease(command.gpu_uuids)

    async def restore(self, command: RestoreGpus) -> None:
        """Restore GPUs and end their leases."""
        self.lose()
        self.is_suspended = False
        await self._restore(command.gpu_uuids, command.reason)

    def snapshot(self) -> LeasesSnapshot:
        """Return the state for the next daemon."""
        return LeasesSnapshot(self._accepts_from_epoch, self.is_suspended)

    def take_over(self, snapshot: LeasesSnapshot) -> None:
        """Replace the state with that of an earlier daemon."""
        self._accepts_from_epoch, self.is_suspended = snapshot.accepts_from_epoch, snapshot.is_suspended

    async def _lease(self, gpu_uuids: tuple[str, ...]) -> None:
        first = self.delivery.last_epoch + 1
        try:
            pidfds = tuple(self.pidfds.values())
            sets_clocks = Lever.CLOCKS in self.services.levers
            command = AcquireLease(self.audit.job_id, gpu_uuids, self.owner, sets_clocks)
            await self.services.worker.do(command, pidfds)
        except GpuError as error:
            log.warning("job %s: no lease: %s", self.audit.job_id, error)
            self.audit.record("lease", self._owner_text, str(error), after="refused")
            self.handle(ControlLost(str(error)))
            return
        if self._accepts_from_epoch is None:
            self._accepts_from_epoch = first
        self.on_change()
        for gpu_uuid in gpu_uuids:
            self.audit.record(
                "lease", self._owner_text, "first clock plan", gpu_uuid=gpu_uuid, before="full speed", after="leased"
            )

    async def _restore(self, gpu_uuids: tuple[str, ...], reason: str) -> None:
        try:
            restored = await self.services.worker.do(Restore(gpu_uuids, reason))
        except GpuError as error:
            # A GPU worker that died leaves its journal, from which the next one restores.
            log.warning("job %s: restore left to the next GPU worker: %s", self.audit.job_id, error)
            self.audit.record("restore", DAEMON, reason, after=f"left to the next GPU worker: {error}")
            return
        now_ns = time.monotonic_ns()
        outcome_of = {outcome.gpu_uuid: outcome for outcome in restored.outcomes}
        for gpu_uuid in gpu_uuids:
            gpu, outcome = self.services.gpus.get(gpu_uuid), outcome_of.get(gpu_uuid)
            before = gpu.requested_sm_clock_mhz if gpu is not None else None
            if gpu is not None and (outcome is None or outcome.result is not RestoreResult.FAILED):
                gpu.record_restored(now_ns)
            self.audit.record(
                "restore",
                DAEMON,
                reason,
                gpu_uuid=gpu_uuid,
                before=f"{before} MHz" if before is not None else "leased",
                # No outcome means an empty journal: the GPU was restored before.
                after=f"{outcome.result}: {outcome.detail}" if outcome is not None else "nothing left to restore",
            )

    @property
    def _owner_text(self) -> str:
        return f"uid {self.owner.uid} pid {self.owner.pid}"
