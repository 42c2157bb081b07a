"""Merged segments: long enough, no instruction slower, fewer changes, and nothing touched where nothing is short."""

from itertools import groupby

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import DependencyGraph, Instruction, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd_policies.planning.switching.dwell import with_longer_dwells
from tests.policies.planning.profiles import forward_backward_profile
from tests.support.examples import examples

WEIGHTS = [1.0, 0.8, 1.1]
PROFILE = forward_backward_profile(WEIGHTS)


def graph_of(num_microbatches: int) -> DependencyGraph:
    return dependency_graph(one_forward_one_backward(len(WEIGHTS), num_microbatches))


def segment_times_s(
    graph: DependencyGraph, profile: PipelineProfile, clock_of: dict[Instruction, int], pp_rank: int
) -> list[float]:
    own = [i for i in graph.instructions if i.pp_rank == pp_rank]
    return [
        sum(profile[i.instruction_class].at_clock(mhz).time_s for i in segment)
        for mhz, segment in groupby(own, key=clock_of.__getitem__)
    ]


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), num_microbatches=st.integers(1, 6), least_s=st.sampled_from([0.0, 1.0, 3.0, 8.0, 1e9]))
def test_merged_segments_are_long_enough_and_no_instruction_is_slower(
    data: st.DataObject, num_microbatches: int, least_s: float
) -> None:
    graph = graph_of(num_microbatches)
    clocks = data.draw(
        st.lists(
            st.sampled_from(range(700, 1500, 100)), min_size=len(graph.instructions), max_size=len(graph.instructions)
        )
    )
    clock_of = dict(zip(graph.instructions, clocks, strict=True))

    merged = with_longer_dwells(graph, PROFILE, clock_of, [least_s] * len(WEIGHTS))

    assert merged.keys() == clock_of.keys()
    assert all(merged[i] >= clock_of[i] for i in graph.instructions)
    for pp_rank in range(len(WEIGHTS)):
        before = segment_times_s(graph, PROFILE, clock_of, pp_rank)
        after = segment_times_s(graph, PROFILE, merged, pp_rank)
        assert all(time_s >= least_s for time_s in after[1:-1])
        assert len(after) <= len(before)
        own = [i for i in graph.instructions if i.pp_rank == pp_rank]
        if all(time_s >= least_s for time_s in before[1:-1]):
            assert [merged[i] for i in own] == [clock_of[i] for i in own]
        assert max(merged[i] for i in own) == max(clock_of[i] for i in own)


def test_a_short_segment_joins_the_neighbour_that_costs_least() -> None:
    graph = graph_of(4)
    own = [i for i in graph.instructions if i.pp_rank == 2]
    clock_of = dict.fromkeys(graph.instructions, 1400)
    clock_of |= dict.fromkeys(own[:3], 800) | {own[3]: 1200} | dict.fromkeys(own[4:], 1300)

    merged = with_longer_dwells(graph, PROFILE, clock_of, [0.0, 0.0, 10.0])

    assert [merged[i] for i in own] == [800] * 3 + [1300] * 5
