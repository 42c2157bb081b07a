"""Protocols of the services that a running job uses, and of the ports of its command executor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.core.job.job import Job
from gpuenergyd.core.job.messages import (
    EndJob,
    Event,
    LeaseGpus,
    ObserveIteration,
    RecordIteration,
    RecordNotice,
    RecordPhase,
    RestoreGpus,
    SendPlan,
    StoreCurves,
    StoreOrderRefusal,
)
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.processes.carbon_queries import TargetQuery, TargetReply
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.processes.power_queries import PowerQuery, PowerReply
from gpuenergyd.gpu.device import GpuIdentity
from gpuenergyd.gpu.link.messages import GpuSnapshot, LeaseOwner
from gpuenergyd.gpu.restore.executor import RestoreOutcome
from gpuenergyd.store.records import Record


class WorkerPort(Protocol):
    """The GPU worker process, as jobs use it."""

    async def lease(
        self,
        lease_id: str,
        gpu_uuids: Sequence[str],
        owner: LeaseOwner,
        pidfds: Sequence[int] = (),
        *,
        sets_clocks: bool = True,
    ) -> None:
        """Lease GPUs, which journals their state; without `sets_clocks` for power limits only.

        Raises:
            GpuError: the lease is refused, or there is no worker.
        """
        ...

    async def restore(self, gpu_uuids: Sequence[str], reason: str) -> tuple[RestoreOutcome, ...]:
        """Restore the original state of GPUs and end their leases.

        Raises:
            GpuError: there is no worker; the next one restores what its predecessor left.
        """
        ...

    async def lower_power_limit(
        self, lease_id: str, gpu_uuid: str, power_limit_w: float | None, owner: LeaseOwner
    ) -> float:
        """Lower a power limit under a lease, or return to the one before it (None); return the limit read back.

        Raises:
            GpuError: the limit is refused, or there is no worker.
        """
        ...

    async def set_power_profile(
        self, lease_id: str, gpu_uuid: str, power_profile: int | None, owner: LeaseOwner
    ) -> tuple[int, ...]:
        """Add a workload power profile under a lease, or remove ours (None); return the requested ones read back.

        Raises:
            GpuError: another program has requested profiles, the profile is refused, or there is no worker.
        """
        ...

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Request a clock of a leased GPU; returns at once."""
        ...


class LimitingWorkerPort(WorkerPort, Protocol):
    """A GPU worker that can also set any power limit, which only administrators and Zeus clients request."""

    async def set_power_limit(self, lease_id: str, gpu_uuid: str, power_limit_w: float, owner: LeaseOwner) -> float:
        """Set a power limit under a lease, and return the limit that was read back.

        Raises:
            GpuError: the limit is refused, or there is no worker.
        """
        ...


class GpuQueryPort(Protocol):
    """The GPU worker process, as a source of readings."""

    async def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of the processes that compute on a GPU.

        Raises:
            GpuError: the driver does not report them, or there is no worker.
        """
        ...

    async def snapshot(self, gpu_uuid: str) -> GpuSnapshot:
        """Return the present settings and readings of a GPU.

        Raises:
            GpuError: the driver does not report them, or there is no worker.
        """
        ...


class MaintenancePort(GpuQueryPort, Protocol):
    """The GPU worker process, as the holder of driver handles."""

    async def release_gpus(self, gpu_uuids: Sequence[str], reason: str) -> None:
        """Restore GPUs, end their leases and let go of their driver handles.

        Raises:
            GpuError: a driver call for one of them does not return, or there is no worker.
        """
        ...

    async def reopen_gpus(self, gpu_uuids: Sequence[str]) -> tuple[GpuIdentity, ...]:
        """Open released GPUs again; return their identities, which may have changed.

        Raises:
            GpuError: the driver or a GPU is not there, or there is no worker.
        """
        ...


class TargetPort(Protocol):
    """The policy host, as a source of performance targets."""

    async def next_target(self, job_id: str, query: TargetQuery) -> TargetReply | PolicyFailure:
        """Return a target policy's decision for a job, or the reason of its failure."""
        ...


class PowerPort(Protocol):
    """The policy host, as a source of shares of a power budget."""

    async def divide_power(self, query: PowerQuery) -> PowerReply | PolicyFailure:
        """Return a budget divided among jobs, or the reason of the failure."""
        ...


class PolicyPort(Protocol):
    """The policy host, as a source of clock plans."""

    @property
    def activity(self) -> str | None:
        """What it does before it answers, such as compiling; None while there is nothing to report."""
        ...

    async def next_plan(self, job_id: str, policy: str, view: JobView) -> ClockPlan | PolicyFailure:
        """Return the policy's plan, or the reason of its failure."""
        ...

    async def preload(self, policy: str) -> str | None:
        """Load a policy before a job needs it; return why that failed."""
        ...

    async def drop_job(self, job_id: str) -> None:
        """Drop the policy instance of a job."""
        ...


