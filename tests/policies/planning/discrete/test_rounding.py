"""Rounded plans always meet the deadline, and refinement never makes them more expensive."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd_policies.planning.discrete.refinement import FULL_PASSES, LIGHT_PASSES, refine, windows_of_passes
from gpuenergyd_policies.planning.discrete.rounding import EARLY, LATE, MIDDLE
from gpuenergyd_policies.planning.discrete.rounding_kernels import MAX_ABSORB_SWEEPS
from gpuenergyd_policies.planning.problem import make_problem
from tests.policies.planning.pipelines import Pipeline, plain_pipeline, random_pipelines
from tests.support.examples import examples

ROUNDED = given(
    pipeline=random_pipelines(),
    fraction=st.floats(0.0, 1.2),
    slack_share=st.sampled_from([EARLY, MIDDLE, LATE]),
    hull_first=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)


@settings(max_examples=examples(80), deadline=None)
@ROUNDED
def test_makespan_never_exceeds_the_deadline_whatever_the_durations(
    pipeline: Pipeline, fraction: float, slack_share: float, *, hull_first: bool, seed: int
) -> None:
    """The theorem holds for any durations: not optimal, too long, or too short."""
    problem = make_problem(*pipeline)
    deadline_s = problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)
    durations_s = problem.tables.slowest_s * np.random.default_rng(seed).uniform(
        0.0, 2.0, len(pipeline[0].instructions)
    )

    plan = problem.rounder.round_plan(durations_s, deadline_s, slack_share=slack_share, hull_first=hull_first)

    assert timeline(pipeline[0], problem.tables.times_s[plan.options].tolist()).iteration_time_s == plan.makespan_s
    assert plan.makespan_s <= deadline_s
    assert plan.cost_j == pytest.approx(problem.tables.costs_j[plan.options].sum(), abs=1e-9)


def _slowly_rounded(
    pipeline: Pipeline, durations_s: list[float], due_s: list[float], *, slack_share: float, on_hull: bool
) -> list[int]:
    """Return the option of each node, implemented independently from the module's theory of operation."""
    graph, tables = pipeline[0], make_problem(*pipeline).tables
    nodes = list(make_problem(*pipeline).rounder.order)
    first = [int(tables.start[c]) for c in tables.class_of]
    last = [int(tables.start[c + 1]) - 1 for c in tables.class_of]
    hulls = [tables.hull_options[tables.hull_start[c] : tables.hull_start[c + 1]].tolist() for c in tables.class_of]

    def finishes_s(durations_s: list[float]) -> tuple[list[float], list[float]]:
        early, late = [0.0] * len(nodes), due_s[:]
        for v in nodes:
            early[v] = max((early[u] + gap for u, gap in graph.predecessors[v]), default=0.0) + durations_s[v]
        for v in reversed(nodes):
            late[v] = min([due_s[v], *(late[w] - durations_s[w] - gap for w, gap in graph.successors[v])])
        return early, late

    early_s, late_s = finishes_s(durations_s)
    latest_fast_s = finishes_s([float(tables.times_s[k]) for k in first])[1]
    finish_s, chosen = [0.0] * len(nodes), first[:]
    for v in nodes:
        goal_s = late_s[v] if slack_share == LATE else early_s[v] + slack_share * (late_s[v] - early_s[v])
        begin_s = max((finish_s[u] + gap for u, gap in graph.predecessors[v]), default=0.0)
        offered = hulls[v] if on_hull else range(first[v], last[v] + 1)
        fitting = [k for k in offered if begin_s + tables.times_s[k] <= min(goal_s, latest_fast_s[v])]
        chosen[v] = max(fitting, default=first[v])
        finish_s[v] = begin_s + float(tables.times_s[chosen[v]])
    for _ in range(MAX_ABSORB_SWEEPS):
        late_s = finishes_s([float(tables.times_s[k]) for k in chosen])[1]
        for v in nodes:
            begin_s = max((finish_s[u] + gap for u, gap in graph.predecessors[v]), default=0.0)
            while chosen[v] < last[v] and begin_s + tables.times_s[chosen[v] + 1] <= late_s[v]:
                chosen[v] += 1
            finish_s[v] = begin_s + float(tables.times_s[chosen[v]])
    return chosen


