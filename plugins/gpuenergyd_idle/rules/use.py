"""What a GPU is used for, from one reading of it: the only definition.

Values of a reading are up to 100 ms old on the cards that were measured. Utilization is the part of the driver's last
window in which a kernel ran, so a waiting kernel that spins counts as work. Copies without a kernel do not. An H200
that holds a context keeps 1,980 MHz and 126 to 130 W, as one that spins in one block, so neither clock nor power tells
both apart; they are recorded by use.
"""

from dataclasses import dataclass
from enum import StrEnum


class GpuUse(StrEnum):
    """What a GPU is used for."""

    JOB = "job"
    """The GPU works for a job that has joined."""
    OTHER_WORK = "other-work"
    """The GPU works for another program."""
    IDLE_CONTEXT = "idle-context"
    """Nothing runs, but a process holds a context."""
    IDLE_EMPTY = "idle-empty"
    """Nothing runs, and no process holds a context."""
    UNKNOWN = "unknown"
    """The driver reports no utilization, as with MIG, or no processes."""


USE_TEXTS = {
    GpuUse.JOB: "working for a job",
    GpuUse.OTHER_WORK: "working without a job",
    GpuUse.IDLE_CONTEXT: "idle with a context",
    GpuUse.IDLE_EMPTY: "idle without a context",
    GpuUse.UNKNOWN: "unknown",
}
WORKING = frozenset({GpuUse.JOB, GpuUse.OTHER_WORK})


@dataclass(frozen=True, slots=True)
class UseReading:
    """A reading of one GPU; None is unknown."""

    at_s: float
    """Host monotonic time."""
    utilization_ratio: float | None
    power_w: float | None
    sm_clock_mhz: int | None
    num_processes: int | None
    has_job: bool = False
    """Whether a rank of a job, or a lease, has the GPU."""
    is_in_long_pause: bool = False
    """Whether this job has announced a pause, and the clocks have been as found since then."""

    @property
    def is_of_job(self) -> bool:
        return self.has_job and not self.is_in_long_pause


def use_of(reading: UseReading) -> GpuUse:
    if reading.utilization_ratio is None:
        return GpuUse.UNKNOWN
    if reading.utilization_ratio > 0:
        return GpuUse.JOB if reading.has_job else GpuUse.OTHER_WORK
    if reading.num_processes is None:
        return GpuUse.UNKNOWN
    return GpuUse.IDLE_CONTEXT if reading.num_processes else GpuUse.IDLE_EMPTY
