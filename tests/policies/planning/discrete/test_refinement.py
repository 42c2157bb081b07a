"""Refinement: windows cover the pipeline, are cut out of it exactly, and end with a plan no more expensive."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.discrete import refinement
from gpuenergyd_policies.planning.discrete.refinement import refine
from gpuenergyd_policies.planning.discrete.rounding import LATE, RoundedPlan
from gpuenergyd_policies.planning.discrete.rounding_kernels import GraphArrays, Rounding
from gpuenergyd_policies.planning.discrete.window_kernels import (
    BY_MICROBATCH,
    BY_TIME,
    PipelineArrays,
    PlanState,
    Window,
    begin_stretches,
    climb,
    copy_graph,
    copy_network,
    mark_stretch,
    mark_window,
    next_random,
)
from gpuenergyd_policies.planning.exact.network import JITTER_TICKS
from gpuenergyd_policies.planning.exact.sweep_kernels import NetworkArrays
from gpuenergyd_policies.planning.problem import PlanningProblem, make_problem
from tests.policies.planning.pipelines import Pipeline, plain_pipeline, random_pipelines
from tests.support.examples import examples


@pytest.mark.parametrize(
    ("n", "num_microbatches", "passes", "windows"),
    [
        (12, 3, ((BY_TIME, 4),), [(0, 0, 4), (0, 2, 6), (0, 4, 8), (0, 6, 10), (0, 8, 12), (0, 10, 14)]),
        (12, 3, ((BY_MICROBATCH, 4),), [(1, 0, 1), (1, 1, 2), (1, 2, 3)]),
        (12, 3, ((BY_MICROBATCH, 8),), [(1, 0, 2), (1, 1, 3), (1, 2, 4)]),
        (12, 3, ((BY_MICROBATCH, 1),), [(1, 0, 1), (1, 1, 2), (1, 2, 3)]),  # at least one microbatch
        (4, 2, ((BY_TIME, 96),), [(0, 0, 4), (0, 2, 6)]),  # at most all
        # the second of two passes begins half a window earlier, and what lies before the pipeline is cut off
        (8, 2, ((BY_TIME, 4), (BY_TIME, 4)), [
            *((0, 0, 4), (0, 2, 6), (0, 4, 8), (0, 6, 10)),
            *((0, 0, 2), (0, 0, 4), (0, 2, 6), (0, 4, 8), (0, 6, 10)),
        ]),
        (6, 6, ((BY_TIME, 1), (BY_TIME, 1)), [*((0, k, k + 1) for k in range(6)), *((0, k, k + 1) for k in range(6))]),
    ],
)  # fmt: skip
def test_windows_cover_the_pipeline_and_overlap_by_half(
    n: int, num_microbatches: int, passes: tuple[tuple[int, int], ...], windows: list[tuple[int, int, int]]
) -> None:
    assert refinement._windows(n, num_microbatches, passes) == windows


def test_pseudo_random_choices_repeat_in_every_run() -> None:
    states = [refinement.SEED]
    for _ in range(3):
        states.append(next_random(states[-1]))

    assert states == [1, 1103527590, 377401575, 662824084]


def _whole(num: int) -> list[int]:
    """Return an integer buffer with values left over from an earlier window."""
    return ints(np.full(num, 7))


def _real(num: int) -> list[float]:
    """Return a float buffer with values left over from an earlier window."""
    return floats(np.full(num, 7.0))


class _CutWindow:
    """A plan with some operations free, and the window that the kernels cut out of it."""

    def __init__(
        self, pipeline: Pipeline, seed: int, share_free: float, stretch: tuple[float, float] | None = None
    ) -> None:
        self.graph, profile = pipeline
        self.problem: PlanningProblem = make_problem(self.graph, profile)
        problem, rng = self.problem, np.random.default_rng(seed)
        rounder, tables, network = problem.rounder, problem.tables, problem.network
        self.n = n = rounder.num_operations
        self.deadline_s = problem.min_time_s + rng.uniform(0, 1.1) * (problem.slowest_time_s - problem.min_time_s)
        self.plan = rounder.round_plan(
            rng.uniform(tables.fastest_s, tables.slowest_s + 1e-9), self.deadline_s, slack_share=LATE, hull_first=False
        )
        self.choice = self.plan.options[rounder.order].tolist()
        self.is_free = (rng.uniform(0, 1, n) < share_free).astype(int).tolist()
        if stretch is not None:  # in time order
            self.begin, self.end = sorted(round(share * n) for share in stretch)
            self.is_free = [int(self.begin <= v < self.end) for v in range(n)]
        self.whole = PipelineArrays(
            graph=rounder.due_by(self.deadline_s), options=rounder.options,
            first_vertex=ints(network.first_level[rounder.order]), last_vertex=ints(network.last_level[rounder.order]),
            single_vertex=1000, microbatches=_whole(n), tick_s=network.tick_s, jitter_ticks=JITTER_TICKS,
        )  # fmt: skip
        self.state = state = PlanState(
            choice=ints(self.choice), earliest=_real(n), latest=_real(n), is_free=ints(self.is_free), marks=_whole(n)
        )
        m = len(network.edge_tail) + 2 * n
        self.window = Window(
            nodes=_whole(n), position=_whole(n),
            graph=GraphArrays(
                pred=_whole(n + 1), pred_node=_whole(m), pred_latency=_real(m), succ=_whole(n + 1),
                succ_node=_whole(m), succ_latency=_real(m), release=_real(n), due=_real(n),
            ),
            options=rounder.options._replace(
                low=_whole(n), high=_whole(n), last=_whole(n), hull_low=_whole(n), hull_high=_whole(n)
            ),
            network=NetworkArrays(
                first=_whole(n), last=_whole(n), ticks=_whole(n), slope=_whole(n), tail=_whole(m), head=_whole(m),
                latency=_whole(m), succ=_whole(n + 3), pred=_whole(n + 3), pred_edges=_whole(m),
                order=ints(np.arange(n)),
            ),
            durations=_real(n), best=_whole(n),
            trial=Rounding(choice=_whole(n), finish=_real(n), latest=_real(n), latest_fast=_real(n)),
        )  # fmt: skip
        self.size = mark_window(n, self.whole, state, self.window)
        self.begin_s, self.end_s = copy_graph(self.size, self.whole, state, self.window)
        self.num_edges = copy_network(self.size, self.end_s, self.whole, self.window)

    def cut_stretch(self, earlier: int) -> None:
        """Cut the stretch again, as after one that began at an earlier operation."""
        for buffer in (self.window.nodes, self.window.position, self.window.graph.pred, self.window.graph.succ):
            buffer[:] = _whole(len(buffer))
        begin_stretches(self.n, self.whole, self.state)
        mark_stretch(0, earlier, self.begin, self.whole, self.state, self.window)
        for v in range(earlier, self.begin):
            self.state.is_free[v] = self.state.marks[v] = 0
        self.size = mark_stretch(earlier, self.begin, self.end, self.whole, self.state, self.window)
        self.begin_s, self.end_s = copy_graph(self.size, self.whole, self.state, self.window)

    def climb(self, seed: int) -> tuple[float, float, int]:
        """Climb from the window's own choice; return its cost before and after, and the generator's last state."""
        own = [self.choice[v] for v in self.window.nodes[: self.size]]
        self.window.best[: self.size] = ints(own)
        before_j = sum(self.window.options.costs[k] for k in own)
        cost_j, state = climb(self.size, self.window, seed, before_j)
        return before_j, cost_j, state

    @property
    def before(self) -> list[list[tuple[int, float]]]:
        """Predecessors in the order of the kernel."""
        return _neighbours(self.whole.graph.pred, self.whole.graph.pred_node, self.whole.graph.pred_latency, self.n)

    @property
    def after(self) -> list[list[tuple[int, float]]]:
        """Successors in the order of the kernel."""
        return _neighbours(self.whole.graph.succ, self.whole.graph.succ_node, self.whole.graph.succ_latency, self.n)

    def times_s(self) -> list[float]:
        """Return how long each operation of the plan takes."""
        return [self.whole.options.times[k] for k in self.choice]


def _neighbours(start: list[int], node: list[int], gap: list[float], n: int) -> list[list[tuple[int, float]]]:
    return [[(node[e], gap[e]) for e in range(start[v], start[v + 1])] for v in range(n)]


def _reached(of: list[int], ways: list[list[tuple[int, float]]], order: list[int]) -> set[int]:
    """Return these nodes and all that come after them this way."""
    found = set(of)
    for v in order:
        if any(u in found for u, _ in ways[v]):
            found.add(v)
    return found


@settings(max_examples=examples(25), deadline=None)
@given(pipeline=random_pipelines(), seed=st.integers(0, 2**32 - 1), share_free=st.sampled_from([0.2, 0.4, 0.7, 1.0]))
def test_a_window_holds_everything_between_free_operations_with_releases_and_due_times_from_the_rest(
    pipeline: Pipeline, seed: int, share_free: float
) -> None:
    window = _CutWindow(pipeline, seed, share_free)
    n, before, after, times_s = window.n, window.before, window.after, window.times_s()
    free = [v for v in range(n) if window.is_free[v]]
    inside = sorted(_reached(free, before, list(range(n))) & _reached(free, after, list(range(n - 1, -1, -1))))
    begin_s, end_s = [0.0] * n, list(window.whole.graph.due)
    for v in range(n):
        begin_s[v] = max((begin_s[u] + times_s[u] + gap for u, gap in before[v]), default=0.0)
    for v in reversed(range(n)):
        end_s[v] = min([window.whole.graph.due[v], *(end_s[w] - times_s[w] - gap for w, gap in after[v])])
    place = {v: i for i, v in enumerate(inside)}

    assert window.size == len(inside)
    assert list(window.window.nodes[: window.size]) == inside
    cut, options, whole_options = window.window.graph, window.window.options, window.whole.options
    kept_before = _neighbours(cut.pred, cut.pred_node, cut.pred_latency, len(inside))
    kept_after = _neighbours(cut.succ, cut.succ_node, cut.succ_latency, len(inside))
    for i, v in enumerate(inside):
        assert kept_before[i] == [(place[u], gap) for u, gap in before[v] if u in place]
        assert kept_after[i] == [(place[w], gap) for w, gap in after[v] if w in place]
        outside = (begin_s[u] + times_s[u] + gap for u, gap in before[v] if u not in place)
        assert cut.release[i] == pytest.approx(max(outside, default=0.0), abs=1e-12)
        left = (end_s[w] - times_s[w] - gap for w, gap in after[v] if w not in place)
        assert cut.due[i] == pytest.approx(min([window.whole.graph.due[v], *left]), abs=1e-12)
        choice = window.choice[v]
        is_free = bool(window.is_free[v])
        assert options.low[i] == (whole_options.low[v] if is_free else choice)
        assert options.high[i] == (whole_options.last[v] if is_free else choice)
        assert options.last[i] == whole_options.last[v]
        assert (options.hull_low[i], options.hull_high[i]) == (whole_options.hull_low[v], whole_options.hull_high[v])
        network, whole = window.window.network, window.whole
        assert network.first[i] == (whole.first_vertex[v] if is_free else 1000 + choice)
        assert network.last[i] == (whole.last_vertex[v] if is_free else 1000 + choice)
    if inside:
        assert window.begin_s == min(cut.release[: len(inside)])
        assert window.end_s == max(cut.due[: len(inside)])


@settings(max_examples=examples(25), deadline=None)
@given(
    pipeline=random_pipelines(),
    seed=st.integers(0, 2**32 - 1),
    stretch=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    earlier=st.floats(0, 1),
)
def test_a_stretch_of_time_is_the_window_between_its_ends(
    pipeline: Pipeline, seed: int, stretch: tuple[float, float], earlier: float
) -> None:
    window = _CutWindow(pipeline, seed, 1.0, stretch)
    m, cut = window.size, window.window.graph
    found = list(window.window.nodes[:m]), list(cut.release[:m]), list(cut.due[:m]), list(cut.pred_node[: cut.pred[m]])
    ends = window.begin_s, window.end_s

    window.cut_stretch(round(earlier * window.begin))

    assert window.size == m
    assert found == (
        list(window.window.nodes[:m]), list(cut.release[:m]), list(cut.due[:m]), list(cut.pred_node[: cut.pred[m]])
    )  # fmt: skip
    assert ends == (window.begin_s, window.end_s)


@settings(max_examples=examples(20), deadline=None)
@given(pipeline=random_pipelines(), seed=st.integers(0, 2**32 - 1), share_free=st.sampled_from([0.3, 1.0]))
def test_a_windows_network_holds_each_operation_between_its_release_and_its_due_time(
    pipeline: Pipeline, seed: int, share_free: float
) -> None:
    window = _CutWindow(pipeline, seed, share_free)
    m, network, cut, tick_s = window.size, window.window.network, window.window.graph, window.whole.tick_s
    edges = list(zip(network.tail, network.head, network.latency, strict=True))[: window.num_edges]

    inner = [(i, j, gap) for i in range(m) for j, gap in _neighbours(cut.succ, cut.succ_node, cut.succ_latency, m)[i]]
    assert [(tail, head) for tail, head, _ in edges if tail < m and head < m] == [(i, j) for i, j, _ in inner]
    scattered = [
        ticks - int(gap / tick_s)
        for (tail, head, ticks), (_, _, gap) in zip(
            (edge for edge in edges if edge[0] < m and edge[1] < m), inner, strict=True
        )
    ]
    nodes = window.window.nodes
    assert scattered == [(nodes[i] * 7 + nodes[j] * 13) % JITTER_TICKS for i, j, _ in inner]
    assert [edge for edge in edges if edge[0] == m] == [(m, i, int(cut.release[i] / tick_s)) for i in range(m)]
    assert [edge for edge in edges if edge[1] == m + 1] == [
        (i, m + 1, int((window.end_s - cut.due[i]) / tick_s)) for i in range(m)
    ]
    assert len(edges) == len(inner) + 2 * m
    for v in range(m + 2):
        after = list(range(network.succ[v], network.succ[v + 1]))
        assert after == [e for e, (tail, _, _) in enumerate(edges) if tail == v]
        before = list(network.pred_edges[network.pred[v] : network.pred[v + 1]])
        assert sorted(before) == [e for e, (_, head, _) in enumerate(edges) if head == v]


@settings(max_examples=examples(20), deadline=None)
@given(pipeline=random_pipelines(), seed=st.integers(0, 2**32 - 1))
def test_a_hill_climb_never_costs_more_meets_the_deadline_and_uses_existing_options(
    pipeline: Pipeline, seed: int
) -> None:
    window = _CutWindow(pipeline, seed, 1.0)
    options = window.whole.options

    _, cost_j, _ = window.climb(seed % 1000)

    chosen = list(window.window.best[: window.size])
    assert cost_j <= window.plan.cost_j * (1 + 1e-12) + 1e-9
    assert cost_j == pytest.approx(sum(options.costs[k] for k in chosen), abs=1e-9)
    assert all(low <= k <= last for low, k, last in zip(options.low, chosen, options.last, strict=True))
    durations_s = np.empty(window.n)
    durations_s[window.problem.rounder.order] = [options.times[k] for k in chosen]
    assert timeline(window.graph, durations_s.tolist()).iteration_time_s <= window.deadline_s


@pytest.mark.parametrize(
    ("seed", "saved_j", "state"),
    [
        (0, 9.048002, 2072593469),
        (1, 7.76617, 1269136939),
        (2, 7.82946, 350669142),
        (3, 4.086526, 2094899423),
        (4, 0.0, 94592097),
        (5, 5.165893, 1276997602),
        (6, 11.672505, 1553850624),
        (7, 14.498237, 1686640221),
    ],
)
def test_hill_climbs_save_the_pinned_energy(seed: int, saved_j: float, state: int) -> None:
    """A heuristic search: update the figures when its moves change on purpose."""
    window = _CutWindow(plain_pipeline(2, 4, weights=(1.0, 1.1), latency_s=0.001), seed, 0.7)

    before_j, cost_j, after = window.climb(seed)

    assert before_j - cost_j == pytest.approx(saved_j, abs=1e-6)
    assert after == state


def _cheapest_j(problem: PlanningProblem, deadline_s: float) -> float:
    """Return the least effective energy of any choice of clocks by dynamic programming over undominated prefixes."""
    tables, graph = problem.tables, problem.graph
    assert graph.num_ranks == 1
    front = [(0.0, 0.0)]
    for c in tables.class_of:
        options = range(tables.start[c], tables.start[c + 1])
        more = sorted((t + tables.times_s[k], j + tables.costs_j[k]) for t, j in front for k in options)
        front, least_j = [], np.inf
        for time_s, cost_j in more:
            if time_s <= deadline_s and cost_j < least_j:
                front.append((time_s, cost_j))
                least_j = cost_j
    return min(cost_j for _, cost_j in front)


@pytest.mark.parametrize("fraction", [0.0, 0.11, 0.37, 0.5, 0.73, 0.9, 1.01])
def test_refinement_finds_the_optimal_plan_of_one_rank(fraction: float) -> None:
    problem = make_problem(*plain_pipeline(1, 4))
    deadline_s = problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)
    poor = problem.rounder.round_plan(problem.tables.fastest_s, deadline_s, slack_share=LATE, hull_first=False)

    better = refine(problem.rounder, problem.network, problem.tables, problem.graph, poor, deadline_s)

    assert better.cost_j <= _cheapest_j(problem, deadline_s) * 1.003
    assert better.makespan_s <= deadline_s


def test_more_passes_never_cost_more() -> None:
    problem = make_problem(*plain_pipeline(3, 5, weights=(1.0, 1.1, 0.9)))
    deadline_s = 1.07 * problem.min_time_s
    plan = problem.rounder.round_plan(problem.tables.fastest_s, deadline_s, slack_share=0.0, hull_first=False)

    costs_j = [plan.cost_j]
    for passes in (((BY_TIME, 4),), ((BY_TIME, 4), (BY_MICROBATCH, 12)), 3 * ((BY_TIME, 8), (BY_MICROBATCH, 12))):
        better: RoundedPlan = refine(
            problem.rounder, problem.network, problem.tables, problem.graph, plan, deadline_s, passes=passes
        )
        costs_j.append(better.cost_j)

    assert costs_j[0] > costs_j[1]
    assert all(first >= second for first, second in pairwise(costs_j[1:]))
