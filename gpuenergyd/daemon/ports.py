"""What a running job needs of the daemon around it; its own tests put fakes here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import Event
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.core.policy_api.previous_run import PreviousRun
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.processes.carbon_queries import TargetQuery, TargetReply
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.gpu.link.messages import GpuSnapshot, LeaseOwner
from gpuenergyd.gpu.restore.executor import RestoreOutcome
from gpuenergyd.store.records import Record


class WorkerPort(Protocol):
    """The GPU worker, whichever process that is now."""

    async def lease(
        self, lease_id: str, gpu_uuids: Sequence[str], owner: LeaseOwner, pidfds: Sequence[int] = ()
    ) -> None:
        """Get the right to change GPUs.

        Raises:
            GpuError: refused, or no worker.
        """
        ...

    async def restore(self, gpu_uuids: Sequence[str], reason: str) -> tuple[RestoreOutcome, ...]:
        """Put GPUs back and end their leases.

        Raises:
            GpuError: no worker; one that died is restored after by the next.
        """
        ...

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request a clock of a leased GPU; returns at once."""
        ...


class LimitingWorkerPort(WorkerPort, Protocol):
    """A worker that can limit power too: jobs never ask for that, administrators do."""

    async def set_power_limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        """Set a power limit under a lease, and return the limit that was read back.

        Raises:
            GpuError: refused, or no worker.
        """
        ...


class AskableWorker(Protocol):
    """A worker that answers questions about a GPU."""

    async def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of the processes that compute on a GPU.

        Raises:
            GpuError: the driver does not tell, or no worker.
        """
        ...

    async def snapshot(self, gpu_uuid: str) -> GpuSnapshot:
        """Return how a GPU is set and what it reads right now.

        Raises:
            GpuError: the driver does not tell, or no worker.
        """
        ...


class TargetPort(Protocol):
    """The policy host, asked what a job owes."""

    async def next_target(self, job_id: str, query: TargetQuery) -> TargetReply | PolicyFailure:
        """Return a target policy's decision for a job, or why there is none."""
        ...


class PolicyPort(Protocol):
    """The policy host."""

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        """Return the policy's plan, or why there is none."""
        ...

    async def preload(self, policy: str) -> None:
        """Get ready for a job that will ask a policy."""
        ...

    async def drop_job(self, job_id: str) -> None:
        """Drop the policy instance of a job."""
        ...


class HistoryPort(Protocol):
    """The history's writer."""

    def write(self, record: Record) -> None:
        """Take a record; never blocks, never raises."""
        ...


class RunningJob(Protocol):
    """A job in motion, as those see it who tell it what it owes."""

    @property
    def job(self) -> Job:
        """Its state."""
        ...

    @property
    def job_id(self) -> str:
        """Its id."""
        ...

    @property
    def pids(self) -> Mapping[int, int]:
        """The processes that are in it now, by rank."""
        ...

    def take(self, event: Event) -> None:
        """Give it an event."""
        ...


class ReplicasPort(Protocol):
    """The other replicas of a job's training."""

    def least_overhead_s(self, runner: RunningJob) -> float | None:
        """Return the least time that another replica spends outside its instructions, None while none is known."""
        ...

    def observed(self, runner: RunningJob) -> None:
        """Compare paces: an iteration of this one was observed."""
        ...


class IterationWatcher(Protocol):
    """Who wants to know what jobs use, and when."""

    def iteration_done(
        self, runner: RunningJob, observation: IterationObservation, purpose: PlanPurpose | None, begun_at: datetime
    ) -> None:
        """Take an observed iteration."""
        ...

    def job_ended(self, job_id: str) -> None:
        """Forget a job."""
        ...


class ModelPort(Protocol):
    """What earlier runs of jobs showed."""

    async def recall(self, signature: str) -> PreviousRun | None:
        """Return what the last run showed; None when nothing is known, or it cannot be read."""
        ...


@dataclass(frozen=True, slots=True)
class JobServices:
    """What every job of this daemon shares."""

    worker: WorkerPort
    policy: PolicyPort
    history: HistoryPort
    gpus: Gpus
    observation_limit_s: float
    """How long an iteration waits for the GPUs' energy counters to cover it."""
    is_observing: bool = False
    """Measure, never change a clock."""
    watcher: IterationWatcher | None = None
    models: ModelPort | None = None
