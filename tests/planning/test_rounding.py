"""Rounded plans are never late and refinement never makes them dearer, whatever durations they start from."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.timeline import timeline
from gpuenergyd_policies.planning.problem import make_problem
from gpuenergyd_policies.planning.refinement import FULL_PASSES, LIGHT_PASSES, refine
from gpuenergyd_policies.planning.rounding import EARLY, LATE, MIDDLE
from tests.planning.pipelines import Pipeline, plain_pipeline, random_pipelines


@settings(max_examples=80, deadline=None)
@given(
    pipeline=random_pipelines(),
    fraction=st.floats(0.0, 1.2),
    wish=st.sampled_from([EARLY, MIDDLE, LATE]),
    hull_first=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_makespan_never_exceeds_the_deadline_whatever_the_durations(
    pipeline: Pipeline, fraction: float, wish: float, *, hull_first: bool, seed: int
) -> None:
    """The theorem holds for any wish: durations that were never optimal, too long, or too short."""
    problem = make_problem(*pipeline)
    deadline_s = problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)
    durations_s = problem.tables.slowest_s * np.random.default_rng(seed).uniform(
        0.0, 2.0, len(pipeline[0].instructions)
    )

    plan = problem.rounder.round_plan(durations_s, deadline_s, wish=wish, hull_first=hull_first)

    assert timeline(pipeline[0], problem.tables.times_s[plan.options].tolist()).iteration_time_s == plan.makespan_s
    assert plan.makespan_s <= deadline_s
    assert plan.cost_j == pytest.approx(problem.tables.costs_j[plan.options].sum(), abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(pipeline=random_pipelines(), fraction=st.floats(0.0, 1.0))
def test_no_instruction_of_a_rounded_plan_could_be_slower(pipeline: Pipeline, fraction: float) -> None:
    graph, _ = pipeline
    problem = make_problem(*pipeline)
    tables = problem.tables
    deadline_s = problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)
    plan = problem.rounder.round_plan(tables.fastest_s, deadline_s, wish=LATE, hull_first=False)
    durations_s = tables.times_s[plan.options]

    for v in range(len(graph.instructions)):
        if plan.options[v] == tables.start[tables.class_of[v] + 1] - 1:
            continue
        slower_s = durations_s.copy()
        slower_s[v] = tables.times_s[plan.options[v] + 1]
        assert timeline(graph, slower_s.tolist()).iteration_time_s > deadline_s * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(pipeline=random_pipelines(), fraction=st.floats(0.0, 1.0), passes=st.sampled_from([LIGHT_PASSES, FULL_PASSES]))
def test_refinement_is_never_late_and_never_dearer(
    pipeline: Pipeline, fraction: float, passes: tuple[tuple[int, int], ...]
) -> None:
    graph, _ = pipeline
    problem = make_problem(*pipeline)
    deadline_s = problem.min_time_s + fraction * (problem.slowest_time_s - problem.min_time_s)
    plan = problem.rounder.round_plan(problem.tables.fastest_s, deadline_s, wish=LATE, hull_first=True)

    better = refine(problem.rounder, problem.network, problem.tables, graph, plan, deadline_s, passes=passes)

    assert better.cost_j <= plan.cost_j * (1 + 1e-12) + 1e-9
    assert better.cost_j == pytest.approx(problem.tables.costs_j[better.options].sum(), abs=1e-9)
    assert timeline(graph, problem.tables.times_s[better.options].tolist()).iteration_time_s == better.makespan_s
    assert better.makespan_s <= deadline_s


def test_refinement_closes_most_of_a_poor_plans_gap() -> None:
    graph, profile = plain_pipeline(4, 12, weights=(1.0, 1.15, 0.9, 1.05))
    problem = make_problem(graph, profile)
    deadline_s = 1.05 * problem.min_time_s
    poor = problem.rounder.round_plan(problem.tables.fastest_s, deadline_s, wish=EARLY, hull_first=False)
    sweep = problem.sweep(np.array([deadline_s]), stop_early=True)
    bound_j = problem.cost_bounds_j(sweep, np.array([0]), np.array([deadline_s]))[0]

    better = refine(problem.rounder, problem.network, problem.tables, graph, poor, deadline_s)

    assert better.cost_j - bound_j <= 0.3 * (poor.cost_j - bound_j)
