"""What a job is, as its first rank declared it, and how the orders of all its ranks make one schedule."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gpuenergyd.core.carbon.slowdown_account import JobLength
from gpuenergyd.core.pipeline.graph import Instruction, Schedule, dependency_graph
from gpuenergyd.core.pipeline.schedules import sent_after, stage_of_chunk
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import GpuEnergyError, JobError


@dataclass(frozen=True, slots=True)
class JobDescription:
    """What a job is, as its first rank declared it."""

    job_id: str
    job_name: str
    num_pp_ranks: int
    schedule_name: str
    num_microbatches: int
    num_chunks: int
    policy: str
    target: PerformanceTarget
    length: JobLength = field(default_factory=JobLength)

    def schedule_of(self, orders: Mapping[int, tuple[Instruction, ...]]) -> Schedule:
        """Return the schedule that all ranks' orders make.

        Raises:
            JobError: they wait for each other, or for what nobody runs.
        """
        schedule = Schedule(
            name=self.schedule_name,
            num_microbatches=self.num_microbatches,
            orders=tuple(orders[r] for r in range(self.num_pp_ranks)),
            num_chunks=self.num_chunks,
            stage_of_chunk=stage_of_chunk(self.schedule_name, self.num_pp_ranks),
        )
        schedule = replace(schedule, sent_after=sent_after(schedule))
        try:
            dependency_graph(schedule)
        except GpuEnergyError as error:
            raise JobError(f"the ranks' orders do not fit together: {error}") from None
        return schedule
