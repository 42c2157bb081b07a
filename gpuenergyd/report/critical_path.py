"""Which of the observed instructions an iteration waited for: the chain that ends last, walked back."""

from collections.abc import Sequence
from dataclasses import replace

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import Instruction, Schedule, dependency_graph
from gpuenergyd.core.pipeline.schedules import sent_after, stage_of_chunk
from gpuenergyd.errors import ScheduleError


def instruction_of(span: ObservedSpan) -> Instruction:
    """Return the instruction that a span shows."""
    return Instruction(span.pp_rank, span.kind, span.microbatch_index, span.chunk_index)


def observed_critical_path(spans: Sequence[ObservedSpan], schedule_name: str = "") -> tuple[Instruction, ...]:
    """Return the chain of instructions that the iteration waited for, first to last.

    From the span that ended last, each step goes to the predecessor that ended last: what the later one had to
    wait for. Measured times need no tolerance this way. Empty when the spans are no complete pipeline. The name of the
    schedule tells which stages a rank's chunks are, and what is sent late.
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
        num_chunks=1 + max(span.chunk_index for span in spans),
        stage_of_chunk=stage_of_chunk(schedule_name, len(by_rank)),
    )
    try:
        graph = dependency_graph(replace(schedule, sent_after=sent_after(schedule)))
    except ScheduleError:
        return ()
    end_s = {instruction_of(span): span.end_s for span in spans}
    node = max(range(len(graph.instructions)), key=lambda v: end_s[graph.instructions[v]])
    path = [node]
    while graph.predecessors[node]:
        node = max((u for u, _ in graph.predecessors[node]), key=lambda u: end_s[graph.instructions[u]])
        path.append(node)
    return tuple(graph.instructions[v] for v in reversed(path))
