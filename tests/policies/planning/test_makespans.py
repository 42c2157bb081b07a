"""Compiled iteration times of a graph equal those of the timeline, to the last bit."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.timeline import makespan_s
from gpuenergyd_policies.planning.makespans import Makespans
from tests.support.examples import examples


@settings(max_examples=examples(100), deadline=None)
@given(st.data())
def test_iteration_times_equal_those_of_the_timeline(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    schedule = data.draw(st.sampled_from([gpipe, one_forward_one_backward]))(num_ranks, data.draw(st.integers(1, 6)))
    graph = dependency_graph(schedule, communication_latency_s=data.draw(st.floats(0.0, 1.0)), launch_gap_s=0.01)
    graph = graph.with_epilogues([data.draw(st.floats(0.0, 3.0)) for _ in range(num_ranks)])
    makespans = Makespans(graph)
    n = len(graph.instructions)

    for durations_s in data.draw(st.lists(st.lists(st.floats(0.0, 5.0), min_size=n, max_size=n), max_size=3)):
        assert makespans.of(np.array(durations_s)) == makespan_s(graph, durations_s)
