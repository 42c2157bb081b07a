"""Upper bound of a plan's slowdown: the iteration time if every instruction slows down in proportion to its clock.

Theory of operation. No instruction slows down by more than its clock is lowered: at clock f it takes at most f_max / f
times as long as at f_max. If a job has measured an instruction at other clocks, the bound is tighter. Time is convex in
1 / f, so the line between two measured clocks lies above it; below the lowest measured clock, time grows at most as
1 / f. The maximum cost of an iteration is the longest path through the pipeline's graph with these times, minus that at
full speed. A clock that is raised only when its instruction begins is late by the switch latency. A wait for data takes
equally long at any clock.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.plan import ClockPlan, RankClocks
from gpuenergyd.core.pipeline.timeline import makespan_s

_TIMES_KEPT = 8
"""Number of newest times of a class at one clock whose median is used."""
_AT_ONE_CLOCK_RATIO = 0.95
"""An instruction's time belongs to its main clock if at least this share of it ran at that clock."""
_POWER_PROFILE_RATIO = 1.25
"""Maximum slowdown by a workload power profile; an assumption, published figures are below 10 %."""
_SPLIT_RATIO = 0.5
"""Assumed time of an input or weight gradient never observed, as a share of the full backward, which is known."""


class ClockTimes:
    """Times of a job's instruction classes: at full speed, and by clock."""

    def __init__(self) -> None:
        self._at_full_speed: dict[InstructionClass, deque[float]] = defaultdict(_times)
        self._by_clock: dict[InstructionClass, dict[int, deque[float]]] = defaultdict(lambda: defaultdict(_times))

    def add(self, observation: IterationObservation, *, is_full_speed: bool) -> None:
        for sample in observation.instruction_samples:
            own, main = sample.instruction_class, sample.main_share
            if is_full_speed:
                self._at_full_speed[own].append(sample.time_s)
            elif main.time_s >= _AT_ONE_CLOCK_RATIO * sample.time_s:
                self._by_clock[own][main.sm_clock_mhz].append(sample.time_s)

    def full_speed_s(self, own: InstructionClass) -> float | None:
        """Return a class's time at full speed; None if neither it nor the backward that it is part of was observed."""
        if times_s := self._at_full_speed.get(own):
            return median(times_s)
        whole = InstructionClass(own.pp_rank, InstructionKind.B, own.chunk_index)
        if own.kind in {InstructionKind.I, InstructionKind.W} and (times_s := self._at_full_speed.get(whole)):
            return _SPLIT_RATIO * median(times_s)
        return None

    def most_ratio(self, own: InstructionClass, sm_clock_mhz: float, top_mhz: int) -> float:
        """Return the maximum ratio of a class's time at a clock to its time at full speed."""
        full_s = self.full_speed_s(own)
        known = {mhz: median(times_s) for mhz, times_s in self._by_clock.get(own, {}).items() if mhz < top_mhz}
        if sm_clock_mhz >= top_mhz:
            return 1.0
        if not known and own.kind in {InstructionKind.I, InstructionKind.W}:  # use the ratio of the full backward
            whole = InstructionClass(own.pp_rank, InstructionKind.B, own.chunk_index)
            return self.most_ratio(whole, sm_clock_mhz, top_mhz)
        if full_s is None or not known:
            return top_mhz / sm_clock_mhz
        points = sorted((known | {top_mhz: full_s}).items())
        k = bisect_left([mhz for mhz, _ in points], sm_clock_mhz)
        high_mhz, high_s = points[k]
        most_s = high_s * high_mhz / sm_clock_mhz
        if k:
            low_mhz, low_s = points[k - 1]
            share = (1 / sm_clock_mhz - 1 / high_mhz) / (1 / low_mhz - 1 / high_mhz)
            most_s = min(most_s, high_s + share * (low_s - high_s))
        return max(1.0, most_s / full_s)


def _times() -> deque[float]:
    return deque(maxlen=_TIMES_KEPT)


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """Limits on how slow one rank can become: its highest clock and power limit, and its switch latency."""

    top_mhz: int
    switch_latency_s: float
    top_power_w: float | None = None
    """None if the GPU's power cannot be limited."""


