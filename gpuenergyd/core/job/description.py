"""Description of a job, and its pipeline ranks with the schedule formed by their instruction orders."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, Schedule, dependency_graph
from gpuenergyd.core.pipeline.reorder import Orders
from gpuenergyd.core.pipeline.schedules import stage_of_chunk, with_communication
from gpuenergyd.core.policy_api.policy import GpuView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError, JobError


@dataclass(frozen=True, slots=True)
class JobLength:
    """Length of a job as given by its owner: number of iterations, hours of training, or a deadline."""

    num_iterations: int | None = None
    hours: float | None = None
    """Hours of training at full speed."""
    deadline_at: datetime | None = None

    def total_iterations(self, full_speed_time_s: float) -> int | None:
        """Return the total number of iterations; None if unknown."""
        if self.num_iterations is not None:
            return self.num_iterations
        return None if self.hours is None else max(1, math.ceil(self.hours * 3600.0 / full_speed_time_s))


@dataclass(frozen=True, slots=True)
class JobDescription:
    """Properties of a job, as registered by its first rank."""

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
    """Number of processes of a plain loop that end each iteration together; each process is a job of its own."""
    dp_rank: int = 0
    """Index of the pipeline's replica; for a plain loop, index of the process."""
    num_stage_ranks: int = 1
    """Number of tensor-, context- and expert-parallel ranks of each stage, which follow one plan."""
    priority: int = 0
    """Position of the job in the operator's order of the host's jobs; 0 is highest."""

    @property
    def num_ranks(self) -> int:
        """Number of training processes of the job, each with its own GPU."""
        return self.num_pp_ranks * self.num_stage_ranks

    def rank_index(self, pp_rank: int, stage_rank: int) -> int:
        """Return the index of a rank among all ranks of the job, counted stage by stage."""
        return pp_rank * self.num_stage_ranks + stage_rank

    def rank_name(self, pp_rank: int, stage_rank: int) -> str:
        """Return the name of a rank in messages: its stage, and its index in the stage if the stage has several ranks.

        A rank of a plain loop is named after its process, because each process is a job of its own.
        """
        if self.num_dp_ranks > 1:
            return f"rank {self.dp_rank}"
        return f"rank {pp_rank}" if self.num_stage_ranks == 1 else f"rank {pp_rank}.{stage_rank}"


