"""The offline planner: baseline, target, frontier, and reproducible figures."""

from dataclasses import replace

import pytest

from gpuenergyd.core.pipeline.graph import DependencyGraph, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.schedules import zero_bubble_h1
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import TargetError
from gpuenergyd_plan.offline.bubble_aware import _is_brief, plan_offline
from gpuenergyd_policies.planning import compiled, frontier, large
from gpuenergyd_policies.planning.compiled import IS_COMPILED
from gpuenergyd_policies.planning.discrete.refinement import OperationWindow, windows_of_passes
from gpuenergyd_policies.planning.discrete.rounding import Rounder
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.large import refined
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks
from gpuenergyd_policies.planning.problem import Effort, make_problem
from tests.policies.planning.orders.cases import split_profile
from tests.policies.planning.pipelines import plain_pipeline
from tests.policies.planning.profiles import forward_backward_profile

PROFILE = split_profile([1.0, 1.1, 0.95])
GRAPHS = {
    "1f1b": dependency_graph(one_forward_one_backward(3, 24)),
    "zb-h1": dependency_graph(zero_bubble_h1(3, 24), communication_latency_s=0.01),
}


def _request(target: PerformanceTarget, *, want_frontier: bool = False) -> OfflineRequest:
    graph, profile = plain_pipeline(4, 8, weights=(1.0, 1.1, 0.9, 1.0))
    return OfflineRequest(
        name="plain", profile=profile, schedule=None, graph=graph, target=target, want_frontier=want_frontier
    )


def test_zero_slowdown_plan_saves_energy_and_takes_no_longer_than_full_speed() -> None:
    request = _request(PerformanceTarget())
    full_speed = baseline(request.graph, request.profile)

    plan = plan_offline(request)

    evaluated = evaluate_clocks(
        request.graph, request.profile, [plan.sm_clocks_mhz[i] for i in request.graph.instructions]
    )
    assert plan.baseline_time_s == full_speed.iteration_time_s
    assert plan.baseline_energy_j == full_speed.energy_j
    assert plan.iteration_time_s == evaluated.iteration_time_s <= full_speed.iteration_time_s
    assert plan.energy_j == pytest.approx(evaluated.energy_j, rel=1e-12)
    assert plan.lower_bound_j is not None
    assert plan.lower_bound_j <= plan.energy_j < plan.baseline_energy_j
    assert [i for order in plan.orders for i in order] == list(request.graph.instructions)


def test_frontier_of_an_offline_plan_ends_at_the_least_energy() -> None:
    plan = plan_offline(_request(PerformanceTarget(), want_frontier=True))

    energies_j = [point.energy_j for point in plan.frontier]
    assert len(plan.frontier) > 20
    assert energies_j == sorted(energies_j, reverse=True)
    assert plan.frontier[0].iteration_time_s <= plan.baseline_time_s


def test_straggler_makes_slowness_free_up_to_its_time() -> None:
    alone = plan_offline(_request(PerformanceTarget()))
    straggler_s = 1.3 * alone.baseline_time_s

    waiting = plan_offline(_request(PerformanceTarget(straggler_time_s=straggler_s)))

    assert alone.baseline_time_s < waiting.iteration_time_s <= straggler_s
    assert sum(waiting.sm_clocks_mhz.values()) < sum(alone.sm_clocks_mhz.values())


def test_more_slowdown_never_costs_energy() -> None:
    energies_j = [
        plan_offline(_request(PerformanceTarget(max_slowdown_ratio=ratio))).energy_j for ratio in (0, 0.02, 0.1, 0.5, 2)
    ]

    assert energies_j == sorted(energies_j, reverse=True)


def test_an_impossible_target_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PerformanceTarget, "iteration_time_s", lambda _target, baseline_s: 0.5 * baseline_s)

    with pytest.raises(TargetError, match="T_min"):
        plan_offline(_request(PerformanceTarget()))


@pytest.mark.skipif(not compiled.IS_COMPILED, reason="numba is not installed or is disabled")
@pytest.mark.parametrize("max_slowdown_ratio", [0.0, 0.03])
def test_a_small_plan_is_the_same_compiled_and_in_plain_python(max_slowdown_ratio: float) -> None:
    request = _request(PerformanceTarget(max_slowdown_ratio=max_slowdown_ratio), want_frontier=True)
    compiled._numba()  # a process that has loaded numba uses compiled kernels

    with compiled.plain_python():
        plain = plan_offline(request)
    quick = plan_offline(request)

    assert replace(plain, solve_cpu_s=0.0, compile_cpu_s=0.0) == replace(quick, solve_cpu_s=0.0, compile_cpu_s=0.0)


def test_only_small_plans_without_a_search_are_brief() -> None:
    small = _request(PerformanceTarget())
    graph, profile = plain_pipeline(4, 13, weights=(1.0, 1.1, 0.9, 1.0))

    assert _is_brief(small)
    assert not _is_brief(replace(small, graph=graph, profile=profile))
    assert not any(
        _is_brief(replace(small, **search))
        for search in ({"is_flattest": True}, {"max_switches": 3}, {"switch_latency_s": 0.01}, {"order_limits": (4,)})
    )


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
