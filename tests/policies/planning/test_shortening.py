"""Long pipelines that begin with the flow of a short one: it is a flow, its bound holds, and it is a good estimate."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import Schedule, dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.core.pipeline.schedules import zero_bubble_h1
from gpuenergyd_policies.planning.averaging import FlowAveraging
from gpuenergyd_policies.planning.compiled import IS_COMPILED, floats, ints
from gpuenergyd_policies.planning.discrete.rounding import Rounder
from gpuenergyd_policies.planning.exact.averaging_kernels import PricedGraph, divide_flow
from gpuenergyd_policies.planning.exact.tables import planning_tables
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.large import LargePipeline
from gpuenergyd_policies.planning.orders.shape import RankShape, repaired, shaped_schedule
from gpuenergyd_policies.planning.shortening import LongPipeline, shortened
from tests.policies.planning.orders.cases import split_profile
from tests.support.examples import examples


@st.composite
def _schedules(draw: st.DrawFn) -> Schedule:
    num_ranks = draw(st.integers(1, 3))
    num_microbatches = draw(st.integers(6, 10)) * num_ranks
    kind = draw(st.sampled_from(["1f1b", "ahead", "zb-h1", "shaped"]))
    if kind == "zb-h1":
        return zero_bubble_h1(num_ranks, num_microbatches)
    if kind == "shaped":
        numbers = st.integers(1, 2 * num_ranks)
        shape = [RankShape(draw(numbers), draw(numbers), draw(st.booleans())) for _ in range(num_ranks)]
        return shaped_schedule(repaired(shape, [2 * num_ranks] * num_ranks), num_microbatches)
    ahead = [num_ranks - 1 - r for r in range(num_ranks)] if kind == "ahead" else []
    return one_forward_one_backward(num_ranks, num_microbatches, ahead)


def _long(schedule: Schedule, latency_s: float = 0.0) -> LongPipeline:
    graph = dependency_graph(schedule, communication_latency_s=latency_s)
    tables = planning_tables(graph, split_profile([1.0] * schedule.num_ranks))
    rounder = Rounder(graph, tables)
    class_of = tables.class_of[rounder.order]
    nodes = [graph.instructions[v] for v in rounder.order.tolist()]
    n = len(nodes)
    priced = PricedGraph(
        rounder.graph.pred, rounder.graph.pred_node, rounder.graph.pred_latency, floats(np.zeros(n)),
        ints(np.zeros(n)), ints(np.zeros(n)), floats(np.ones(1)), floats(np.zeros(1)),
    )  # fmt: skip
    ranks = np.array([i.pp_rank for i in nodes], dtype=np.int64)
    return LongPipeline(priced, class_of, ranks, np.array([i.microbatch_index for i in nodes], dtype=np.int64))


@settings(max_examples=examples(40), deadline=None)
@given(schedule=_schedules(), latency_s=st.sampled_from([0.0, 0.05]), seed=st.integers(0, 1000))
def test_orders_that_repeat_themselves_are_shortened_and_flow_carried_over_is_a_flow(
    schedule: Schedule, latency_s: float, seed: int
) -> None:
    long = _long(schedule, latency_s)
    num_kept = 4 * schedule.num_ranks

    short = shortened(long, num_kept, 2)

    assert short is not None
    kept = schedule.num_microbatches - num_kept
    assert len(long.class_of) - len(short.nodes) == kept * len(set(long.class_of.tolist()))
    assert (short.edge_of >= 0).all()
    random = np.random.default_rng(seed)
    counts = np.diff(np.asarray(long.graph.pred))
    weights = short.divided(random.random(len(short.graph.pred_node)), counts)
    assert (weights > 0).all()
    ends = random.random(len(long.class_of))
    total = ends.sum()
    through = floats(ends.copy())
    divide_flow(long.graph, floats(weights), through)
    first = counts == 0
    assert np.asarray(through)[first].sum() == pytest.approx(total)


def test_an_order_that_never_repeats_itself_is_not_shortened() -> None:
    assert shortened(_long(gpipe(2, 20)), 8, 2) is None
    assert shortened(_long(one_forward_one_backward(2, 8)), 8, 2) is None


@settings(max_examples=examples(15), deadline=None)
@given(
    schedule=_schedules(),
    weights=st.lists(st.sampled_from([0.8, 1.0, 1.0, 1.2]), min_size=3, max_size=3),
    slowdown=st.sampled_from([0.0, 0.03, 0.3]),
    forced=st.booleans(),
)
def test_the_bound_of_a_long_pipeline_holds(
    schedule: Schedule, weights: list[float], slowdown: float, *, forced: bool
) -> None:
    profile = split_profile(weights[: schedule.num_ranks])
    graph = dependency_graph(schedule)
    deadline_s = (1 + slowdown) * min_iteration_time_s(graph, profile)
    pipeline = LargePipeline.of(graph, profile)
    deadline_s = min(deadline_s, pipeline.slowest_time_s)

    found = pipeline.prices(deadline_s, forced=forced, begins_short=True)

    exact = solve(graph, profile, deadline_s=deadline_s, forced=forced)
    waiting_w = profile.blocking_power_w * graph.num_ranks
    cost_j = exact.energy_j - waiting_w * exact.iteration_time_s
    bound_j = found.cost_bound_j
    if not forced:
        cost_j, bound_j = exact.energy_j, bound_j + waiting_w * deadline_s
    assert bound_j <= cost_j + 1e-9 * exact.energy_j


@pytest.mark.skipif(not IS_COMPILED, reason="plain Python averages too few flows")
def test_the_bound_of_a_short_start_is_nearly_as_good_as_that_of_many_steps() -> None:
    profile = split_profile([1.0, 1.1, 0.95, 1.0])
    graph = dependency_graph(zero_bubble_h1(4, 64))
    tables = planning_tables(graph, profile)
    deadline_s = 1.02 * min_iteration_time_s(graph, profile)

    def bound_j(num_steps: int, *, begins_short: bool) -> float:
        averages = FlowAveraging(graph, tables, Rounder(graph, tables), deadline_s, forced=False)
        return averages.prices(num_steps, begins_short=begins_short).cost_bound_j

    best_j = bound_j(20_000, begins_short=False)
    assert bound_j(400, begins_short=True) > best_j - 1e-2 * abs(best_j)
