"""Clock histories and energy counters of GPUs, and the time spans of an iteration that ranks report.

Instants are integer nanoseconds of the host's monotonic clock, passed as arguments; no function here reads a clock.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean
from typing import Protocol

from gpuenergyd.core.measurement.observation import CapReadings
from gpuenergyd.core.measurement.power_shape import Gap, GapShape, PowerReadings, error_range
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind
from gpuenergyd.core.pipeline.reorder import RankMemory

ClockIntervals = Sequence[tuple[int, int]]
"""Pairs (clock in MHz, duration in ns) in chronological order."""

_NS_PER_S = 1e9
_IMPOSSIBLE_RATIO = 1.5
"""Ratio by which a GPU may exceed its power limit for a moment, as for power readings."""
_STEP_S = 1.0
_CREDIT_S = 0.25
_EDGES_AROUND = 10
"""Number of updates on either side of an instant used to find the counter's period."""
_SPARSE_NS, _SHAPED_NS = 250_000_000, 150_000_000
"""Updates further apart than the first show no period; than the second, power distributes the energy between them."""
_GAPS_AROUND = 4
"""Number of neighbouring gaps on either side used to decide whether power readings are informative."""


class ClockRecord(Protocol):
    """Effective clock over time and the driver calls that set it, for one GPU or a stage's GPUs."""

    def clocks_between(self, begin_ns: int, end_ns: int) -> ClockIntervals:
        """Return the clocks over an interval and how long each was effective."""
        ...

    def num_calls_between(self, begin_ns: int, end_ns: int) -> int:
        """Return how many driver calls began in an interval, its start included."""
        ...

    def cap_between(self, begin_ns: int, end_ns: int) -> CapReadings | None:
        """Return the readings of the clock in an interval; None without any."""
        ...


@dataclass(frozen=True, slots=True)
class EnergyEstimate:
    """Energy of an interval, and the range that contains the true value with 95 % probability."""

    energy_j: float
    low_j: float
    high_j: float
    is_estimated: bool
    """Whether the interval is shorter than the time between the counter's updates around it."""