@settings(max_examples=examples(60), deadline=None)
@ROUNDED
def test_each_operation_takes_its_slowest_option_that_meets_its_goal_and_its_latest_finish(
    pipeline: Pipeline, fraction: float, slack_share: float, *, hull_first: bool, seed: int
) -> None:
    problem = make_problem(*pipeline)
    deadline_s = problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)
    tables = problem.tables
    share = np.random.default_rng(seed).uniform(0.0, 1.0, len(pipeline[0].instructions))
    durations_s = tables.fastest_s + share * (tables.slowest_s - tables.fastest_s)
    due_s = np.empty(problem.rounder.num_operations)
    due_s[problem.rounder.order] = problem.rounder.due_by(deadline_s).due

    plan = problem.rounder.round_plan(durations_s, deadline_s, slack_share=slack_share, hull_first=hull_first)

    assert plan.options.tolist() == _slowly_rounded(
        pipeline, durations_s.tolist(), due_s.tolist(), slack_share=slack_share, on_hull=hull_first
    )


def test_a_deadline_is_shortened_by_the_rounding_error_of_floating_point_sums_and_no_more() -> None:
    rounder = make_problem(*plain_pipeline(2, 3)).rounder

    due_s = list(rounder.due_by(3.0).due)

    assert len(due_s) == 12
    assert set(due_s) == {3.0 * (1.0 - 20 * 2.0**-52)}
    assert list(rounder.graph.due) == [0.0] * 12  # the graph without a deadline stays as it is


def test_the_kernel_graph_numbers_operations_by_earliest_start() -> None:
    graph, profile = plain_pipeline(2, 2, latency_s=0.001)
    rounder = make_problem(graph, profile).rounder
    position = {v: k for k, v in enumerate(rounder.order.tolist())}
    kernel = rounder.graph

    for v, k in position.items():
        before = range(kernel.pred[k], kernel.pred[k + 1])
        after = range(kernel.succ[k], kernel.succ[k + 1])
        assert [(kernel.pred_node[e], kernel.pred_latency[e]) for e in before] == [
            (position[u], latency_s) for u, latency_s in graph.predecessors[v]
        ]
        assert [(kernel.succ_node[e], kernel.succ_latency[e]) for e in after] == [
            (position[w], latency_s) for w, latency_s in graph.successors[v]
        ]
        assert all(position[u] < k for u, _ in graph.predecessors[v])


@settings(max_examples=examples(30), deadline=None)
@given(pipeline=random_pipelines(), fraction=st.floats(0.0, 1.0))
def test_no_single_instruction_of_a_rounded_plan_could_be_slower(pipeline: Pipeline, fraction: float) -> None:
    graph, _ = pipeline
    problem = make_problem(*pipeline)
    tables = problem.tables
    deadline_s = problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)
    plan = problem.rounder.round_plan(tables.fastest_s, deadline_s, slack_share=LATE, hull_first=False)
    durations_s = tables.times_s[plan.options]

    for v in range(len(graph.instructions)):
        if plan.options[v] == tables.start[tables.class_of[v] + 1] - 1:
            continue
        slower_s = durations_s.copy()
        slower_s[v] = tables.times_s[plan.options[v] + 1]
        assert timeline(graph, slower_s.tolist()).iteration_time_s > deadline_s * (1 - 1e-9)


@settings(max_examples=examples(40), deadline=None)
@given(pipeline=random_pipelines(), fraction=st.floats(0.0, 1.0), passes=st.sampled_from([LIGHT_PASSES, FULL_PASSES]))
def test_refinement_meets_the_deadline_and_never_costs_more(
    pipeline: Pipeline, fraction: float, passes: tuple[tuple[bool, int], ...]
) -> None:
    graph, _ = pipeline
    problem = make_problem(*pipeline)
    deadline_s = problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)
    plan = problem.rounder.round_plan(problem.tables.fastest_s, deadline_s, slack_share=LATE, hull_first=True)

    better = refine(problem.rounder, problem.network, plan, deadline_s, windows_of_passes(problem.rounder, passes))

    assert better.cost_j <= plan.cost_j * (1 + 1e-12) + 1e-9
    assert better.cost_j == pytest.approx(problem.tables.costs_j[better.options].sum(), abs=1e-9)
    assert timeline(graph, problem.tables.times_s[better.options].tolist()).iteration_time_s == better.makespan_s
    assert better.makespan_s <= deadline_s


def test_refinement_closes_most_of_a_poor_plans_gap() -> None:
    graph, profile = plain_pipeline(4, 12, weights=(1.0, 1.15, 0.9, 1.05))
    problem = make_problem(graph, profile)
    deadline_s = 1.05 * problem.min_time_s
    poor = problem.rounder.round_plan(problem.tables.fastest_s, deadline_s, slack_share=EARLY, hull_first=False)
    sweep = problem.sweep(np.array([deadline_s]), stop_early=True)
    bound_j = problem.cost_bounds_j(sweep, np.array([0]), np.array([deadline_s]))[0]

    better = refine(problem.rounder, problem.network, poor, deadline_s, windows_of_passes(problem.rounder, FULL_PASSES))

    assert better.cost_j - bound_j <= 0.3 * (poor.cost_j - bound_j)
