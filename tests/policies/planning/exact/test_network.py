"""The integer network of a pipeline: whole ticks, falling slopes, edges by tail and by head, and fixed jitter."""

import numpy as np
import pytest
from hypothesis import given, settings

from gpuenergyd.core.pipeline.graph import DependencyGraph, InstructionClass, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import ClockOption, InstructionProfile, PipelineProfile
from gpuenergyd_policies.planning.exact.network import (
    JITTER_TICKS,
    MAX_KEY,
    MIN_TICKS,
    flow_network,
    integer_hull,
    tick_length_s,
)
from gpuenergyd_policies.planning.exact.sweep import longest_path_ticks
from gpuenergyd_policies.planning.exact.tables import planning_tables
from tests.policies.planning.pipelines import B, F, Pipeline, kernel_arrays, plain_pipeline, random_pipelines
from tests.support.examples import examples


def _hand_made() -> Pipeline:
    """Return two ranks with one microbatch: F0 to F1 to B1 to B0, 2 ms between ranks, each class of its own times."""
    options = {
        (0, F): ((1000, 0.010, 3.0), (500, 0.015, 2.0)),
        (0, B): ((1000, 0.020, 6.0), (700, 0.024, 4.0), (500, 0.030, 3.0)),
        (1, F): ((1000, 0.011, 3.0),),
        (1, B): ((1000, 0.021, 6.0), (500, 0.031, 5.0)),
    }
    profile = PipelineProfile(
        {
            InstructionClass(rank, kind): InstructionProfile(tuple(ClockOption(*option) for option in rows))
            for (rank, kind), rows in options.items()
        },
        0.0,
    )
    return dependency_graph(one_forward_one_backward(2, 1), communication_latency_s=0.002), profile


def _edges(graph: DependencyGraph) -> list[tuple[int, int]]:
    return [(u, v) for v in range(len(graph.instructions)) for u, _ in graph.predecessors[v]]


def test_four_dependent_operations_become_a_network_with_source_and_sink() -> None:
    graph, profile = _hand_made()
    names = [f"{i.kind}{i.pp_rank}" for i in graph.instructions]
    assert names == ["F0", "B0", "F1", "B1"]

    network = flow_network(graph, planning_tables(graph, profile), thin_tolerance=0.0)

    assert network.num_operations == 4
    assert network.tick_s == 1e-9
    edges = list(zip(kernel_arrays(network).tail.tolist(), kernel_arrays(network).head.tolist(), strict=True))
    assert edges == sorted([*_edges(graph), (4, 0), (1, 5)])
    latency_of = dict(zip(edges, network.edge_latency_s.tolist(), strict=True))
    ticks_of = dict(zip(edges, kernel_arrays(network).latency.tolist(), strict=True))
    assert latency_of[0, 2] == latency_of[3, 1] == 0.002
    assert ticks_of[4, 0] == ticks_of[1, 5] == 0
    for tail, head in _edges(graph):
        scatter = ticks_of[tail, head] - round(latency_of[tail, head] * 1e9)
        assert scatter == (tail * 7 + head * 13) % JITTER_TICKS
    chains = [
        kernel_arrays(network).ticks[kernel_arrays(network).first[v] : kernel_arrays(network).last[v] + 1].tolist()
        for v in range(4)
    ]
    assert chains == [
        [10_000_000, 15_000_000],
        [20_000_000, 24_000_000, 30_000_000],
        [11_000_000],
        [21_000_000, 31_000_000],
    ]
    slopes = [
        kernel_arrays(network).slope[kernel_arrays(network).first[v] : kernel_arrays(network).last[v] + 1].tolist()
        for v in range(4)
    ]
    assert slopes == [[200_000_000, 0], [500_000_000, 166_666_667, 0], [0], [100_000_000, 0]]
    assert [kernel_arrays(network).order.tolist().index(v) for v in (0, 2, 3, 1)] == [0, 1, 2, 3]
    fastest = 10_000_000 + 11_000_000 + 21_000_000 + 20_000_000
    assert longest_path_ticks(network) == fastest + sum(ticks_of.values()) - ticks_of[0, 1]


@settings(max_examples=examples(15), deadline=None)
@given(pipeline=random_pipelines())
def test_every_edge_is_found_from_both_its_ends(pipeline: Pipeline) -> None:
    graph, profile = pipeline
    n = len(graph.instructions)

    network = flow_network(graph, planning_tables(graph, profile), thin_tolerance=0.0)

    tails, heads = kernel_arrays(network).tail.tolist(), kernel_arrays(network).head.tolist()
    assert tails == sorted(tails)
    for v in range(n + 2):
        after = range(kernel_arrays(network).succ[v], kernel_arrays(network).succ[v + 1])
        assert list(after) == [e for e, tail in enumerate(tails) if tail == v]
        before = kernel_arrays(network).pred_edges[kernel_arrays(network).pred[v] : kernel_arrays(network).pred[v + 1]]
        assert before.tolist() == [e for e, head in enumerate(heads) if head == v]
    inner = [(u, v) for u, v in zip(tails, heads, strict=True) if u < n and v < n]
    assert sorted(inner) == sorted(_edges(graph))
    assert sorted(v for u, v in zip(tails, heads, strict=True) if u == n) == [
        v for v in range(n) if not graph.predecessors[v]
    ]
    latencies_s = network.edge_latency_s.tolist()
    ends = [(u, epilogue_s) for u, v, epilogue_s in zip(tails, heads, latencies_s, strict=True) if v == n + 1]
    assert ends == [(u, graph.epilogues_s[u]) for u in range(n) if graph.epilogues_s[u] or not graph.successors[u]]
    scatter = kernel_arrays(network).latency - np.rint(network.edge_latency_s / network.tick_s)
    assert scatter.min() >= 0
    assert scatter.max() < JITTER_TICKS