class EnergyRecord(Protocol):
    """Energy over time, for one GPU or a stage's GPUs."""

    def energy_j(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the energy of an interval; None if it is unknown."""
        ...

    def estimate(self, begin_ns: int, end_ns: int) -> EnergyEstimate | None:
        """Return the energy of an interval with its error range; None if unknown."""
        ...

    def phase(self, at_ns: int) -> tuple[float, float] | None:
        """Return the counter's update period in s and the share of it elapsed at an instant; None if unknown."""
        ...


@dataclass(slots=True)
class ClockHistory:
    """Effective clock of one GPU over time, as a step function, driver calls that set it, and readings of the clock.

    A GPU at its power limit runs below the effective clock, at one that it changes every few milliseconds.
    """

    initial_sm_clock_mhz: int
    _at_ns: list[int] = field(default_factory=list)
    _clocks_mhz: list[int] = field(default_factory=list)
    _calls_ns: list[int] = field(default_factory=list)
    _read_ns: list[int] = field(default_factory=list)
    _read: list[tuple[int, bool]] = field(default_factory=list)
    """Clock in MHz as read, and whether the power limit held it."""

    def record(self, effective_mono_ns: int, sm_clock_mhz: int) -> None:
        """Record a clock and the instant at which it took effect; records may arrive out of order."""
        position = bisect_right(self._at_ns, effective_mono_ns)
        self._at_ns.insert(position, effective_mono_ns)
        self._clocks_mhz.insert(position, sm_clock_mhz)

    def record_call(self, called_mono_ns: int) -> None:
        """Record the start of a driver call that sets the clock; records may arrive out of order."""
        insort(self._calls_ns, called_mono_ns)

    def record_reading(self, read_mono_ns: int, sm_clock_mhz: int, *, is_power_capped: bool) -> None:
        """Record the clock that the driver reports; readings arrive in order."""
        self._read_ns.append(read_mono_ns)
        self._read.append((sm_clock_mhz, is_power_capped))

    def cap_between(self, begin_ns: int, end_ns: int) -> CapReadings | None:
        read = self._read[bisect_left(self._read_ns, begin_ns) : bisect_left(self._read_ns, end_ns)]
        capped_mhz = [mhz for mhz, is_power_capped in read if is_power_capped]
        return CapReadings(len(read), len(capped_mhz), fmean(capped_mhz or [0.0])) if read else None

    def num_calls_between(self, begin_ns: int, end_ns: int) -> int:
        return bisect_left(self._calls_ns, end_ns) - bisect_left(self._calls_ns, begin_ns)

    def clocks_between(self, begin_ns: int, end_ns: int) -> ClockIntervals:
        if begin_ns >= end_ns:
            return ()
        position = bisect_right(self._at_ns, begin_ns)
        clock = self._clocks_mhz[position - 1] if position else self.initial_sm_clock_mhz
        if position == len(self._at_ns) or self._at_ns[position] >= end_ns:
            return ((clock, end_ns - begin_ns),)
        intervals = []
        at = begin_ns
        while at < end_ns:
            until = min(end_ns, self._at_ns[position]) if position < len(self._at_ns) else end_ns
            if until > at:
                intervals.append((clock, until - at))
            clock = self._clocks_mhz[position] if position < len(self._at_ns) else clock
            at = until
            position += 1
        return intervals

    def forget_before(self, mono_ns: int) -> None:
        """Drop records older than an instant, except the clock effective at that instant."""
        del self._calls_ns[: bisect_left(self._calls_ns, mono_ns)]
        num_old = bisect_left(self._read_ns, mono_ns)
        del self._read_ns[:num_old], self._read[:num_old]
        keep_from = bisect_right(self._at_ns, mono_ns)
        if keep_from > 1:
            self.initial_sm_clock_mhz = self._clocks_mhz[keep_from - 2]
            del self._at_ns[: keep_from - 1]
            del self._clocks_mhz[: keep_from - 1]


@dataclass(slots=True)
class EnergyCounter:
    """Updates of one GPU's energy counter: the instants ("edges") at which its value changed.

    The counter moves in steps, so only its edges carry information. A decrease is a reset (driver reload), and so is an
    increase that a GPU of `max_power_w` cannot have caused; energy across a reset is unknown. Smaller excesses come
    from inexactly timed edges. They are cut off unless the GPU used less than its maximum just before. The energy since
    a reset therefore never exceeds `max_power_w` times the time.
    """

    max_power_w: float = math.inf
    _at_ns: list[int] = field(default_factory=list)
    _energy_j: list[float] = field(default_factory=list)
    _segment: list[int] = field(default_factory=list)
    _is_interrupted: bool = False
    _last_j: float = 0.0
    _excess_j: float = 0.0
    """Energy that the counter has shown since the reset in excess of what is possible."""
    _credit_j: float = 0.0
    """Energy that was possible but not used, up to a limit."""
    _power: PowerReadings = field(default_factory=PowerReadings)
    _shapes: dict[int, GapShape] = field(default_factory=dict)
    """Keyed by the edge at which the gap begins; those near a new edge are computed again."""

    def record_power(self, mono_ns: int, power_w: float) -> None:
        """Record a power reading, used to distribute energy between edges that are far apart."""
        self._power.record(mono_ns, power_w)

    def interrupt(self) -> None:
        """Treat the next edge as the start of a new count, because energy across this moment is unknown."""
        self._is_interrupted = True

    def record(self, edge_mono_ns: int, total_energy_j: float) -> None:
        """Record an edge; repeated and older ones are ignored."""
        if not self._at_ns:
            self._begin_count(edge_mono_ns, total_energy_j, 0)
            return
        elapsed_s = (edge_mono_ns - self._at_ns[-1]) / _NS_PER_S
        if elapsed_s <= 0:
            return
        rise_j = total_energy_j - self._last_j
        is_possible = 0 <= rise_j <= _IMPOSSIBLE_RATIO * self.max_power_w * (elapsed_s + _STEP_S)
        if self._is_interrupted or not is_possible:
            self._is_interrupted = False
            self._begin_count(edge_mono_ns, total_energy_j, self._segment[-1] + 1)
            return
        left_j = self._credit_j + self.max_power_w * elapsed_s - rise_j
        self._excess_j += max(0.0, -left_j)
        self._credit_j = min(max(0.0, left_j), self.max_power_w * _CREDIT_S)
        self._append(edge_mono_ns, total_energy_j - self._excess_j, self._segment[-1])
        self._last_j = total_energy_j

    def _begin_count(self, edge_mono_ns: int, total_energy_j: float, segment: int) -> None:
        self._excess_j = self._credit_j = 0.0
        self._last_j = total_energy_j
        self._append(edge_mono_ns, total_energy_j, segment)

    def covers(self, mono_ns: int) -> bool:
        """Return whether there is an edge at or after this instant."""
        return bool(self._at_ns) and self._at_ns[-1] >= mono_ns

    def energy_j(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the energy of an interval, interpolated between edges; None if the edges do not span it."""
        if not self._at_ns or begin_ns < self._at_ns[0] or end_ns > self._at_ns[-1] or end_ns < begin_ns:
            return None
        begin, end = self._interpolate(begin_ns), self._interpolate(end_ns)
        if begin is None or end is None or begin[1] != end[1]:
            return None
        return end[0] - begin[0]

    def estimate(self, begin_ns: int, end_ns: int) -> EnergyEstimate | None:
        energy_j = self.energy_j(begin_ns, end_ns)
        if energy_j is None:
            return None
        if begin_ns == end_ns:
            return EnergyEstimate(0.0, 0.0, 0.0, is_estimated=False)
        variance, longest_ns = 0.0, 0
        for left in {self._gap_at(begin_ns), self._gap_at(end_ns)}:
            gap_begin_ns, gap_end_ns = self._at_ns[left], self._at_ns[left + 1]
            shape = self._shape(left)
            variance += shape.variance_between(max(begin_ns, gap_begin_ns), min(end_ns, gap_end_ns))
            longest_ns = max(longest_ns, gap_end_ns - gap_begin_ns)
        low_j, high_j = error_range(energy_j, variance, self.max_power_w * (end_ns - begin_ns) / _NS_PER_S)
        return EnergyEstimate(energy_j, low_j, high_j, is_estimated=end_ns - begin_ns < longest_ns)

    def _gap_at(self, at_ns: int) -> int:
        """Return the index of the edge before the gap that contains an instant."""
        return max(0, min(bisect_right(self._at_ns, at_ns), len(self._at_ns) - 1) - 1)

    def _shape(self, left: int) -> GapShape:
        """Return how energy is distributed over the gap after an edge."""
        shape = self._shapes.get(self._at_ns[left])
        if shape is None:
            around = range(max(0, left - _GAPS_AROUND), min(left + _GAPS_AROUND + 1, len(self._at_ns) - 1))
            gaps = [self._gap(k) for k in around if self._segment[k] == self._segment[k + 1]]
            shape = self._shapes[self._at_ns[left]] = self._power.shape(self._gap(left), gaps)
        return shape

    def _gap(self, left: int) -> Gap:
        return Gap(self._at_ns[left], self._at_ns[left + 1], self._energy_j[left + 1] - self._energy_j[left])

    def phase(self, at_ns: int) -> tuple[float, float] | None:
        """Return the counter's period in s and the share of it elapsed since an update; None with too few edges.

        Some updates are missed, so the period is taken as about the shortest time between two edges. It cannot be found
        if the counter is read only about once a second.
        """
        right = bisect_left(self._at_ns, at_ns)
        near_ns = self._at_ns[max(0, right - _EDGES_AROUND) : right + _EDGES_AROUND]
        if right == 0 or len(near_ns) < _EDGES_AROUND:
            return None
        gaps_ns = sorted(after - before for before, after in pairwise(near_ns))
        period_ns = gaps_ns[len(gaps_ns) // 10]
        if period_ns > _SPARSE_NS:
            return None
        return period_ns / _NS_PER_S, (at_ns - self._at_ns[right - 1]) / period_ns % 1.0

    def forget_before(self, mono_ns: int) -> None:
        """Drop edges not needed for intervals after this instant."""
        keep_from = bisect_right(self._at_ns, mono_ns) - 1
        if keep_from > 0:
            for edge_ns in self._at_ns[:keep_from]:
                self._shapes.pop(edge_ns, None)
            for column in (self._at_ns, self._energy_j, self._segment):
                del column[:keep_from]
        self._power.forget_before(mono_ns)

    def _append(self, at_ns: int, energy_j: float, segment: int) -> None:
        for edge_ns in self._at_ns[-_GAPS_AROUND - 1 :]:
            self._shapes.pop(edge_ns, None)
        self._at_ns.append(at_ns)
        self._energy_j.append(energy_j)
        self._segment.append(segment)

    def _interpolate(self, at_ns: int) -> tuple[float, int] | None:
        right = bisect_left(self._at_ns, at_ns)
        if self._at_ns[right] == at_ns:
            return self._energy_j[right], self._segment[right]
        left = right - 1
        if self._segment[left] != self._segment[right]:
            return None
        if self._at_ns[right] - self._at_ns[left] > _SHAPED_NS:
            return self._energy_j[left] + self._shape(left).energy_at(at_ns), self._segment[left]
        share = (at_ns - self._at_ns[left]) / (self._at_ns[right] - self._at_ns[left])
        return self._energy_j[left] + share * (self._energy_j[right] - self._energy_j[left]), self._segment[left]


@dataclass(frozen=True, slots=True)
class MeasuredInstruction:
    """Begin and end of one instruction, timed by the training process."""

    instruction: Instruction
    begin_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class RankIteration:
    """Report of one rank on one iteration; `next_begin_ns` is 0 if there was no next iteration."""

    pp_rank: int
    iteration_index: int
    plan_epoch: int
    begin_ns: int
    end_ns: int
    next_begin_ns: int
    instructions: tuple[MeasuredInstruction, ...]
    launched_iteration_index: int = -1
    """Newest iteration that the rank's program had launched when it reported this one; -1 if unknown."""
    stage_rank: int = 0
    """Index of the rank within its stage."""
    memory: RankMemory | None = None
    """Memory of the rank's GPU in this iteration; None if not measured."""
    reorder_refusal: str = ""
    """Why the rank accepts no other instruction order any more; empty if it does."""
    client_cost_s: float | None = None
    """The client's overhead on the training thread in this iteration; None if not measured."""
    is_in_order: bool | None = None
    """For instructions that were not timed: whether the rank ran the expected ones in order; None if timed."""
    num_tokens: int | None = None
    """Tokens that the job processed; None if the program does not say."""
    arrived_ns: int = 0
    """When the daemon received this report; 0 if unknown."""

    @property
    def is_timed(self) -> bool:
        return self.is_in_order is None

    def ran_in_order(self, order: tuple[Instruction, ...]) -> bool:
        if self.is_in_order is not None:
            return self.is_in_order
        ran = sorted(self.instructions, key=lambda measured: measured.begin_ns)
        return tuple(measured.instruction for measured in ran) == order


@dataclass(frozen=True, slots=True)
class ObservedSpan:
    """One instruction on the measured timeline, in seconds from the start of the iteration on rank 0."""

    pp_rank: int
    kind: InstructionKind
    microbatch_index: int
    chunk_index: int
    start_s: float
    end_s: float
    mean_sm_clock_mhz: float | None


@dataclass(frozen=True, slots=True)
class IterationWindow:
    """Energy window of an iteration: from the start of rank 0's iteration to its next one, the same for every GPU.

    A common window keeps sums exact: every joule of every GPU belongs to exactly one iteration.
    """

    begin_ns: int
    end_ns: int


def iteration_window(rank_0: RankIteration) -> IterationWindow:
    """Return the window of an iteration; a job's last iteration has no next one and ends with its step."""
    return IterationWindow(rank_0.begin_ns, rank_0.next_begin_ns or rank_0.end_ns)
