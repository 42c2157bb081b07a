"""GPU settings of a job's plans: a plan's settings are applied when the iteration before its first one ends.

Ranks request clocks themselves. The daemon sets power limits and workload power profiles, which stay constant during an
iteration. Settings of one kind in one job are applied one after another, and only the newest per GPU.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from gpuenergyd.core.job.description import JobRanks
from gpuenergyd.core.job.messages import ControlLost, Event, SendPlan
from gpuenergyd.core.measurement.telemetry import RankIteration
from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.daemon.jobs.audit_log import AuditLog
from gpuenergyd.daemon.ports import WorkerPort
from gpuenergyd.errors import GpuError
from gpuenergyd.gpu.link.messages import LeaseOwner, LowerPowerLimit, SetPowerProfile

_UNKNOWN = -1.0
"""Stands for an unknown value set by an earlier daemon; it differs from every value, so the setting is repeated."""


@dataclass(frozen=True, slots=True)
class PlanSettingSnapshot:
    """The plans whose settings are or will be in force: first iteration, and values by pipeline rank."""

    sent: tuple[tuple[int, dict[int, float]], ...] = ()
    were_set: tuple[str, ...] = ()
    """The GPUs whose setting was changed since the job's GPUs were leased."""


async def _set_power_limit(
    worker: WorkerPort, lease_id: str, gpu_uuid: str, value: float | None, owner: LeaseOwner
) -> str:
    reply = await worker.do(LowerPowerLimit(lease_id, gpu_uuid, value, owner))
    return f"{reply.power_limit_w:g} W"


async def _set_power_profile(
    worker: WorkerPort, lease_id: str, gpu_uuid: str, value: float | None, owner: LeaseOwner
) -> str:
    number = None if value is None else round(value)
    reply = await worker.do(SetPowerProfile(lease_id, gpu_uuid, number, owner))
    return f"requested: {', '.join(map(str, reply.requested)) or 'none'}"


@dataclass(frozen=True, slots=True)
class SettingKind:
    """A setting that plans may have."""

    action: str
    """Name of the action in the audit log."""
    name: str
    """Name of the kind of setting in errors and reasons."""
    unit: str
    before_job: str
    """The setting from before the job, in words."""
    of_plan: Callable[[ClockPlan], Iterable[tuple[int, float]]]
    """Returns the values of a plan by pipeline rank."""
    set: Callable[[WorkerPort, str, str, float | None, LeaseOwner], Awaitable[str]]
    """Sets a value under a lease, or with None restores the previous one; returns in words what was read back."""

    def text(self, value: float | None) -> str:
        """Return a value with its unit, or with None the words for the setting from before the job."""
        return self.before_job if value is None else f"{value:g}{self.unit}"


POWER_LIMITS = SettingKind(
    "limit",
    "power limit",
    unit=" W",
    before_job="the limit from before the job",
    of_plan=attrgetter("power_limits_w"),
    set=_set_power_limit,
)
POWER_PROFILES = SettingKind(
    "profile",
    "workload power profile",
    unit="",
    before_job="none of the job",
    of_plan=attrgetter("power_profiles"),
    set=_set_power_profile,
)


@dataclass(slots=True)
class JobSettings:
    """One job's settings of one kind; `are_leased` says whether they may be set now."""

    kind: SettingKind
    worker: WorkerPort
    ranks: JobRanks
    owner: LeaseOwner
    audit: AuditLog
    are_leased: Callable[[], bool]
    handle: Callable[[Event], None]
    _sent: list[tuple[int, dict[int, float]]] = field(default_factory=list)
    _begins: dict[int, int] = field(default_factory=dict)
    """The iteration that each rank runs now, by `JobDescription.rank_index`."""
    _wanted: dict[str, float | None] = field(default_factory=dict)
    _in_force: dict[str, float | None] = field(default_factory=dict)
    """The value set on each GPU; None or no entry if it is as before the job."""
    _task: asyncio.Task[None] | None = None

    def send(self, command: SendPlan) -> None:
        """Add a plan that ranks follow from `apply_at_iteration` on."""
        self._sent = [known for known in self._sent if known[0] < command.apply_at_iteration]
        self._sent.append((command.apply_at_iteration, dict(self.kind.of_plan(command.plan))))
        self.apply()

    def report(self, iteration: RankIteration) -> None:
        """Set the value of the iteration that a rank begins after the reported one."""
        index = self.ranks.description.rank_index(iteration.pp_rank, iteration.stage_rank)
        self._begins[index] = iteration.iteration_index + 1
        if any(values for _, values in self._sent) or self._in_force:
            self.apply()

    def apply(self) -> None:
        """Apply the values that should be in force now and are not set yet."""
        if not self.are_leased():
            return
        for index, begins in self._begins.items():
            gpu_uuid = self.ranks.own_gpus[index].gpu_uuid
            wanted = self._value(index // self.ranks.description.num_stage_ranks, begins)
            if wanted is not None or gpu_uuid in self._in_force or gpu_uuid in self._wanted:
                self._wanted[gpu_uuid] = wanted
        oldest = min(self._begins.values(), default=0)
        while len(self._sent) > 1 and self._sent[1][0] <= oldest:
            self._sent.pop(0)
        if self._task is None and self._changes():
            self._task = asyncio.create_task(self._set_all(), name=f"{self.kind.name}s of job {self.audit.job_id}")

    def forget(self) -> None:
        """Forget what is in force, because the GPUs were restored or the worker was lost."""
        self._wanted.clear()
        self._in_force.clear()

    def snapshot(self) -> PlanSettingSnapshot:
        """Return the state for the next daemon, which sets all values again."""
        return PlanSettingSnapshot(tuple(self._sent), tuple(self._in_force))

    def restore(self, snapshot: PlanSettingSnapshot) -> None:
        """Continue from the state of an earlier daemon."""
        self._sent = list(snapshot.sent)
        self._in_force = dict.fromkeys(snapshot.were_set, _UNKNOWN)

    async def close(self) -> None:
        """Stop setting values."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _value(self, pp_rank: int, iteration_index: int) -> float | None:
        values = [of_plan for apply_at, of_plan in self._sent if apply_at <= iteration_index]
        return values[-1].get(pp_rank) if values else None

    def _changes(self) -> dict[str, float | None]:
        return {uuid: value for uuid, value in self._wanted.items() if self._in_force.get(uuid) != value}

    async def _set_all(self) -> None:
        try:
            while changes := self._changes():
                gpu_uuid, value = next(iter(changes.items()))
                before, self._in_force[gpu_uuid] = self._in_force.get(gpu_uuid), value
                after = await self.kind.set(self.worker, self.audit.job_id, gpu_uuid, value, self.owner)
                self.audit.record(
                    self.kind.action,
                    f"policy {self.ranks.description.policy}",
                    f"{self.kind.name} of the plan",
                    gpu_uuid=gpu_uuid,
                    before="unknown" if before == _UNKNOWN else self.kind.text(before),
                    after=after,
                )
        except GpuError as error:
            if self.are_leased():
                self.handle(ControlLost(f"the {self.kind.name} cannot be set: {error}"))
        finally:
            self._task = None
