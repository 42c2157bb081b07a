"""Search for extra in-flight microbatches of 1F1B, together with the clocks: the largest saving at full speed.

Theory of operation. With balanced stages plain 1F1B has no slack: the round trip of a microbatch through the later
stages takes exactly as long as the microbatches in flight need. Each further microbatch in flight on stage s adds slack
to that loop, and lower clocks turn slack into energy savings. More is not always better: beyond about twice the plain
number, draining the pipeline at the end costs more than the slack saves. So a local search starts from vectors
proportional to the distance from the last stage, and changes single stages and prefixes of stages by one while that
lowers the optimum of the relaxation, which is smoother and faster to compute than a rounded plan.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import DependencyGraph, Schedule, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import ScheduleError, TargetError
from gpuenergyd_policies.planning.frontier import Effort, SolvedPlan, solve

PROPORTIONS = (0.5, 1.0, 1.5, 2.0, 2.5)
"""Starting points: extra microbatches per stage of distance from the last one."""
SEARCH_TOLERANCE = 2e-3
"""Tolerance for leaving out points of hulls while vectors of extra microbatches are compared."""
FINALISTS = 3
MAX_SOLVES = 100


@dataclass(frozen=True, slots=True)
class InflightPlan:
    """A 1F1B schedule with extra microbatches in flight, and the best clocks found for it."""

    schedule: Schedule
    graph: DependencyGraph
    solved: SolvedPlan

    @property
    def extra_inflight(self) -> tuple[int, ...]:
        """Microbatches that each rank keeps in flight beyond plain 1F1B."""
        return self.schedule.extra_inflight or (0,) * self.schedule.num_ranks


def caps_from_microbatches(memory_limit_microbatches: Sequence[int]) -> tuple[int, ...]:
    """Return the microbatches that fit on each rank beyond those that plain 1F1B keeps in flight.

    Raises:
        ScheduleError: plain 1F1B itself does not fit.
    """
    num_ranks = len(memory_limit_microbatches)
    for pp_rank, limit in enumerate(memory_limit_microbatches):
        if limit < num_ranks - pp_rank:
            raise ScheduleError(
                f"1F1B keeps {count_text(num_ranks - pp_rank, 'microbatch')} in flight on rank {pp_rank}, memory"
                f" holds {limit}"
            )
    return tuple(limit - (num_ranks - pp_rank) for pp_rank, limit in enumerate(memory_limit_microbatches))


def requested_caps(request: OfflineRequest, num_ranks: int) -> tuple[int, ...] | None:
    """Return each rank's limit of extra microbatches: the least of the requested number and the memory limits.

    Raises:
        ScheduleError: the schedule is not 1F1B, or does not fit into memory even without extra microbatches.
    """
    if request.schedule is None or request.schedule.name != "1f1b":
        name = request.schedule.name if request.schedule else "unknown"
        raise ScheduleError(f"extra in-flight microbatches need schedule 1f1b, this one is {name}")
    caps: list[tuple[int, ...]] = []
    if limit := request.options.get("memory_limit_microbatches"):
        caps.append(caps_from_microbatches(_per_rank(limit, num_ranks)))
    if room := request.options.get("extra_inflight_caps"):
        caps.append(_per_rank(room, num_ranks))
    if isinstance(request.extra_inflight, int):
        caps.append((request.extra_inflight,) * num_ranks)
    return tuple(min(of_rank) for of_rank in zip(*caps, strict=True)) if caps else None


def _per_rank(text: str, num_ranks: int) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    return values if len(values) > 1 else values * num_ranks


def plan_inflight(
    num_ranks: int,
    num_microbatches: int,
    profile: PipelineProfile,
    *,
    deadline_s: float,
    forced: bool = False,
    caps: Sequence[int] | None = None,
    communication_latency_s: Callable[[int, int], float] | float = 0.0,
) -> InflightPlan:
    """Return the best 1F1B found with at most `caps[r]` extra microbatches in flight on rank r (None: no limit).

    Raises:
        TargetError: even plain 1F1B cannot meet the deadline.
    """
    limits = [max(0, num_microbatches - (num_ranks - r)) for r in range(num_ranks)]
    limits[-1] = 0
    if caps is not None:
        limits = [min(limit, cap) for limit, cap in zip(limits, caps, strict=True)]

    def graph_of(extra: Sequence[int]) -> tuple[Schedule, DependencyGraph]:
        schedule = one_forward_one_backward(num_ranks, num_microbatches, extra)
        return schedule, dependency_graph(schedule, communication_latency_s=communication_latency_s)

    def relaxed_energy_j(extra: tuple[int, ...]) -> float:
        try:
            return solve(
                graph_of(extra)[1],
                profile,
                deadline_s=deadline_s,
                forced=forced,
                thin_tolerance=SEARCH_TOLERANCE,
                effort=Effort.QUICK,
            ).lower_bound_j
        except TargetError:
            return float("inf")

    def full(extra: tuple[int, ...]) -> InflightPlan:
        schedule, graph = graph_of(extra)
        return InflightPlan(schedule, graph, solve(graph, profile, deadline_s=deadline_s, forced=forced))

    ranked = _search(limits, relaxed_energy_j)
    plans = [full(extra) for extra in ranked[:FINALISTS]]
    return min(plans, key=lambda plan: plan.solved.energy_j) if plans else full((0,) * num_ranks)


def _search(limits: Sequence[int], cost: Callable[[tuple[int, ...]], float]) -> list[tuple[int, ...]]:
    """Return the vectors that can meet the deadline, cheapest first."""
    num_ranks = len(limits)
    known: dict[tuple[int, ...], float] = {}

    def costed(extra: tuple[int, ...]) -> float:
        if extra not in known:
            known[extra] = cost(extra)
        return known[extra]

    best = (0,) * num_ranks
    costed(best)
    for proportion in PROPORTIONS:
        start = _repaired([round(proportion * (num_ranks - 1 - r)) for r in range(num_ranks)], limits)
        if costed(start) < known[best]:
            best = start
    improved = True
    while improved and len(known) < MAX_SOLVES:
        improved = False
        for neighbour in _neighbours(best, limits):
            if len(known) >= MAX_SOLVES:
                break
            if neighbour not in known and costed(neighbour) < known[best]:
                best = neighbour
                improved = True
    return sorted((extra for extra in known if known[extra] < float("inf")), key=lambda extra: (known[extra], extra))


def _neighbours(extra: tuple[int, ...], limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield vectors one step away: one rank, or all ranks up to it, with one microbatch more or less."""
    num_ranks = len(extra)
    for last in reversed(range(num_ranks - 1)):
        for step in (1, -1):
            for first in (last, 0) if last else (last,):
                moved = [k + step if first <= r <= last else k for r, k in enumerate(extra)]
                yield _repaired(moved, limits)


def _repaired(extra: Sequence[int], limits: Sequence[int]) -> tuple[int, ...]:
    """Clip to the limits, and limit each rank to one more than the rank before it, since other orders deadlock."""
    result = [max(0, min(k, limit)) for k, limit in zip(extra, limits, strict=True)]
    for r in range(len(result) - 1):
        result[r + 1] = min(result[r + 1], result[r] + 1)
    return tuple(result)
