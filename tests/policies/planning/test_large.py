"""Plans of large pipelines: on time, above a proven bound, and nearly as good as the exact sweep's."""

import pytest

from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.schedules import zero_bubble_h1
from gpuenergyd_policies.planning import frontier, large
from gpuenergyd_policies.planning.compiled import IS_COMPILED
from gpuenergyd_policies.planning.discrete.refinement import OperationWindow, windows_of_passes
from gpuenergyd_policies.planning.discrete.rounding import Rounder
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.large import refined
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks
from gpuenergyd_policies.planning.problem import Effort, make_problem
from tests.policies.planning.orders.cases import split_profile
from tests.policies.planning.profiles import forward_backward_profile

PROFILE = split_profile([1.0, 1.1, 0.95])
GRAPHS = {
    "1f1b": dependency_graph(one_forward_one_backward(3, 24)),
    "zb-h1": dependency_graph(zero_bubble_h1(3, 24), communication_latency_s=0.01),
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
@pytest.mark.parametrize("slowdown", [0.0, 0.05])
def test_averaged_flows_plan_nearly_as_well_as_the_exact_sweep(
    graph: DependencyGraph, slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadline_s = (1 + slowdown) * min_iteration_time_s(graph, PROFILE)
    exact = solve(graph, PROFILE, deadline_s=deadline_s)

    monkeypatch.setattr(frontier, "TOO_LARGE", 10)
    averaged = solve(graph, PROFILE, deadline_s=deadline_s)

    evaluated = evaluate_clocks(graph, PROFILE, averaged.sm_clocks_mhz)
    assert evaluated.iteration_time_s <= deadline_s
    assert evaluated.energy_j == pytest.approx(averaged.energy_j, rel=1e-9)
    assert averaged.lower_bound_j <= exact.energy_j * (1 + 1e-9)
    if IS_COMPILED:  # plain Python averages too few flows
        assert averaged.energy_j <= 1.02 * exact.energy_j
        assert averaged.energy_j <= 1.02 * averaged.lower_bound_j


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_refinement_goes_on_after_a_sample_of_windows_where_it_gains(
    *, is_worth_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "LEAST_WINDOW", 24)
    monkeypatch.setattr(large, "WINDOW_PER_RANK", 8)
    monkeypatch.setattr(large, "NUM_SAMPLED", 2)
    profile = forward_backward_profile([1.0, 1.2, 0.9])
    graph = dependency_graph(one_forward_one_backward(3, 24))
    deadline_s = 1.05 * min_iteration_time_s(graph, profile)
    problem = make_problem(graph, profile)
    middle = 0.5 * (problem.tables.fastest_s + problem.tables.slowest_s)
    rounded = problem.rounder.round_plan(middle, deadline_s, slack_share=1.0, hull_first=False)

    excess_j = 0.0 if is_worth_it else 1e12  # what is worth it closes a tenth of this
    found = refined(problem, rounded, deadline_s, excess_j=excess_j)
    whole = refined(problem, rounded, deadline_s, excess_j=0.0)

    assert found.makespan_s <= deadline_s
    assert whole.cost_j < rounded.cost_j
    assert found.cost_j == whole.cost_j if is_worth_it else found.cost_j > whole.cost_j


def test_a_prompt_plan_is_the_full_one_but_for_pipelines_of_many_stages_or_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile = forward_backward_profile([1.0, 1.2, 0.9])
    graph = dependency_graph(one_forward_one_backward(3, 24))
    deadline_s = 1.02 * min_iteration_time_s(graph, profile)

    def plan(effort: Effort) -> frontier.SolvedPlan:
        return solve(graph, profile, deadline_s=deadline_s, effort=effort)

    assert plan(Effort.PROMPT) == plan(Effort.FULL)
    monkeypatch.setattr(frontier, "TOO_LARGE", 10)
    monkeypatch.setattr(frontier, "REFINED_GAP", 0.0)
    monkeypatch.setattr(large, "LEAST_WINDOW", 24)
    monkeypatch.setattr(large, "WINDOW_PER_RANK", 8)  # a window of 24 instructions for three stages
    assert plan(Effort.PROMPT) == plan(Effort.FULL)


def test_windows_of_a_prompt_plan_stay_small_with_many_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = forward_backward_profile([1.0, 1.2, 0.9])
    graph = dependency_graph(one_forward_one_backward(3, 24))
    monkeypatch.setattr(large, "LEAST_WINDOW", 12)
    monkeypatch.setattr(large, "WINDOW_PER_RANK", 16)  # without hurry 48 instructions for three stages
    monkeypatch.setattr(large, "LARGEST_WINDOW", 96)
    deadline_s = 1.05 * min_iteration_time_s(graph, profile)
    problem = make_problem(graph, profile)
    middle = 0.5 * (problem.tables.fastest_s + problem.tables.slowest_s)
    rounded = problem.rounder.round_plan(middle, deadline_s, slack_share=1.0, hull_first=False)
    sizes: dict[bool, set[int]] = {True: set(), False: set()}

    def recorded(rounder: Rounder, passes: tuple[tuple[bool, int], ...]) -> list[OperationWindow]:
        sizes[is_prompt].update(size for _, size in passes)
        return windows_of_passes(rounder, passes)

    monkeypatch.setattr(large, "windows_of_passes", recorded)
    for is_prompt in (True, False):
        found = refined(problem, rounded, deadline_s, excess_j=1e-9, is_prompt=is_prompt)
        assert found.makespan_s <= deadline_s
        assert found.cost_j < rounded.cost_j

    assert max(sizes[True]) <= 24
    assert min(sizes[False]) >= 48
