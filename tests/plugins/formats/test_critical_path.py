"""The observed critical path is the chain of instructions that determined the iteration time."""

import pytest

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import InstructionKind, Schedule, dependency_graph
from gpuenergyd.core.pipeline.megatron_orders import combined_1f1b, megatron_interleaved
from gpuenergyd.core.pipeline.schedules import make_schedule
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd_formats.charts.timeline import observed_critical_path
from tests.support.sample_history import spans


def test_on_an_unbalanced_pipeline_the_slowest_stage_is_critical() -> None:
    path = observed_critical_path(spans(is_tuned=False))

    assert sum(instruction.pp_rank == 3 for instruction in path) == 16
    assert str(path[0]) == "F0@0"
    assert str(path[-1]) == "B7@0"


SCHEDULES = [
    *(make_schedule(name, 3, 6) for name in ("1f1b", "interleaved", "zbv", "dualpipev")),
    megatron_interleaved(3, 6, 2, is_paired=True),
    combined_1f1b(3, 6, 2),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_the_observed_path_consists_of_critical_instructions_and_spans_the_iteration(schedule: Schedule) -> None:
    graph = dependency_graph(schedule)
    durations_s = [
        0.010 * (1 + i.pp_rank % 2) + 0.001 * i.microbatch_index + 0.013 * (i.kind is not InstructionKind.F)
        for i in graph.instructions
    ]
    planned = timeline(graph, durations_s)
    observed = tuple(
        ObservedSpan(
            s.instruction.pp_rank,
            s.instruction.kind,
            s.instruction.microbatch_index,
            s.instruction.chunk_index,
            s.start_s,
            s.end_s,
            None,
        )
        for s in planned.spans
    )

    path = observed_critical_path(observed, schedule.name)

    critical = {span.instruction: span.duration_s for span in planned.spans if span.is_critical}
    assert set(path) <= set(critical)
    assert abs(sum(critical[i] for i in path) - planned.iteration_time_s) < 1e-9


def test_incomplete_spans_have_no_critical_path() -> None:
    whole = spans(is_tuned=False)

    assert observed_critical_path(()) == ()
    assert observed_critical_path(tuple(span for span in whole if span.pp_rank != 1)) == ()
    assert observed_critical_path(tuple(s for s in whole if not (s.pp_rank == 0 and s.microbatch_index == 3))) == ()
