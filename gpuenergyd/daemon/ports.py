"""Protocols of the services that a running job uses: each has several implementations or separates two packages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import Event
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.gpu.link.messages import Command, ReplyT
from gpuenergyd.store.records import Record


class WorkerPort(Protocol):
    """The GPU worker process."""

    async def do(self, command: Command[ReplyT], pidfds: Sequence[int] = ()) -> ReplyT:
        """Have the worker execute a command; the pidfds are those of a lease's processes.

        Raises:
            GpuError: the worker refuses, a driver call fails, or there is no worker; the next one restores what its
                predecessor left.
        """
        ...

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request a clock of a leased GPU; returns at once."""
        ...


class PolicyPort(Protocol):
    """The policy host, as a source of clock plans."""

    @property
    def activity(self) -> str | None:
        """What delays its answer, such as compiling; None if nothing does."""
        ...

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        """Return the policy's plan, or the reason of its failure."""
        ...

    async def preload(self, policy: str) -> str | None:
        """Load a policy before a job needs it; return why that failed."""
        ...

    async def drop_job(self, job_id: str) -> None: ...


class HistoryPort(Protocol):
    """The writer of the history database."""

    def write(self, record: Record) -> None:
        """Queue a record; never blocks, never raises."""
        ...


class RunningJob(Protocol):
    """A running job as seen by the carbon service and by the other replicas of its training."""

    @property
    def job(self) -> Job:
        """The state machine of the job; read-only, since only events change it."""
        ...

    @property
    def job_id(self) -> str: ...

    @property
    def pids(self) -> Mapping[int, int]:
        """The pids of its registered processes, by rank."""
        ...

    @property
    def carbon_zones(self) -> frozenset[str]:
        """Carbon-intensity zones that other hosts of the job have reported."""
        ...

    def handle(self, event: Event) -> None:
        """Pass an event to the state machine and queue its commands."""
        ...


class PipelinesPort(Protocol):
    """The pipelines across hosts that a rank of this host leads: each is one job for operators and services."""

    def leader(self, job_id: str) -> RunningJob | None:
        """Return the pipeline that a job of this host leads; None for any other job."""
        ...

    def status(self, job_id: str) -> Mapping[str, Any]:
        """Return the fields `pipeline` and `pipeline_refusal` of a job's status."""
        ...


class ReplicasPort(Protocol):
    """The other replicas of a job's training."""

    def least_overhead_s(self, runner: RunningJob) -> float | None:
        """Return the shortest time that another replica spends outside its instructions; None while unknown."""
        ...

    def has_replicas(self, job_id: str) -> bool:
        """Return whether the training of a job has other replicas."""
        ...

    def compare_pace(self, runner: RunningJob) -> None:
        """Compare the pace of a job with the other replicas after an iteration."""
        ...

    def block_begins(self, runner: RunningJob, apply_at_iteration: int) -> None:
        """Have the other replicas run the same iterations at full speed as this one."""
        ...


class IterationWatcher(Protocol):
    """Decides the iteration times permitted to all jobs, and hears of their iterations: the carbon service."""

    def iteration_done(
        self, runner: RunningJob, observation: IterationObservation, purpose: PlanPurpose | None, begun_at: datetime
    ) -> None:
        """Handle an observed iteration."""
        ...

    def target_posted(self, runner: RunningJob, *, num_members: int) -> None:
        """Record the target that a member of a pipeline across hosts got from its leader.

        `num_members` is the number of members on this host.
        """
        ...

    def job_ended(self, job_id: str) -> None:
        """Drop the state of a job."""
        ...

    def status(self, runner: RunningJob) -> Mapping[str, Any]:
        """Return the fields `target` and `carbon` of a job's status."""
        ...

    def follow(self, runner: RunningJob, target: PerformanceTarget | None, reason: str = "") -> None:
        """Give a job the target that another host has decided for its training; None: decide its targets here again."""
        ...

    def charge_others(self, runner: RunningJob, excess_s: float) -> None:
        """Charge a job's account with the total time that plans of its training's other replicas have cost."""
        ...

    def plan_excess_s(self, runner: RunningJob) -> float:
        """Return the time beyond full speed that a job's own plans have cost so far."""
        ...


class PastJobPort(Protocol):
    """The store of past jobs."""

    async def recall(self, uid: int, gpu_model_name: str) -> tuple[PastJob, ...]:
        """Return past jobs of a user on a GPU model, and imported ones, newest first; empty if they cannot be read."""
        ...

    async def order_refusal(self, signature: str) -> str | None:
        """Return why jobs with a signature must not be reordered; None if they may be, or if it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class JobServices:
    """The services that all jobs of this daemon share."""

    worker: WorkerPort
    policy: PolicyPort
    history: HistoryPort
    gpus: Gpus
    observation_limit_s: float
    """Time limit for the GPUs' energy counters to cover an iteration."""
    is_observing: bool = False
    """Whether the daemon only measures and never changes a clock."""
    levers: frozenset[Lever] = frozenset(Lever)
    """The kinds of settings that plans may change."""
    watcher: IterationWatcher | None = None
    carbon_zone: str | None = None
    """Carbon-intensity zone of this host; None if not configured."""
    past_jobs: PastJobPort | None = None
