"""The dependency graph of a job with its measured latencies, and the time that an iteration takes beyond that graph.

Theory of operation. An iteration is the time between two iteration starts of rank 0. At full speed it is longer than
the graph of its instructions by the time that the last rank to finish needs until its next start: optimizer step, next
batch. That time is added to every plan (`bias_s`). Another rank may need more time after its last instruction, which
does not show while that rank finishes early; a plan that lets it finish with the others would make each iteration
longer by the difference. The graph therefore gives that rank the difference as its epilogue.

A rank's first instruction waits for input from earlier ranks, so that part of its epilogue costs nothing. The time
before the next start may include a wait for other ranks (as in gradient clipping), so a low quantile over many
iterations counts, in some of which the rank was itself the last. An epilogue is never longer than the time the rank has
left at full speed: its only effect is that the rank finishes no later than at full speed.

Some programs record waits as part of an instruction, such as a receive within a forward. The graph then counts each
wait twice, as work and as a dependency, and a rank needs more time in the graph than the iterations took.
"""

from dataclasses import dataclass
from math import sqrt
from statistics import median

from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.pipeline.timeline import Timeline, timeline
from gpuenergyd.core.policy_api.policy import JobView

LEAST_SHARE = 0.1
"""The quantile of measured turnarounds that counts: the minimum itself would be an outlier."""
MAX_EXCESS_RATIO = 0.02
"""A rank may need so much more time in the graph than iterations take, beyond noise: latencies are estimates."""
CLEAR_SIGMAS = 3.0
"""Standard errors by which a figure is clearly different from what it is compared with."""


@dataclass(frozen=True, slots=True)
class ObservedPipeline:
    """A dependency graph, and the time by which an iteration at full speed exceeds it."""

    graph: DependencyGraph
    bias_s: float


def observed_graph(view: JobView) -> DependencyGraph:
    """Return the graph of a job's schedule with its measured communication latency and launch gap."""
    return dependency_graph(
        view.schedule, communication_latency_s=view.communication_latency_s, launch_gap_s=view.launch_gap_s
    )


def observed_pipeline(view: JobView, profile: PipelineProfile) -> ObservedPipeline:
    """Return a job's graph with epilogues for a given profile, and its bias."""
    graph = observed_graph(view)
    full_speed = _at_full_speed(graph, profile)
    bias_s = view.baseline.iteration_time_s - full_speed.iteration_time_s
    return ObservedPipeline(graph.with_epilogues(_rank_epilogues_s(view, full_speed, bias_s)), bias_s)


def contradiction(view: JobView, graph: DependencyGraph, profile: PipelineProfile) -> str | None:
    """Return in words that a rank's instructions need longer than whole iterations at full speed; None if none does.

    A loop with phases has its waits for other replicas as instructions, and the baseline has none of these waits.
    """
    baseline, full_speed = view.baseline, _at_full_speed(graph, profile)
    waits = [profile[i.instruction_class] for i in graph.instructions if i.kind.waits_for_ranks]
    waited_s = median([o.waited_s for o in view.observations if o.is_regular] or [0.0])
    iteration_s = baseline.iteration_time_s + min(sum(wait.at_max_clock.time_s for wait in waits), waited_s)
    noise_ratio = baseline.iteration_sigma_s / iteration_s / sqrt(max(1, baseline.num_iterations))
    spans_s = {r: spans[-1].end_s - spans[0].start_s for r, spans in enumerate(full_speed.spans_of_ranks()) if spans}
    slowest = max(spans_s, key=spans_s.__getitem__)
    excess_ratio = spans_s[slowest] / iteration_s - 1
    if excess_ratio <= MAX_EXCESS_RATIO + CLEAR_SIGMAS * noise_ratio:
        return None
    return (
        f"by the schedule, the measured instructions of rank {slowest} take {excess_ratio:.1%} longer than iterations;"
        " their times seem to include waits for other ranks"
    )


def graph_in_order(view: JobView, profile: PipelineProfile, bias_s: float) -> DependencyGraph:
    """Return the graph of a view whose schedule is another order than the baseline's, which had this bias.

    Each rank finishes no later than in that order at full speed.
    """
    graph = observed_graph(view)
    return graph.with_epilogues(_rank_epilogues_s(view, _at_full_speed(graph, profile), bias_s))


def _at_full_speed(graph: DependencyGraph, profile: PipelineProfile) -> Timeline:
    return timeline(graph, [profile[i.instruction_class].at_max_clock.time_s for i in graph.instructions])


def _rank_epilogues_s(view: JobView, full_speed: Timeline, bias_s: float) -> list[float]:
    leads_s = [o.lead_s for o in view.observations if o.is_own and o.lead_s is not None]
    lead_s = median(leads_s) if leads_s else 0.0
    epilogues_s = []
    for pp_rank, spans in enumerate(full_speed.spans_of_ranks()):
        turnaround_s = _turnaround_s(view, pp_rank)
        if not spans or turnaround_s is None:
            epilogues_s.append(0.0)
            continue
        own_s = turnaround_s + lead_s - spans[0].start_s
        left_s = full_speed.iteration_time_s - spans[-1].end_s
        epilogues_s.append(max(0.0, min(own_s - bias_s, left_s)))
    return epilogues_s


def _turnaround_s(view: JobView, pp_rank: int) -> float | None:
    """Return the time from a rank's last instruction to its next iteration start; None where it was never measured."""
    seen_s = sorted(
        own_s
        for o in view.observations
        if o.is_own and not o.waited_s and pp_rank < len(o.turnarounds_s)
        if (own_s := o.turnarounds_s[pp_rank]) is not None
    )
    return seen_s[int(LEAST_SHARE * len(seen_s))] if seen_s else None