def test_a_tolerance_drops_levels_but_no_ends_of_long_hulls() -> None:
    graph, profile = plain_pipeline(1, 1)
    long_hull = InstructionProfile(
        tuple(ClockOption(mhz, 1000.0 / mhz, 10.0 + mhz**2 / 1e5) for mhz in range(1500, 500, -25))
    )
    tables = planning_tables(graph, PipelineProfile({**profile.classes, InstructionClass(0, F): long_hull}, 0.0))

    whole, thin = (flow_network(graph, tables, thin_tolerance=ratio) for ratio in (0.0, 0.01))

    sizes = [(kernel_arrays(network).last - kernel_arrays(network).first + 1).tolist() for network in (whole, thin)]
    assert sizes[0][0] == 40
    assert 2 <= sizes[1][0] < 20
    assert sizes[0][1] == sizes[1][1]
    for ends in ("first", "last"):
        whole_ticks, thin_ticks = (own.ticks[getattr(own, ends)].tolist() for own in map(kernel_arrays, (whole, thin)))
        assert whole_ticks == thin_ticks


@pytest.mark.parametrize(
    ("shortest_s", "longest_s", "num_nodes", "tick_s"),
    [
        (1e-3, 1.0, 10, 1e-9),
        (0.01, 100.0, 1000, 1e-9),
        (0.9e-3, 1.0, 10, 1e-10),
        (0.9e-6, 1e-3, 10, 1e-13),
        (0.9e-6, 400.0, 1000, 1e-13),  # one finer would not fit into heap keys
        (0.9e-6, 500.0, 1000, 1e-12),
        (1.0, 4.6e6, 1000, 1e-9),
        (1.0, 4.7e6, 1000, 1e-8),
        (1.0, 4.7e7, 1000, 1e-7),
    ],
)
def test_the_tick_is_a_nanosecond_unless_that_is_too_coarse_or_does_not_fit(
    shortest_s: float, longest_s: float, num_nodes: int, tick_s: float
) -> None:
    found_s = tick_length_s(shortest_s=shortest_s, longest_s=longest_s, num_nodes=num_nodes)

    assert found_s == pytest.approx(tick_s, rel=1e-9)
    assert longest_s / found_s * num_nodes <= MAX_KEY
    assert shortest_s / found_s >= MIN_TICKS or longest_s / (found_s / 10) * num_nodes >= MAX_KEY


@pytest.mark.parametrize(
    ("times_s", "costs_j", "ticks", "slopes"),
    [
        ([2.0], [5.0], [2], [0]),
        ([1.0, 2.0, 4.0], [9.0, 5.0, 3.0], [1, 2, 4], [4_000_000, 1_000_000, 0]),
        ([1.0, 2.0, 3.0], [9.0, 5.0, 1.0], [1, 3], [4_000_000, 0]),  # equal slopes are one
        ([1.0, 2.0, 3.0], [9.0, 6.0, 1.0], [1, 3], [4_000_000, 0]),  # above the chord
        ([1.0, 1.2, 3.0], [9.0, 7.0, 1.0], [1, 3], [3_000_000, 0]),  # one tick: the cheaper one
        ([0.2, 3.0], [9.0, 4.0], [1, 3], [2_500_000, 0]),  # no duration is nothing
        ([1.0, 2.0, 3.0], [9.0, 5.0, 5.0], [1, 2], [4_000_000, 0]),  # nothing to be saved by slowness
        ([1.0, 2.0, 3.0], [9.0, 5.0, 5.0 - 2e-7], [1, 2], [4_000_000, 0]),  # nor less than half a microwatt
        ([1.0, 2.0, 3.0], [9.0, 5.0, 5.0 - 1e-6], [1, 2, 3], [4_000_000, 1, 0]),
    ],
)
def test_a_hull_becomes_ticks_and_strictly_falling_slopes(
    times_s: list[float], costs_j: list[float], ticks: list[int], slopes: list[int]
) -> None:
    assert integer_hull(np.array(times_s), np.array(costs_j), 1.0) == (ticks, slopes)


def test_slopes_are_by_time_and_not_by_tick() -> None:
    times_s, costs_j = np.array([0.001, 0.002]), np.array([3.0, 1.0])

    assert integer_hull(times_s, costs_j, 1e-6) == ([1000, 2000], [2_000_000_000, 0])
