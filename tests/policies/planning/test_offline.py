"""The offline planner: baseline, target, frontier, and reproducible figures."""

from dataclasses import replace

import pytest

from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import TargetError
from gpuenergyd_policies.planning import compiled
from gpuenergyd_policies.planning.offline import _is_brief, plan_offline
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks
from tests.policies.planning.pipelines import plain_pipeline


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