@dataclass(frozen=True, slots=True)
class WorstCase:
    """Maximum cost of plans for one job."""

    graph: DependencyGraph
    times: ClockTimes
    ranks: Sequence[RankSpeed]
    iteration_time_s: float
    """Iteration time at full speed; assumed to be all compute-bound while times of instructions are unknown."""

    def extra_s(self, plan: ClockPlan, graph: DependencyGraph | None = None) -> float:
        """Return the maximum time of an iteration under a plan beyond full speed; `graph` is of the plan's orders."""
        return self._extra_s(plan, graph or self.graph, self.times)

    def explained_s(self, plan: ClockPlan, graph: DependencyGraph | None = None) -> float:
        """Return the extra time that a plan can explain: without measured times, and with a switch latency per call.

        Any excess over that has a cause other than the plan.
        """
        calls_s = max((len(r.changes) * self.ranks[r.pp_rank].switch_latency_s for r in plan.ranks), default=0.0)
        return calls_s + self._extra_s(plan, graph or self.graph, None)

    def _extra_s(self, plan: ClockPlan, graph: DependencyGraph, measured: ClockTimes | None) -> float:
        before_s = [self.times.full_speed_s(key) for key in self.graph.classes]
        now_s = [self.times.full_speed_s(key) for key in graph.classes]
        speeds = _speeds(plan, graph, self.ranks)
        if None in before_s or None in now_s:
            return self.iteration_time_s * (max((1 / speed.ratio for speed in speeds), default=1.0) - 1.0)
        durations_s = []
        for instruction, class_index, speed in zip(graph.instructions, graph.class_of, speeds, strict=True):
            rank = self.ranks[instruction.pp_rank]
            is_clocked = not instruction.kind.is_wait or instruction.kind.waits_for_ranks
            slower = 1 / speed.ratio if is_clocked else 1.0
            if measured is not None and is_clocked:
                mhz = rank.top_mhz * speed.ratio
                slower = min(slower, measured.most_ratio(instruction.instruction_class, mhz, rank.top_mhz))
            late_s = rank.switch_latency_s * (speed.ratio / speed.late_ratio - 1.0)
            durations_s.append((now_s[class_index] or 0.0) * slower + late_s)
        full_s = [before_s[k] or 0.0 for k in self.graph.class_of]
        return max(0.0, makespan_s(graph, durations_s) - makespan_s(self.graph, full_s))


@dataclass(frozen=True, slots=True)
class _Speed:
    """Lowest speed of one instruction as a share of full speed, and the speed at which it may begin."""

    ratio: float
    late_ratio: float


def _speeds(plan: ClockPlan, graph: DependencyGraph, ranks: Sequence[RankSpeed]) -> list[_Speed]:
    """Return the speed of each instruction in node order: rank by rank, each in program order."""
    plans = {rank.pp_rank: rank for rank in plan.ranks}
    nodes: dict[int, list[int]] = defaultdict(list)
    for node, instruction in enumerate(graph.instructions):
        nodes[instruction.pp_rank].append(node)
    speeds = [_Speed(1.0, 1.0)] * len(graph.instructions)
    for pp_rank, order in nodes.items():
        if (clocks := plans.get(pp_rank)) is not None:
            requested = {(change.instruction, change.sm_clock_mhz) for change in clocks.changes}
            ratios = _ratios(clocks, ranks[pp_rank], len(order))
            for k, node in enumerate(order):
                before, ratio = ratios[k - 1], ratios[k]
                is_late = before < ratio and (graph.instructions[node], clocks.sm_clocks_mhz[k]) in requested
                speeds[node] = _Speed(ratio, before if is_late else ratio)
    return speeds


def _ratios(clocks: RankClocks, rank: RankSpeed, num_instructions: int) -> list[float]:
    """Return the speeds of one rank's instructions under its clocks, power limit and power profile."""
    most = 1.0 if clocks.power_profile is None else 1 / _POWER_PROFILE_RATIO
    if clocks.power_limit_w is not None and rank.top_power_w:
        most *= min(1.0, clocks.power_limit_w / rank.top_power_w)
    wanted = clocks.sm_clocks_mhz[:num_instructions] or (None,) * num_instructions
    return [most * min(1.0, (mhz or rank.top_mhz) / rank.top_mhz) for mhz in wanted]
