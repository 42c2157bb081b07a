"""Plans for very long 1F1B pipelines: the solution of a short pipeline with its middle repeated.

Theory of operation. Between warm-up and cool-down 1F1B is periodic, microbatch by microbatch, and so is its optimum. A
pipeline with few microbatches is swept finely; the durations of its first and last half are used at the ends of the
long one, those of its middle microbatch in between. The short pipeline's slowdown differs from the long one's, hence
several are tried. Correctness does not depend on periodicity: rounding on the whole graph meets the deadline, and the
bound comes from a sweep of the whole graph with coarsely thinned hulls, whose own durations are candidates as well.
"""

from collections.abc import Callable

import numpy as np

from gpuenergyd.core.pipeline.graph import DependencyGraph, Schedule, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd_policies.planning.exact.tables import FloatArray, IntArray
from gpuenergyd_policies.planning.frontier import SolvedPlan, solved_plan
from gpuenergyd_policies.planning.problem import Effort, make_problem

LONG_PIPELINE = 10_000
"""Number of instructions above which repetition pays; shorter pipelines are swept finely in seconds."""
SHORT_ROUNDS = 6
"""Microbatches of the short pipeline, per rank; with two per rank plans lose 3 to 15 %."""
COARSE_TOLERANCE = 1e-2
FINE_TOLERANCE = 1e-3
SLOWDOWN_SCALES = (0.0, 0.5, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.4)
"""Slowdowns of the short pipeline to try, as multiples of the long one's."""


def is_periodic(schedule: Schedule | None, graph: DependencyGraph) -> bool:
    """Return whether a pipeline is periodic (1F1B) and long enough for repetition to pay."""
    return (
        schedule is not None
        and schedule.name == "1f1b"
        and len(graph.instructions) > LONG_PIPELINE
        and schedule.num_microbatches > 2 * _short_microbatches(schedule)
    )


def solve_periodic(
    schedule: Schedule,
    graph: DependencyGraph,
    profile: PipelineProfile,
    *,
    deadline_s: float,
    forced: bool = False,
    communication_latency_s: Callable[[int, int], float] | float = 0.0,
) -> SolvedPlan:
    """Return a plan for a long 1F1B pipeline, with the same guarantees as `solve`.

    Raises:
        ProfileError: a class of the graph was not measured.
        TargetError: the deadline is below T_min.
    """
    whole = make_problem(graph, profile, COARSE_TOLERANCE)
    whole.require_possible(deadline_s)
    wanted_s = whole.useful_s(deadline_s)
    sweep = whole.sweep(np.array([wanted_s]), stop_early=True)
    if not forced and whole.is_beyond_least_energy(sweep, 0):
        wanted_s = min(wanted_s, max(whole.min_time_s, sweep.min_energy_time_s))
    microbatches = _short_microbatches(schedule)
    short_schedule = one_forward_one_backward(schedule.num_ranks, microbatches, schedule.extra_inflight)
    short_graph = dependency_graph(short_schedule, communication_latency_s=communication_latency_s)
    short = make_problem(short_graph, profile, FINE_TOLERANCE)
    slowdown = wanted_s / whole.min_time_s - 1.0
    short_deadlines_s = short.min_time_s * (1.0 + slowdown * np.array(SLOWDOWN_SCALES))
    short_sweep = short.sweep(short_deadlines_s, stop_early=True)
    nodes = _nodes_in_short(graph, short_graph, schedule.num_microbatches, microbatches)
    repeated: list[FloatArray] = [short_sweep.durations_s[row][nodes] for row in range(len(short_deadlines_s))]
    return solved_plan(
        whole, sweep, np.array([wanted_s]), forced=forced, effort=Effort.QUICK, more_durations_s=repeated
    )


def _short_microbatches(schedule: Schedule) -> int:
    most_extra = max(schedule.extra_inflight, default=0)
    return SHORT_ROUNDS * schedule.num_ranks + 2 * most_extra


def _nodes_in_short(
    graph: DependencyGraph, short: DependencyGraph, num_microbatches: int, short_microbatches: int
) -> IntArray:
    """Return, for each node of the long graph, the corresponding node of the short one."""
    node_of = {(i.pp_rank, i.kind, i.microbatch_index): v for v, i in enumerate(short.instructions)}
    half = short_microbatches // 2
    removed = num_microbatches - short_microbatches

    def short_index(microbatch: int) -> int:
        if microbatch < half:
            return microbatch
        return max(half, microbatch - removed)

    return np.array(
        [node_of[i.pp_rank, i.kind, short_index(i.microbatch_index)] for i in graph.instructions], dtype=np.int64
    )
