"""One measured iteration of a pipeline and its critical path."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, Schedule, dependency_graph
from gpuenergyd.core.pipeline.schedules import stage_of_chunk, with_communication
from gpuenergyd.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class ObservedIteration:
    """The measured timeline of one iteration, with a title for charts."""

    title: str
    iteration_time_s: float
    spans: tuple[ObservedSpan, ...]
    schedule_name: str = ""
    """Name of the schedule, which determines the stages of a rank's chunks."""


def instruction_of(span: ObservedSpan) -> Instruction:
    return Instruction(span.pp_rank, span.kind, span.microbatch_index, span.chunk_index)


def observed_critical_path(spans: Sequence[ObservedSpan], schedule_name: str = "") -> tuple[Instruction, ...]:
    """Return the critical path, first to last; empty if the spans are not a complete pipeline.

    The path starts at the span that ended last. Each step goes back to the predecessor that ended last, for which the
    later instruction had to wait. This needs no tolerance for measured times. The schedule name determines the stages
    of a rank's chunks, and which activations are sent late.
    """
    if not spans:
        return ()
    by_rank: dict[int, list[ObservedSpan]] = {}
    for span in sorted(spans, key=lambda s: (s.start_s, s.end_s)):
        by_rank.setdefault(span.pp_rank, []).append(span)
    if sorted(by_rank) != list(range(len(by_rank))):
        return ()
    schedule = Schedule(
        name=schedule_name,
        num_microbatches=1 + max(span.microbatch_index for span in spans),
        orders=tuple(tuple(instruction_of(span) for span in by_rank[rank]) for rank in sorted(by_rank)),
        num_chunks=1 + max(instruction_of(span).forward_chunk_index for span in spans),
        stage_of_chunk=stage_of_chunk(schedule_name, len(by_rank)),
    )
    try:
        graph = dependency_graph(with_communication(schedule))
    except ScheduleError:
        return ()
    end_s = {instruction_of(span): span.end_s for span in spans}
    node = max(range(len(graph.instructions)), key=lambda v: end_s[graph.instructions[v]])
    path = [node]
    while graph.predecessors[node]:
        node = max((u for u, _ in graph.predecessors[node]), key=lambda u: end_s[graph.instructions[u]])
        path.append(node)
    return tuple(graph.instructions[v] for v in reversed(path))
