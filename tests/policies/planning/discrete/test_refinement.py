"""Refinement: windows cover the pipeline, are cut out of it exactly, and end with a plan no more expensive."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd_policies.planning.compiled import ints
from gpuenergyd_policies.planning.discrete.refinement import (
    BY_MICROBATCH,
    BY_TIME,
    FULL_PASSES,
    SEED,
    OperationWindow,
    refine,
    windows_of_passes,
    working_memory,
)
from gpuenergyd_policies.planning.discrete.rounding import LATE, RoundedPlan
from gpuenergyd_policies.planning.discrete.window_kernels import (
    _find_finishes,
    _find_latest_finishes,
    climb,
    cut_network,
    free_window,
)
from gpuenergyd_policies.planning.problem import PlanningProblem, make_problem
from gpuenergyd_policies.planning.pseudo_random import next_random
from tests.policies.planning.pipelines import Pipeline, plain_pipeline, random_pipelines
from tests.support.examples import examples


@pytest.mark.parametrize(
    ("passes", "windows"),
    [
        (((BY_TIME, 4),), [(0, 4, 0, 3), (2, 6, 0, 3), (4, 8, 0, 3), (6, 10, 0, 3), (8, 12, 0, 3), (10, 12, 0, 3)]),
        (((BY_TIME, 96),), [(0, 12, 0, 3), (6, 12, 0, 3)]),  # at most all
        (((BY_TIME, 8), (BY_TIME, 8)), [
            *((0, 8, 0, 3), (4, 12, 0, 3), (8, 12, 0, 3)),
            # the second of two passes begins half a window earlier, and what lies before the pipeline is cut off
            *((0, 4, 0, 3), (0, 8, 0, 3), (4, 12, 0, 3), (8, 12, 0, 3)),
        ]),
        (((BY_MICROBATCH, 1),), [(0, 5, 0, 1), (1, 9, 1, 2), (7, 12, 2, 3)]),  # at least one microbatch
        (((BY_MICROBATCH, 8),), [(0, 9, 0, 2), (1, 12, 1, 3), (7, 12, 2, 3)]),
    ],
)  # fmt: skip
def test_windows_cover_the_pipeline_and_overlap_by_half(
    passes: tuple[tuple[bool, int], ...], windows: list[tuple[int, int, int, int]]
) -> None:
    rounder = make_problem(*plain_pipeline(2, 3)).rounder
    assert rounder.microbatches.tolist() == [0, 1, 0, 0, 0, 1, 1, 2, 1, 2, 2, 2]

    assert windows_of_passes(rounder, passes) == windows


def test_pseudo_random_choices_repeat_in_every_run() -> None:
    states = [SEED]
    for _ in range(3):
        states.append(next_random(states[-1]))

    assert states == [1, 48271, 182605794, 1291394886]


class _CutWindow:
    """A plan, and a window that the kernels cut out of it."""

    def __init__(self, pipeline: Pipeline, seed: int, ends: tuple[float, float]) -> None:
        self.graph, profile = pipeline
        self.problem: PlanningProblem = make_problem(self.graph, profile)
        problem, rng = self.problem, np.random.default_rng(seed)
        rounder, tables = problem.rounder, problem.tables
        n = rounder.num_operations
        self.deadline_s = problem.min_time_s + rng.uniform(0, 1.1) * (problem.slowest_time_s - problem.min_time_s)
        plan = rounder.round_plan(
            rng.uniform(tables.fastest_s, tables.slowest_s + 1e-9), self.deadline_s, slack_share=LATE, hull_first=False
        )
        self.best = ints(plan.options[rounder.order])
        first, last = sorted(round(share * (n - 1)) for share in ends)
        most = int(rounder.microbatches.max())
        self.own = OperationWindow(first, last + 1, int(rng.integers(0, most + 1)), most + 1)
        self.whole, self.window = working_memory(rounder, problem.network, self.deadline_s, n)
        self.trial = rounder.trial
        for values in self.trial:  # left over from an earlier window
            values[:] = np.full(n, 7) if values is self.trial.choice else np.full(n, 7.0)
        _find_latest_finishes(self.whole, self.best, self.trial, self.window)
        _find_finishes(0, first, self.whole, self.best, self.trial)
        self.cost_j = free_window(*self.own, self.whole, self.best, self.window)
        self.num_edges, self.length_s = cut_network(first, last + 1, self.whole, self.trial, self.window)

    def climb(self, seed: int) -> tuple[float, float, int]:
        """Climb from the plan's own choice; return its cost before and after, and the generator's last state."""
        options = self.window.options
        state = climb(
            self.own.first, self.own.last, self.whole.graph, options, self.best, self.trial, seed, self.cost_j
        )
        return self.cost_j, sum(options.costs[self.best[v]] for v in range(self.own.first, self.own.last)), state


@settings(max_examples=examples(30), deadline=None)
@given(pipeline=random_pipelines(), seed=st.integers(0, 2**32 - 1), ends=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_a_windows_network_holds_each_operation_between_its_release_and_its_due_time(
    pipeline: Pipeline, seed: int, ends: tuple[float, float]
) -> None:
    window = _CutWindow(pipeline, seed, ends)
    whole, network, (first, last, free_from, free_to) = window.whole, window.window.network, window.own
    graph, times_s, m = whole.graph, [whole.options.times[k] for k in window.best], last - first
    before, after = (
        [[(node[e], gap[e]) for e in range(start[v], start[v + 1])] for v in range(len(times_s))]
        for start, node, gap in (
            (graph.pred, graph.pred_node, graph.pred_latency), (graph.succ, graph.succ_node, graph.succ_latency),
        )
    )  # fmt: skip
    finish_s, latest_s = [0.0] * len(times_s), list(graph.due)
    for v in range(len(times_s)):
        finish_s[v] = max((finish_s[u] + gap for u, gap in before[v]), default=0.0) + times_s[v]
    for v in reversed(range(len(times_s))):
        latest_s[v] = min([graph.due[v], *(latest_s[w] - times_s[w] - gap for w, gap in after[v])])
    release_s = [max((finish_s[u] + gap for u, gap in before[v] if u < first), default=0.0) for v in range(first, last)]
    due_s = [
        min([graph.due[v], *(latest_s[w] - times_s[w] - gap for w, gap in after[v] if w >= last)])
        for v in range(first, last)
    ]

    edges = list(zip(network.tail, network.head, network.latency, strict=True))[: window.num_edges]
    tick_s = whole.tick_s
    inner = [(v - first, w - first, gap) for v in range(first, last) for w, gap in after[v] if w < last]
    assert [(u, v) for u, v, _ in edges if u < m and v < m] == [(u, v) for u, v, _ in inner]
    for (_, _, ticks), (u, v, gap) in zip((e for e in edges if e[0] < m and e[1] < m), inner, strict=True):
        assert ticks - int(gap / tick_s) == ((u + first) * 7 + (v + first) * 13) % whole.jitter_ticks
    assert [e for e in edges if e[0] == m] == [(m, i, int(release_s[i] / tick_s)) for i in range(m)]
    assert [e[2] for e in edges if e[1] == m + 1] == pytest.approx(
        [(window.deadline_s - due_s[i]) / tick_s for i in range(m)], abs=1.0
    )
    assert len(edges) == len(inner) + 2 * m
    assert window.length_s == pytest.approx(max(due_s) - min(release_s))
    for v in range(m + 2):
        assert list(range(network.succ[v], network.succ[v + 1])) == [e for e, own in enumerate(edges) if own[0] == v]
        heads = list(network.pred_edges[network.pred[v] : network.pred[v + 1]])
        assert sorted(heads) == [e for e, own in enumerate(edges) if own[1] == v]
    for i, v in enumerate(range(first, last)):
        vertices = network.ticks[network.first[i] : network.last[i] + 1]
        if free_from <= whole.microbatches[v] < free_to and whole.options.low[v] < whole.options.high[v]:
            assert (network.first[i], network.last[i]) == (whole.first_vertex[v], whole.last_vertex[v])
        else:
            assert list(vertices) == [max(1, round(times_s[v] / tick_s))]


@settings(max_examples=examples(20), deadline=None)
@given(pipeline=random_pipelines(), seed=st.integers(0, 2**32 - 1))
def test_a_hill_climb_never_costs_more_meets_the_deadline_and_uses_existing_options(
    pipeline: Pipeline, seed: int
) -> None:
    window = _CutWindow(pipeline, seed, (0.0, 1.0))
    options = window.whole.options

    before_j, cost_j, _ = window.climb(seed % 1000 + 1)

    chosen = list(window.best)
    assert cost_j <= before_j * (1 + 1e-12) + 1e-9
    assert all(low <= k <= last for low, k, last in zip(options.low, chosen, options.last, strict=True))
    durations_s = np.empty(len(chosen))
    durations_s[window.problem.rounder.order] = [options.times[k] for k in chosen]
    assert timeline(window.graph, durations_s.tolist()).iteration_time_s <= window.deadline_s


@pytest.mark.parametrize(
    ("seed", "saved_j", "state"),
    [
        (1, 2.921118, 78366493),
        (2, 16.832437, 309504343),
        (3, 0.0309, 363670961),
        (4, 0.0, 1771082804),
        (6, 11.072694, 598388793),
        (8, 1.335933, 26591250),
    ],
)
def test_hill_climbs_save_the_pinned_energy(seed: int, saved_j: float, state: int) -> None:
    """A heuristic search: update the figures when its moves change on purpose."""
    window = _CutWindow(plain_pipeline(2, 4, weights=(1.0, 1.1), latency_s=0.001), seed, (0.2, 0.9))

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

    better = refine(problem.rounder, problem.network, poor, deadline_s, windows_of_passes(problem.rounder, FULL_PASSES))

    assert better.cost_j <= _cheapest_j(problem, deadline_s) * 1.003
    assert better.makespan_s <= deadline_s


def test_more_passes_never_cost_more() -> None:
    problem = make_problem(*plain_pipeline(3, 5, weights=(1.0, 1.1, 0.9)))
    deadline_s = 1.07 * problem.min_time_s
    plan = problem.rounder.round_plan(problem.tables.fastest_s, deadline_s, slack_share=0.0, hull_first=False)

    costs_j = [plan.cost_j]
    for passes in (((BY_TIME, 4),), ((BY_TIME, 4), (BY_MICROBATCH, 12)), 3 * ((BY_TIME, 8), (BY_MICROBATCH, 12))):
        better: RoundedPlan = refine(
            problem.rounder, problem.network, plan, deadline_s, windows_of_passes(problem.rounder, passes)
        )
        costs_j.append(better.cost_j)

    assert costs_j[0] > costs_j[1]
    assert all(first >= second for first, second in pairwise(costs_j[1:]))