class HistoryPort(Protocol):
    """The writer of the history database."""

    def write(self, record: Record) -> None:
        """Queue a record; never blocks, never raises."""
        ...


class RunningJob(Protocol):
    """A running job, as the carbon service and the other replicas of its training see it."""

    @property
    def job(self) -> Job:
        """The state machine of the job; read only, events change it."""
        ...

    @property
    def job_id(self) -> str:
        """The job's id."""
        ...

    @property
    def pids(self) -> Mapping[int, int]:
        """The pids of its registered processes, by rank."""
        ...

    @property
    def carbon_zones(self) -> frozenset[str]:
        """Zones of carbon intensities that other hosts of the job have reported."""
        ...

    def handle(self, event: Event) -> None:
        """Pass an event to the state machine and queue its commands."""
        ...


class ReplicasPort(Protocol):
    """The other replicas of a job's training."""

    def least_overhead_s(self, runner: RunningJob) -> float | None:
        """Return the least time that another replica spends outside its instructions; None while none is known."""
        ...

    def has_replicas(self, job_id: str) -> bool:
        """Return whether the training of a job has other replicas."""
        ...

    def compare_pace(self, runner: RunningJob) -> None:
        """Compare the pace of a job with the other replicas after an iteration."""
        ...

    def block_begins(self, runner: RunningJob, apply_at_iteration: int) -> None:
        """Have the other replicas run at full speed in the same iterations as this one."""
        ...


class IterationWatcher(Protocol):
    """A listener for the iterations of all jobs: the carbon service."""

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

    def follow(self, runner: RunningJob, target: PerformanceTarget | None, reason: str = "") -> None:
        """Let a job have the target that is decided for its training elsewhere; None: decide its targets here again."""
        ...

    def charge_others(self, runner: RunningJob, excess_s: float) -> None:
        """Charge a job's account with what plans of its training's other replicas have cost so far."""
        ...

    def plan_excess_s(self, runner: RunningJob) -> float:
        """Return the time beyond full speed that a job's own plans have cost so far."""
        ...


class PastJobPort(Protocol):
    """The store of what jobs left."""

    async def recall(self, uid: int, gpu_model_name: str) -> tuple[PastJob, ...]:
        """Return past jobs of a user on a GPU model, and imported ones, newest first; empty if they cannot be read."""
        ...

    async def order_refusal(self, signature: str) -> str | None:
        """Return why jobs with a signature must not run another order; None if they may, or it cannot be read."""
        ...


# --- ports of the command executor: one per command ---


class ObservationPort(Protocol):
    """Matches reported iterations with the GPUs' samples."""

    def observe(self, command: ObserveIteration) -> None:
        """Observe an iteration once the GPUs' samples cover it; the result is the event `IterationObserved`."""
        ...


class PlanSource(Protocol):
    """Decides the plans of a job: the policy host, or the leader of a pipeline across hosts."""

    def ask(self, view: JobView) -> None:
        """Ask for a plan; the answer arrives as the event `PlanDecided` or `PolicyFailed`, at once or later."""
        ...


class DeliveryPort(Protocol):
    """Delivers plans to the ranks."""

    def send(self, command: SendPlan) -> None:
        """Queue a plan for all ranks."""
        ...


class PlanSettingPort(Protocol):
    """A GPU setting of a job's plans that the daemon sets, such as power limits."""

    def send(self, command: SendPlan) -> None:
        """Add a plan that ranks follow from its first iteration on."""
        ...


class LeasePort(Protocol):
    """The GPU leases of a job."""

    async def lease(self, command: LeaseGpus) -> None:
        """Lease GPUs; a refusal arrives as the event `ControlLost`."""
        ...

    async def restore(self, command: RestoreGpus) -> None:
        """Restore GPUs and end their leases."""
        ...


class IterationPort(Protocol):
    """Records iterations."""

    def record(self, command: RecordIteration) -> None:
        """Record an iteration."""
        ...


class AuditPort(Protocol):
    """Records what changes the control of a job."""

    def record_phase(self, command: RecordPhase) -> None:
        """Record that the job entered a phase."""
        ...

    def record_notice(self, command: RecordNotice) -> None:
        """Record an event that the phase does not show."""
        ...


class RunStorePort(Protocol):
    """What a job gets from earlier ones, and what it leaves for later ones."""

    async def recall(self) -> None:
        """Look it up; what is found arrives as the events `PastJobsFound` and `OrdersRefused`."""
        ...

    def store_refusal(self, command: StoreOrderRefusal) -> None:
        """Remember that no later run may run another order of instructions."""
        ...

    def store_curves(self, command: StoreCurves) -> None:
        """Store what this job has shown of its curves."""
        ...


class EndPort(Protocol):
    """Finishes a job."""

    async def end(self, command: EndJob) -> None:
        """Release everything that the job holds in the daemon."""
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
    """What plans of jobs may set."""
    watcher: IterationWatcher | None = None
    carbon_zone: str | None = None
    """Zone of this host's carbon intensities; None without any."""
    past_jobs: PastJobPort | None = None
