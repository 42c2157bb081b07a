"""A job's right to clocks: leased from the worker, laid down while the job is silent, given back."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.daemon.jobs.audit_log import ControlTrail
from gpuenergyd.daemon.ports import JobServices
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import LeaseOwner
from gpuenergyd.gpu.restore.executor import RestoreResult

log = logging.getLogger(__name__)


@dataclass(slots=True)
class JobClocks:
    """The leases of one job."""

    services: JobServices
    owner: LeaseOwner
    trail: ControlTrail
    is_suspended: bool = False
    """Whether the job fell silent and its GPUs run at full speed until it speaks."""
    wants_from_epoch: int | None = None
    """Plans sent after the last restore count; None: nothing is leased."""
    pidfds: dict[int, int] = field(default_factory=dict)
    """Of the processes that are in the job now, by rank."""

    @property
    def are_held(self) -> bool:
        """Whether GPUs of this job may be running at clocks of ours."""
        return self.wants_from_epoch is not None and not self.is_suspended

    def accept(self, plan_epoch: int) -> bool:
        """Return whether clock records of a plan count: leased, not suspended, and sent after the last restore."""
        return self.wants_from_epoch is not None and not self.is_suspended and plan_epoch >= self.wants_from_epoch

    def lose(self) -> None:
        """Hold nothing any more: what is still locked, somebody else gives back."""
        self.wants_from_epoch = None

    async def suspend(self, gpu_uuids: tuple[str, ...], reason: str) -> None:
        """Give the GPUs of a job that has fallen silent their full speed; the job itself stays as it is."""
        if self.are_held:
            self.is_suspended = True
            await self._restore(gpu_uuids, reason)

    async def lease(self, gpu_uuids: tuple[str, ...], *, last_epoch: int, on_refusal: Callable[[str], None]) -> None:
        """Get the right to change GPUs; plans after `last_epoch` count."""
        try:
            pidfds = tuple(self.pidfds.values())
            await self.services.worker.lease(self.trail.job_id, gpu_uuids, self.owner, pidfds)
        except GpuError as error:
            log.warning("job %s: no lease: %s", self.trail.job_id, error)
            self.trail.record("lease", self._owner_text, str(error), after="refused")
            on_refusal(str(error))
            return
        self.wants_from_epoch = last_epoch + 1 if self.wants_from_epoch is None else self.wants_from_epoch
        for gpu_uuid in gpu_uuids:
            self.trail.record(
                "lease", self._owner_text, "first clock plan", gpu_uuid=gpu_uuid, before="un-tuned", after="leased"
            )

    async def restore(self, gpu_uuids: tuple[str, ...], reason: str) -> None:
        """Put GPUs back and end their leases."""
        self.lose()
        self.is_suspended = False
        await self._restore(gpu_uuids, reason)

    async def _restore(self, gpu_uuids: tuple[str, ...], reason: str) -> None:
        try:
            outcomes = await self.services.worker.restore(gpu_uuids, reason)
        except GpuError as error:
            # A worker that died cut nothing loose: its successor restores what the journal holds.
            log.warning("job %s: restore left to the next worker: %s", self.trail.job_id, error)
            self.trail.record("restore", "core", reason, after=f"left to the next worker: {error}")
            return
        now_ns = time.monotonic_ns()
        told = {outcome.gpu_uuid: outcome for outcome in outcomes}
        for gpu_uuid in gpu_uuids:
            gpu, outcome = self.services.gpus.get(gpu_uuid), told.get(gpu_uuid)
            before = gpu.requested_sm_clock_mhz if gpu is not None else None
            if gpu is not None and (outcome is None or outcome.result is not RestoreResult.FAILED):
                gpu.record_restored(now_ns)
            self.trail.record(
                "restore",
                "core",
                reason,
                gpu_uuid=gpu_uuid,
                before=f"{before} MHz" if before is not None else "leased",
                # Without an outcome the journal held nothing: somebody else has restored it already.
                after=f"{outcome.result}: {outcome.detail}" if outcome is not None else "nothing left to restore",
            )

    @property
    def _owner_text(self) -> str:
        return f"uid {self.owner.uid} pid {self.owner.pid}"
