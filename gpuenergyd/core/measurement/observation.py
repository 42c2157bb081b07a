"""Observation of one iteration: instruction times by clock, and the energy of each GPU.

Intervals come from the training processes, clocks and energy from the GPU worker; both use the host's monotonic clock.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind


@dataclass(frozen=True, slots=True)
class ClockShare:
    """Time of an instruction at one clock; an instruction with a clock change has several shares."""

    sm_clock_mhz: int
    time_s: float


@dataclass(frozen=True, slots=True)
class InstructionSample:
    """Mean time that instructions of one class spent at each clock, within one iteration and with the same main clock.

    With r(f) = 1 / t(f) the speed at clock f, sum(share.time_s * r(share.sm_clock_mhz)) = 1 for each instruction, hence
    for their mean. Instructions with a clock change are therefore usable as samples.
    """

    pp_rank: int
    kind: InstructionKind
    shares: tuple[ClockShare, ...]
    count: int
    chunk_index: int = 0
    num_calls: float = 0.0
    """Mean number of driver calls to set the GPU's clock that began during one of these instructions."""

    @property
    def time_s(self) -> float:
        """Mean duration."""
        return sum(share.time_s for share in self.shares)

    @property
    def instruction_class(self) -> InstructionClass:
        """Class of these instructions."""
        return InstructionClass(self.pp_rank, self.kind, self.chunk_index)

    @property
    def main_share(self) -> ClockShare:
        """Share with the longest time."""
        return max(self.shares, key=lambda share: share.time_s)


@dataclass(frozen=True, slots=True)
class CallSample:
    """Median times before and after a clock change, for instructions during which one driver call began.

    Such instructions take longer than the two clocks explain, which gives the cost of a call. If a clock took effect
    only after the instruction ended, `after` is zero time at the clock before.
    """

    instruction_class: InstructionClass
    before: ClockShare
    after: ClockShare
    count: int


@dataclass(frozen=True, slots=True)
class TimeAtClock:
    """Time of one kind of instruction (None: waiting) at one clock within an energy window."""

    kind: InstructionKind | None
    sm_clock_mhz: int
    time_s: float
    chunk_index: int = 0


@dataclass(frozen=True, slots=True)
class CapReadings:
    """Readings of a GPU's SM clock, and of those the ones at which its power limit held the clock."""

    num: int
    num_capped: int
    capped_sm_clock_mhz: float
    """Mean clock of the readings at the limit; 0 without any."""


@dataclass(frozen=True, slots=True)
class RankEnergy:
    """Energy of one rank's GPU in one iteration, from its energy counter; `energy_j` is None if not measured.

    `time_at` adds up to the window; it is empty if the times of instructions are unknown.
    """

    pp_rank: int
    window_s: float
    energy_j: float | None
    time_at: tuple[TimeAtClock, ...]
    counter_period_s: float | None = None
    """Time between two updates of the energy counter; None if unknown."""
    counter_phase: float | None = None
    """Share of that period elapsed when the iteration began, from 0 to 1; None if unknown."""
    energy_range_j: tuple[float, float] | None = None
    """Range that contains the true energy with 95 % probability; None if unknown."""
    is_energy_estimated: bool = False
    """Whether the iteration was shorter than the counter's reading interval, so that its energy was apportioned."""
    cap: CapReadings | None = None
    """Readings of the clock in this time; None without any."""


@dataclass(frozen=True)
class IterationObservation:
    """One complete iteration of all ranks.

    `plan_id` is None if the ranks did not all follow the same plan. `is_regular` is False if the iteration was
    disturbed (warm-up, a changed order, a missing report).
    """

    iteration_index: int
    plan_id: str | None
    iteration_time_s: float
    instruction_samples: tuple[InstructionSample, ...]
    ranks: tuple[RankEnergy, ...]
    is_regular: bool = True
    communication_latency_s: float | None = None
    """Median time from the end of an instruction to the start of a waiting instruction on another rank."""
    launch_gap_s: float | None = None
    """Median time between two instructions of one rank, if the second one's input was ready."""
    turnarounds_s: tuple[float | None, ...] = ()
    """For each rank, time from the end of its last instruction to the start of its next step; None if not observed."""
    lead_s: float | None = None
    """Time from the start of the step on rank 0 to its first instruction."""
    busy_s: float | None = None
    """Iteration time of the instructions alone, without waits for other replicas; None for a job without replicas."""
    waited_s: float = 0.0
    """Time that the job waited for other replicas of its training."""
    is_at_straggler_pace: bool = False
    """Whether a slower replica set the iteration time, which then does not characterise the job itself."""
    call_samples: tuple[CallSample, ...] = ()
    """Samples of instructions during which a clock was set."""
    is_timed: bool = True
    """Whether its instructions were timed; if not, only its time and energy are known."""
    num_tokens: int | None = None
    """Tokens that the job processed in it; None if the program does not say."""

    @property
    def is_own(self) -> bool:
        """Whether the iteration time is the job's own: regular, and not at straggler pace."""
        return self.is_regular and not self.is_at_straggler_pace

    @property
    def own_time_s(self) -> float:
        """Iteration time without waits for other replicas."""
        return self.iteration_time_s - self.waited_s

    @property
    def estimated_range_j(self) -> tuple[float, float] | None:
        """95 % interval of the energy, for independent errors of the ranks; None if no rank's energy is estimated."""
        energy_j, is_estimated = self.energy_j, any(rank.is_energy_estimated for rank in self.ranks)
        if energy_j is None or not is_estimated:
            return None
        known = [(rank.energy_j or 0.0, *(rank.energy_range_j or (rank.energy_j or 0.0,) * 2)) for rank in self.ranks]
        low_j = energy_j - math.hypot(*(own_j - low_j for own_j, low_j, _ in known))
        return low_j, energy_j + math.hypot(*(high_j - own_j for own_j, _, high_j in known))

    @cached_property
    def energy_j(self) -> float | None:
        """Energy of all ranks; None if any is missing."""
        total_j = 0.0
        for rank in self.ranks:
            if rank.energy_j is None:
                return None
            total_j += rank.energy_j
        return total_j if self.ranks else None
