"""Power limits of a job's plans: each rank's GPU gets the limit of a plan when the iteration before its first one ends.

Clocks are requested by the ranks themselves, power limits by the daemon: a limit holds for whole iterations. All sets
of one job run one after another, and only the newest limit of each GPU is sent.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.messages import ControlLost, Event, SendPlan
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.daemon.jobs.audit_log import AuditLog
from gpuenergyd.daemon.ports import WorkerPort
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import LeaseOwner

_UNKNOWN_W = -1.0
"""What an earlier daemon set last, which differs from every limit and is therefore set again."""


@dataclass(frozen=True, slots=True)
class PowerLimitsSnapshot:
    """The plans whose limits are in force or will be: first iteration, and limits in watts by pipeline rank."""

    sent: tuple[tuple[int, dict[int, float]], ...] = ()
    were_set: tuple[str, ...] = ()
    """The GPUs whose limit was set since the job's GPUs were leased."""


@dataclass(slots=True)
class JobPowerLimits:
    """The power limits of one job; `are_leased` tells whether they may be set now."""

    worker: WorkerPort
    ranks: JobRanks
    owner: LeaseOwner
    audit: AuditLog
    are_leased: Callable[[], bool]
    handle: Callable[[Event], None]
    _sent: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    _begins: dict[int, int] = field(default_factory=dict)
    """By `JobDescription.rank_index`, the iteration that the rank runs now."""
    _wanted: dict[str, float | None] = field(default_factory=dict)
    _in_force: dict[str, float | None] = field(default_factory=dict)
    """By GPU, the limit that was set; None, or no entry: the one from before the job."""
    _task: asyncio.Task[None] | None = None

    def send(self, command: SendPlan) -> None:
        """Add a plan that ranks follow from `apply_at_iteration` on."""
        self._sent = [known for known in self._sent if known[0] < command.apply_at_iteration]
        self._sent.append((command.apply_at_iteration, dict(command.plan.power_limits_w)))
        self.apply()

    def report(self, iteration: RankIteration) -> None:
        """Set the limit of the iteration that a rank begins after the reported one."""
        index = self.ranks.description.rank_index(iteration.pp_rank, iteration.stage_rank)
        self._begins[index] = iteration.iteration_index + 1
        if any(limits for _, limits in self._sent) or self._in_force:
            self.apply()

    def apply(self) -> None:
        """Set the limits that are in force now, as far as they are not set yet."""
        if not self.are_leased():
            return
        for index, begins in self._begins.items():
            gpu_uuid = self.ranks.own_gpus[index].gpu_uuid
            wanted_w = self._limit_w(index // self.ranks.description.num_stage_ranks, begins)
            if wanted_w is not None or gpu_uuid in self._in_force or gpu_uuid in self._wanted:
                self._wanted[gpu_uuid] = wanted_w
        oldest = min(self._begins.values(), default=0)
        while len(self._sent) > 1 and self._sent[1][0] <= oldest:
            self._sent.pop(0)
        if self._task is None and self._changes():
            self._task = asyncio.create_task(self._set_all(), name=f"power limits of job {self.audit.job_id}")

    def forget(self) -> None:
        """Forget what is in force, because the GPUs were restored or the worker was lost."""
        self._wanted.clear()
        self._in_force.clear()

    def snapshot(self) -> PowerLimitsSnapshot:
        """Return the state for the next daemon, which sets all limits again."""
        return PowerLimitsSnapshot(tuple(self._sent), tuple(self._in_force))

    def restore(self, snapshot: PowerLimitsSnapshot) -> None:
        """Continue from the state of an earlier daemon."""
        self._sent = list(snapshot.sent)
        self._in_force = dict.fromkeys(snapshot.were_set, _UNKNOWN_W)

    async def close(self) -> None:
        """Stop setting limits."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _limit_w(self, pp_rank: int, iteration_index: int) -> float | None:
        limits = [of_plan for apply_at, of_plan in self._sent if apply_at <= iteration_index]
        return limits[-1].get(pp_rank) if limits else None

    def _changes(self) -> dict[str, float | None]:
        return {uuid: limit for uuid, limit in self._wanted.items() if self._in_force.get(uuid) != limit}

    async def _set_all(self) -> None:
        try:
            while changes := self._changes():
                gpu_uuid, limit_w = next(iter(changes.items()))
                before_w, self._in_force[gpu_uuid] = self._in_force.get(gpu_uuid), limit_w
                now_w = await self.worker.lower_power_limit(self.audit.job_id, gpu_uuid, limit_w, self.owner)
                self.audit.record(
                    "limit",
                    f"policy {self.ranks.description.policy}",
                    "power limit of the plan",
                    gpu_uuid=gpu_uuid,
                    before=_limit_text(before_w),
                    after=f"{now_w:g} W",
                )
        except GpuError as error:
            if self.are_leased():
                self.handle(ControlLost(f"the power limit cannot be set: {error}"))
        finally:
            self._task = None


def _limit_text(limit_w: float | None) -> str:
    if limit_w is None:
        return "the limit from before the job"
    return "unknown" if limit_w == _UNKNOWN_W else f"{limit_w:g} W"