@dataclass(slots=True)
class JobRanks:
    """The ranks that joined a job: their instruction orders, their GPUs and, once complete, the schedule."""

    description: JobDescription
    own_gpus: dict[int, GpuView] = field(default_factory=dict)
    """The GPU of each rank, by `JobDescription.rank_index`."""
    gpus: dict[int, GpuView] = field(default_factory=dict)
    """The merged view of each stage's GPUs, by pipeline rank."""
    orders: dict[int, tuple[Instruction, ...]] = field(default_factory=dict)
    schedule: Schedule | None = None
    """None until all ranks have joined."""
    changed_ranks: dict[int, tuple[int, tuple[Instruction, ...]]] = field(default_factory=dict)
    """Number of microbatches and order of ranks that already run another schedule, until all do; by rank index."""
    _graph: DependencyGraph | None = None
    _planned: tuple[Orders, DependencyGraph] | None = None
    """The orders of the last plan that changed them, and their graph."""
    _waits: tuple[Mapping[int, tuple[Instruction, ...]], bool] | None = field(default=None, compare=False)
    """The orders last searched for waiting phases, and whether there were any."""

    @property
    def graph(self) -> DependencyGraph:
        """The dependency graph of the schedule, without latencies."""
        assert self._graph is not None
        return self._graph

    def graph_in(self, orders: Orders) -> DependencyGraph:
        """Return the dependency graph of a plan's orders; empty orders mean the registered ones."""
        if not orders:
            return self.graph
        if self._planned is None or self._planned[0] != orders:
            assert self.schedule is not None
            self._planned = orders, dependency_graph(replace(self.schedule, orders=orders))
        return self._planned[1]

    @property
    def is_plain_loop(self) -> bool:
        """Whether the job is a loop without a pipeline: one rank with one instruction per iteration."""
        return self.description.num_pp_ranks == 1 and [len(order) for order in self.orders.values()] == [1]

    @property
    def has_waits(self) -> bool:
        """Whether the job has phases that wait for gradients or data."""
        if self._waits is None or self._waits[0] is not self.orders:
            instructions = (instruction for order in self.orders.values() for instruction in order)
            self._waits = self.orders, any(instruction.kind.is_wait for instruction in instructions)
        return self._waits[1]

    @property
    def num_hosts(self) -> int:
        """Number of hosts with GPUs of the job."""
        return len({gpu.host for gpu in self.gpus.values()}) or 1

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        return tuple(self.own_gpus[index].gpu_uuid for index in sorted(self.own_gpus))

    @property
    def gpu_uuids_by_stage(self) -> dict[int, tuple[str, ...]]:
        """The UUIDs of each stage's GPUs, by pipeline rank."""
        by_stage: dict[int, tuple[str, ...]] = {}
        for index in sorted(self.own_gpus):
            pp_rank = index // self.description.num_stage_ranks
            by_stage[pp_rank] = (*by_stage.get(pp_rank, ()), self.own_gpus[index].gpu_uuid)
        return by_stage

    @property
    def supported_sm_clocks_mhz(self) -> list[tuple[int, ...]]:
        """The clocks of each stage, by pipeline rank."""
        return [self.gpus[r].supported_sm_clocks_mhz for r in sorted(self.gpus)]

    @property
    def power_limit_ranges_w(self) -> list[tuple[float, float] | None]:
        """The range of power limits of each stage's GPUs, by pipeline rank."""
        return [self.gpus[r].power_limit_range_w for r in sorted(self.gpus)]

    @property
    def power_profiles(self) -> list[tuple[int, ...]]:
        """The workload power profiles that each stage's GPUs offer, by pipeline rank."""
        return [self.gpus[r].power_profiles for r in sorted(self.gpus)]

    def join(self, pp_rank: int, order: tuple[Instruction, ...], gpu: GpuView, *, stage_rank: int = 0) -> bool:
        """Add a rank; return whether all ranks have joined now.

        Raises:
            JobError: there is no such rank, it has joined already, it does not fit the other ranks of its stage, or the
                orders of all ranks deadlock.
        """
        description, job_name = self.description, self.description.job_name
        name = description.rank_name(pp_rank, stage_rank)
        if not 0 <= pp_rank < description.num_pp_ranks:
            raise JobError(f"{name}: job {job_name!r} has {count_text(description.num_pp_ranks, 'rank')}")
        if not 0 <= stage_rank < description.num_stage_ranks:
            raise JobError(
                f"{name}: each stage of job {job_name!r} has {count_text(description.num_stage_ranks, 'rank')}"
            )
        index = description.rank_index(pp_rank, stage_rank)
        if index in self.own_gpus:
            raise JobError(f"{name} of job {job_name!r} is already registered")
        if self.orders.get(pp_rank, order) != order:
            raise JobError(f"{name} of job {job_name!r} runs other instructions than another rank of its stage")
        self.restore({**self.orders, pp_rank: order}, {**self.own_gpus, index: gpu})
        return self.schedule is not None

    def restore(self, orders: Mapping[int, tuple[Instruction, ...]], own_gpus: Mapping[int, GpuView]) -> None:
        """Replace all ranks; `own_gpus` holds the GPU of each rank by `JobDescription.rank_index`.

        Raises:
            JobError: the GPUs of a stage do not fit together, or the orders of all ranks deadlock; nothing is replaced.
        """
        gpus = {pp_rank: self._stage_gpu(pp_rank, own_gpus) for pp_rank in orders}
        if len(own_gpus) == self.description.num_ranks:
            self.schedule, self._graph = _schedule_of(self.description, orders)
        self.orders, self.own_gpus, self.gpus = dict(orders), dict(own_gpus), gpus

    def change_microbatches(
        self, pp_rank: int, order: tuple[Instruction, ...], num_microbatches: int, *, stage_rank: int = 0
    ) -> bool:
        """Record a rank's new number of microbatches; return whether the schedule was replaced as all ranks agree.

        Raises:
            JobError: the rank has not joined, it does not fit the other ranks of its stage, or the orders of all ranks
                deadlock.
        """
        index = self.description.rank_index(pp_rank, stage_rank)
        if index not in self.own_gpus:
            name = self.description.rank_name(pp_rank, stage_rank)
            raise JobError(f"{name} of job {self.description.job_name!r} is not registered")
        changed_ranks = {**self.changed_ranks, index: (num_microbatches, order)}
        if (
            len(changed_ranks) == self.description.num_ranks
            and len({number for number, _ in changed_ranks.values()}) == 1
        ):
            self._replace_schedule({rank: new for rank, (_, new) in sorted(changed_ranks.items())}, num_microbatches)
            changed_ranks = {}
        self.changed_ranks = changed_ranks
        return not changed_ranks

    def _replace_schedule(self, own_orders: Mapping[int, tuple[Instruction, ...]], num_microbatches: int) -> None:
        orders: dict[int, tuple[Instruction, ...]] = {}
        for index, order in own_orders.items():
            pp_rank, stage_rank = divmod(index, self.description.num_stage_ranks)
            if orders.setdefault(pp_rank, order) != order:
                what = f"{self.description.rank_name(pp_rank, stage_rank)} of job {self.description.job_name!r}"
                raise JobError(f"{what} runs other instructions than another rank of its stage")
        description = replace(self.description, num_microbatches=num_microbatches)
        self.schedule, self._graph = _schedule_of(description, orders)
        self.description, self.orders = description, orders

    def update_gpu(self, pp_rank: int, gpu: GpuView, *, stage_rank: int = 0) -> None:
        """Replace the view of a rank's GPU; a rank that has not joined is ignored."""
        index = self.description.rank_index(pp_rank, stage_rank)
        if index in self.own_gpus:
            self.own_gpus[index] = gpu
            self.gpus[pp_rank] = self._stage_gpu(pp_rank, self.own_gpus)

    def _stage_gpu(self, pp_rank: int, own_gpus: Mapping[int, GpuView]) -> GpuView:
        num_stage_ranks = self.description.num_stage_ranks
        return stage_gpu(pp_rank, [own_gpus[i] for i in sorted(own_gpus) if i // num_stage_ranks == pp_rank])


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
    schedule = with_communication(schedule)
    try:
        return schedule, dependency_graph(schedule)
    except GpuEnergyError as error:
        raise JobError(f"the ranks' orders do not fit together: {error}") from None


def stage_gpu(pp_rank: int, gpus: Sequence[GpuView]) -> GpuView:
    """Merge a stage's GPUs: common clocks, limits and profiles, the slowest clock changes, the sum of powers.

    Merged GPUs can be merged again. UUID and model name are those of the first GPU.

    Raises:
        JobError: the GPUs are on several hosts, or have no clock in common.
    """
    first = gpus[0]
    if len(gpus) == 1:
        return first
    hosts = sorted({gpu.host for gpu in gpus})
    if len(hosts) > 1:
        raise JobError(
            f"the ranks of pipeline stage {pp_rank} are on {count_text(len(hosts), 'host')}: all tensor-, context- and"
            " expert-parallel ranks of a stage must be on one host"
        )
    common_mhz = set(first.supported_sm_clocks_mhz).intersection(*(gpu.supported_sm_clocks_mhz for gpu in gpus))
    if not common_mhz:
        raise JobError(f"the GPUs of pipeline rank {pp_rank} have no clock in common")
    slowest = max(gpus, key=lambda gpu: gpu.switch_latency_s)
    ranges_w = [gpu.power_limit_range_w for gpu in gpus if gpu.power_limit_range_w is not None]
    common_w = (max(low for low, _ in ranges_w), min(high for _, high in ranges_w)) if ranges_w else None
    powers_w = [gpu.blocking_power_w for gpu in gpus if gpu.blocking_power_w is not None]
    return replace(
        first,
        supported_sm_clocks_mhz=tuple(sorted(common_mhz, reverse=True)),
        switch_latency_s=slowest.switch_latency_s,
        switching=slowest.switching,
        blocking_power_w=sum(powers_w) if len(powers_w) == len(gpus) else None,
        num_gpus=sum(gpu.num_gpus for gpu in gpus),
        num_host_gpus=max(gpu.num_host_gpus for gpu in gpus),
        power_limit_range_w=common_w if len(ranges_w) == len(gpus) and common_w and common_w[0] < common_w[1] else None,
        power_profiles=tuple(sorted(set(first.power_profiles).intersection(*(gpu.power_profiles for gpu in gpus)))),
        foreign_power_profiles=tuple(sorted({number for gpu in gpus for number in gpu.foreign_power_profiles})),
    )
