"""Description of a job, and its pipeline ranks with the schedule that their orders form."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gpuenergyd.core.carbon.slowdown_account import JobLength
from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, Schedule, dependency_graph
from gpuenergyd.core.pipeline.schedules import sent_after, stage_of_chunk
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import GpuEnergyError, JobError


class OptionSource(StrEnum):
    """Where the policy or the permitted slowdown of a job comes from, in order of precedence."""

    ARGUMENT = "argument"
    ENVIRONMENT = "environment"
    DAEMON = "daemon"


SOURCE_TEXTS: Mapping[str, str] = {
    OptionSource.ARGUMENT: "set by the program",
    OptionSource.ENVIRONMENT: "from the environment",
    OptionSource.DAEMON: "the daemon's default",
}


@dataclass(frozen=True, slots=True)
class JobDescription:
    """The properties of a job that its first rank registered with."""

    job_id: str
    job_name: str
    num_pp_ranks: int
    schedule_name: str
    num_microbatches: int
    num_chunks: int
    policy: str
    target: PerformanceTarget
    length: JobLength = field(default_factory=JobLength)
    num_dp_ranks: int = 1
    """Processes of a plain loop that end each iteration together; each one is a job of its own."""


@dataclass(slots=True)
class JobRanks:
    """The ranks that joined a job: their instruction orders, their GPUs and, once complete, the schedule."""

    description: JobDescription
    gpus: dict[int, GpuView] = field(default_factory=dict)
    """By pipeline rank."""
    orders: dict[int, tuple[Instruction, ...]] = field(default_factory=dict)
    schedule: Schedule | None = None
    """None until all ranks have joined."""
    _graph: DependencyGraph | None = None

    @property
    def graph(self) -> DependencyGraph:
        """The dependency graph of the schedule, without latencies."""
        assert self._graph is not None
        return self._graph

    @property
    def is_plain_loop(self) -> bool:
        """Whether the job has a single rank that runs one instruction per iteration: a loop without a pipeline."""
        return self.description.num_pp_ranks == 1 and [len(order) for order in self.orders.values()] == [1]

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs, by pipeline rank."""
        return tuple(self.gpus[r].gpu_uuid for r in sorted(self.gpus))

    @property
    def supported_sm_clocks_mhz(self) -> list[tuple[int, ...]]:
        """The clocks of each rank's GPU, by pipeline rank."""
        return [self.gpus[r].supported_sm_clocks_mhz for r in sorted(self.gpus)]

    def join(self, pp_rank: int, order: tuple[Instruction, ...], gpu: GpuView) -> bool:
        """Add a rank; return whether all ranks have joined now.

        Raises:
            JobError: there is no such rank, it has joined already, or the orders of all ranks deadlock.
        """
        description = self.description
        if not 0 <= pp_rank < description.num_pp_ranks:
            raise JobError(f"rank {pp_rank}: job {description.job_name!r} has {description.num_pp_ranks} ranks")
        if pp_rank in self.orders:
            raise JobError(f"rank {pp_rank} of job {description.job_name!r} is already registered")
        self.restore({**self.orders, pp_rank: order}, {**self.gpus, pp_rank: gpu})
        return self.schedule is not None

    def restore(self, orders: Mapping[int, tuple[Instruction, ...]], gpus: Mapping[int, GpuView]) -> None:
        """Replace all ranks.

        Raises:
            JobError: the orders of all ranks deadlock; nothing is replaced.
        """
        if len(orders) == self.description.num_pp_ranks:
            self.schedule, self._graph = _schedule_of(self.description, orders)
        self.orders, self.gpus = dict(orders), dict(gpus)

    def update_gpu(self, pp_rank: int, gpu: GpuView) -> None:
        """Replace the view of a rank's GPU; a rank that has not joined is ignored."""
        if pp_rank in self.gpus:
            self.gpus[pp_rank] = gpu


def _schedule_of(
    description: JobDescription, orders: Mapping[int, tuple[Instruction, ...]]
) -> tuple[Schedule, DependencyGraph]:
    schedule = Schedule(
        name=description.schedule_name,
        num_microbatches=description.num_microbatches,
        orders=tuple(orders[r] for r in range(description.num_pp_ranks)),
        num_chunks=description.num_chunks,
        stage_of_chunk=stage_of_chunk(description.schedule_name, description.num_pp_ranks),
    )
    schedule = replace(schedule, sent_after=sent_after(schedule))
    try:
        return schedule, dependency_graph(schedule)
    except GpuEnergyError as error:
        raise JobError(f"the ranks' orders do not fit together: {error}") from None
