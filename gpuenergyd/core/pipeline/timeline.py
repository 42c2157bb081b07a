"""Timeline of an iteration: start, end and slack of each instruction, iteration time and energy."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction

CRITICAL_SLACK_S = 1e-9
"""Maximum slack of a critical instruction; below the resolution of host clocks."""


@dataclass(frozen=True, slots=True)
class Span:
    """One instruction on the timeline; `slack_s` is the delay that does not lengthen the iteration."""

    instruction: Instruction
    start_s: float
    end_s: float
    slack_s: float

    @property
    def duration_s(self) -> float:
        """Run time of the instruction."""
        return self.end_s - self.start_s

    @property
    def is_critical(self) -> bool:
        """Whether a longer run time lengthens the iteration."""
        return self.slack_s <= CRITICAL_SLACK_S


@dataclass(frozen=True, slots=True)
class Timeline:
    """All instructions of one iteration in the node order of their graph, each at its earliest start."""

    spans: tuple[Span, ...]
    num_ranks: int
    iteration_time_s: float

    def rank_spans(self, pp_rank: int) -> tuple[Span, ...]:
        """Return the spans of one rank in program order."""
        return tuple(span for span in self.spans if span.instruction.pp_rank == pp_rank)

    def spans_of_ranks(self) -> tuple[tuple[Span, ...], ...]:
        """Return the spans of every rank in program order, in a single pass."""
        spans_of: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            spans_of[span.instruction.pp_rank].append(span)
        return tuple(map(tuple, spans_of))


def timeline(graph: DependencyGraph, durations_s: Sequence[float]) -> Timeline:
    """Return the as-soon-as-possible timeline of a graph; `durations_s[i]` belongs to node i."""
    n = len(graph.instructions)
    start, finish = _earliest(graph, durations_s)
    makespan = max(map(add, finish, graph.epilogues_s), default=0.0)
    latest_finish = [makespan - epilogue_s for epilogue_s in graph.epilogues_s]
    for u in reversed(graph.topological_order):
        for v, latency_s in graph.successors[u]:
            latest_finish[u] = min(latest_finish[u], latest_finish[v] - durations_s[v] - latency_s)
    return Timeline(
        spans=tuple(
            Span(graph.instructions[v], start[v], finish[v], max(0.0, latest_finish[v] - finish[v])) for v in range(n)
        ),
        num_ranks=graph.num_ranks,
        iteration_time_s=makespan,
    )


def makespan_s(graph: DependencyGraph, durations_s: Sequence[float]) -> float:
    """Return the time of one iteration; faster than `timeline`, without slack."""
    _, finish = _earliest(graph, durations_s)
    return max(map(add, finish, graph.epilogues_s), default=0.0)


def earliest_starts_s(graph: DependencyGraph, durations_s: Sequence[float]) -> list[float]:
    """Return the earliest start of each node; faster than `timeline`, without slack."""
    return _earliest(graph, durations_s)[0]


def _earliest(graph: DependencyGraph, durations_s: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the earliest start and finish of each node."""
    start = [0.0] * len(graph.instructions)
    finish = [0.0] * len(graph.instructions)
    predecessors = graph.predecessors
    for v in graph.topological_order:  # plain comparisons: `max` of a generator takes five times as long
        at = 0.0
        for u, latency_s in predecessors[v]:
            ready = finish[u] + latency_s
            if ready > at:  # noqa: PLR1730
                at = ready
        start[v] = at
        finish[v] = at + durations_s[v]
    return start, finish


def iteration_energy_j(
    *,
    energies_j: Sequence[float],
    durations_s: Sequence[float],
    iteration_time_s: float,
    num_ranks: int,
    blocking_power_w: float,
) -> float:
    """Return the energy of one iteration: that of the instructions, plus blocking power while ranks wait.

    sum(e_i) + P_block * (R * T - sum(t_i)), Perseus (SOSP'24), section 4.1.
    """
    return sum(energies_j) + blocking_power_w * (num_ranks * iteration_time_s - sum(durations_s))
