"""What one iteration showed: how long instructions took at which clock, and what each GPU spent.

Intervals come from the training processes, clocks and energy from the GPU worker; both use the host's
monotonic clock, and they meet here. Pure functions: times are arguments.
"""

from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind


@dataclass(frozen=True, slots=True)
class ClockShare:
    """How much of an instruction ran at one clock; a clock change in mid-flight leaves several shares."""

    sm_clock_mhz: int
    time_s: float


@dataclass(frozen=True, slots=True)
class InstructionSample:
    """Instructions of one class in one iteration that ran mostly at one clock: their mean time, split by clock.

    With r(f) = 1 / t(f) the speed at clock f, sum(share.time_s * r(share.sm_clock_mhz)) = 1 for each instruction, hence
    for their mean: clock changes in mid-flight are data, not disturbance.
    """

    pp_rank: int
    kind: InstructionKind
    shares: tuple[ClockShare, ...]
    count: int
    chunk_index: int = 0

    @property
    def time_s(self) -> float:
        """Mean duration."""
        return sum(share.time_s for share in self.shares)

    @property
    def instruction_class(self) -> InstructionClass:
        """The class that these instructions are of."""
        return InstructionClass(self.pp_rank, self.kind, self.chunk_index)

    @property
    def main_share(self) -> ClockShare:
        """The clock at which most of it ran, and for how long."""
        return max(self.shares, key=lambda share: share.time_s)


@dataclass(frozen=True, slots=True)
class TimeAtClock:
    """How long a GPU ran one kind of instruction (None: waited) at one clock within an energy window."""

    kind: InstructionKind | None
    sm_clock_mhz: int
    time_s: float
    chunk_index: int = 0


@dataclass(frozen=True, slots=True)
class RankEnergy:
    """What one rank's GPU spent in one iteration, by its energy counter; `energy_j` None when it was not measured."""

    pp_rank: int
    window_s: float
    energy_j: float | None
    time_at: tuple[TimeAtClock, ...]


@dataclass(frozen=True, slots=True)
class IterationObservation:
    """One complete iteration, seen from all ranks.

    `plan_id` is None when the ranks did not all follow the same plan. `is_regular` is False when the iteration
    was disturbed (first ones, a changed order, a rank that reported nothing).
    """

    iteration_index: int
    plan_id: str | None
    iteration_time_s: float
    instruction_samples: tuple[InstructionSample, ...]
    ranks: tuple[RankEnergy, ...]
    is_regular: bool = True
    communication_latency_s: float | None = None
    """Median time from the end of an instruction to the begin of the one on another rank that waited for it."""
    launch_gap_s: float | None = None
    """Median time between two instructions of one rank when the second had everything it needs."""
    turnarounds_s: tuple[float | None, ...] = ()
    """By rank, from the end of its last instruction to its begin of the next step; None, or left out: not seen."""
    lead_s: float | None = None
    """From the begin of the step on rank 0 to its first instruction."""
    busy_s: float | None = None
    """What the instructions take one after another as the schedule orders them, waits for other replicas left out; None
    for a job that has none."""
    waited_s: float = 0.0
    """Time in which the job waited for other replicas of its training."""
    is_at_straggler_pace: bool = False
    """Whether a straggler among the replicas set the pace: no measure of what the job takes or saves by itself."""

    @property
    def is_own(self) -> bool:
        """Whether its time is the job's own: nothing else ran in it, and no straggler set its pace."""
        return self.is_regular and not self.is_at_straggler_pace

    @property
    def own_time_s(self) -> float:
        """What the iteration took without waiting for other replicas."""
        return self.iteration_time_s - self.waited_s

    @property
    def energy_j(self) -> float | None:
        """Energy of all ranks, None when any is missing: missing is never zero."""
        total_j = 0.0
        for rank in self.ranks:
            if rank.energy_j is None:
                return None
            total_j += rank.energy_j
        return total_j if self.ranks else None
