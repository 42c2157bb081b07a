"""Start, end, slack, critical instructions and energy of pipelines that are solved by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.timeline import iteration_energy_j, makespan_s, timeline

F, B = InstructionKind.F, InstructionKind.B


def test_balanced_1f1b_takes_m_plus_r_minus_one_rounds() -> None:
    graph = dependency_graph(one_forward_one_backward(3, 4))

    planned = timeline(graph, [1.0 if i.kind is F else 2.0 for i in graph.instructions])

    assert planned.iteration_time_s == 3.0 * (4 + 3 - 1)


def test_short_stage_has_slack_and_long_stage_is_critical() -> None:
    graph = dependency_graph(gpipe(2, 2))
    planned = timeline(graph, [1.0 if i.pp_rank == 0 else 3.0 for i in graph.instructions])

    starts = {str(span.instruction): (span.start_s, span.end_s, span.slack_s) for span in planned.spans}

    # rank 1 works from 1 to 13 without a pause; rank 0 waits for its gradients at 10 and 13
    assert starts["F0@0"] == (0.0, 1.0, 0.0)
    assert starts["F1@0"] == (1.0, 2.0, 2.0)
    assert starts["B1@1"] == (10.0, 13.0, 0.0)
    assert starts["B0@0"] == (10.0, 11.0, 2.0)
    assert planned.iteration_time_s == 14.0
    critical = {str(span.instruction) for span in planned.spans if span.is_critical}
    assert critical == {"F0@0", "F0@1", "F1@1", "B0@1", "B1@1", "B1@0"}


def test_communication_latency_delays_the_receiver_and_reduces_slack() -> None:
    graph = dependency_graph(gpipe(2, 1), communication_latency_s=0.5)

    planned = timeline(graph, [1.0] * 4)

    assert planned.iteration_time_s == 5.0
    assert all(span.is_critical for span in planned.spans)


def test_an_epilogue_lengthens_the_iteration_and_adds_slack_to_other_ranks() -> None:
    graph = dependency_graph(gpipe(2, 1)).with_epilogues([0.0, 1.5])

    planned = timeline(graph, [1.0] * 4)

    # rank 1 ends at 3 and is done at 4.5; rank 0, which gets its gradient at 3, ends at 4
    assert planned.iteration_time_s == makespan_s(graph, [1.0] * 4) == 4.5
    assert {str(span.instruction): span.slack_s for span in planned.spans if span.slack_s} == {"B0@0": 0.5}


def test_energy_counts_waiting_of_every_rank_at_blocking_power() -> None:
    energy_j = iteration_energy_j(
        energies_j=[100.0, 50.0], durations_s=[2.0, 1.0], iteration_time_s=4.0, num_ranks=2, blocking_power_w=10.0
    )

    assert energy_j == 150.0 + 10.0 * (2 * 4.0 - 3.0)


@given(st.data())
def test_using_up_the_slack_of_one_instruction_never_lengthens_the_iteration_and_more_always_does(
    data: st.DataObject,
) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    graph = dependency_graph(one_forward_one_backward(num_ranks, data.draw(st.integers(1, 5))))
    graph = graph.with_epilogues([data.draw(st.sampled_from([0.0, 0.5, 9.0])) for _ in range(num_ranks)])
    durations_s = [data.draw(st.floats(0.1, 3.0)) for _ in graph.instructions]
    planned = timeline(graph, durations_s)
    node = data.draw(st.integers(0, len(durations_s) - 1))

    stretched = durations_s.copy()
    stretched[node] += planned.spans[node].slack_s
    assert timeline(graph, stretched).iteration_time_s == pytest.approx(planned.iteration_time_s)
    stretched[node] += 0.5
    assert timeline(graph, stretched).iteration_time_s == pytest.approx(planned.iteration_time_s + 0.5)


def test_spans_of_all_ranks_are_those_of_each_rank() -> None:
    graph = dependency_graph(one_forward_one_backward(3, 4))
    planned = timeline(graph, [1.0 if i.kind is F else 2.0 for i in graph.instructions])

    assert planned.spans_of_ranks() == tuple(planned.rank_spans(pp_rank) for pp_rank in range(3))
    assert all(planned.spans_of_ranks())
