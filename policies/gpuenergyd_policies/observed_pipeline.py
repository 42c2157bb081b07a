"""The pipeline as a job's own iterations show it: waits between instructions, and what comes after a rank's last one.

Theory of operation. An iteration is what passes from one begin of rank 0 to its next. At full speed it takes longer
than the graph of its instructions, by what the rank that ends last does before it begins again: optimizer, next batch.
So much is charged to every plan (`bias_s`). Another rank may have more to do after its last instruction, which does not
show while it ends early; a plan that lets it end with the others would make each iteration longer by the difference. So
that rank gets the difference as its epilogue in the graph.

A rank's first instruction waits for input from the ranks before it: that part of its epilogue costs nothing. And what a
rank does before it begins again may hold a wait for the others (gradients clipped together): the least of many iterations
counts, in some of which it was itself the last. No epilogue is longer than what the rank has left at full speed, so
that an epilogue only forbids to end later than there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import Timeline, timeline
from gpuenergyd.core.policy_api.policy import JobView

LEAST_SHARE = 0.1
"""Which of the turnarounds seen counts, the shortest first: not the very shortest, which chance has made."""


@dataclass(frozen=True, slots=True)
class ObservedPipeline:
    """A dependency graph, and what an iteration at full speed takes beyond it."""

    graph: DependencyGraph
    bias_s: float


def observed_graph(view: JobView) -> DependencyGraph:
    """Return the instructions of a job's schedule, with the waits between them that its iterations showed."""
    return dependency_graph(
        view.schedule, communication_latency_s=view.communication_latency_s, launch_gap_s=view.launch_gap_s
    )


def observed_pipeline(view: JobView, profile: PipelineProfile) -> ObservedPipeline:
    """Return the pipeline whose instructions take what this profile says."""
    graph = observed_graph(view)
    full_speed = timeline(graph, [profile[i.instruction_class].at_max_clock.time_s for i in graph.instructions])
    bias_s = view.baseline.iteration_time_s - full_speed.iteration_time_s
    return ObservedPipeline(graph.with_epilogues(_rank_epilogues_s(view, full_speed, bias_s)), bias_s)


def _rank_epilogues_s(view: JobView, full_speed: Timeline, bias_s: float) -> list[float]:
    leads_s = [o.lead_s for o in view.observations if o.is_own and o.lead_s is not None]
    lead_s = median(leads_s) if leads_s else 0.0
    epilogues_s = []
    for pp_rank in range(full_speed.num_ranks):
        spans = full_speed.rank_spans(pp_rank)
        turnaround_s = _turnaround_s(view, pp_rank)
        if not spans or turnaround_s is None:
            epilogues_s.append(0.0)
            continue
        own_s = turnaround_s + lead_s - spans[0].start_s
        left_s = full_speed.iteration_time_s - spans[-1].end_s
        epilogues_s.append(max(0.0, min(own_s - bias_s, left_s)))
    return epilogues_s


def _turnaround_s(view: JobView, pp_rank: int) -> float | None:
    """Return how soon after its last instruction a rank begins again, None where no iteration showed that."""
    seen_s = sorted(
        turnaround_s
        for o in view.observations
        if o.is_own and not o.waited_s
        for turnaround_s in _of_rank(o.turnarounds_s, pp_rank)
    )
    return seen_s[int(LEAST_SHARE * len(seen_s))] if seen_s else None


def _of_rank(turnarounds_s: Sequence[float | None], pp_rank: int) -> list[float]:
    found = turnarounds_s[pp_rank] if pp_rank < len(turnarounds_s) else None
    return [] if found is None else [found]
