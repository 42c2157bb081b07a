"""Long 1F1B pipelines planned from a short one: on time, with a bound, and nearly as good as the full solution."""

import pytest

from gpuenergyd.core.pipeline.graph import dependency_graph, gpipe, one_forward_one_backward
from gpuenergyd.errors import TargetError
from gpuenergyd_policies.planning.compression import LONG_PIPELINE, is_periodic, solve_periodic
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks
from tests.policies.planning.pipelines import plain_pipeline


@pytest.mark.parametrize("slowdown", [0.0, 0.02, 0.1, 1.0])
@pytest.mark.parametrize("extra_inflight", [(), (2, 1, 0)])
def test_a_compressed_plan_meets_the_deadline_and_is_nearly_as_good_as_the_full_one(
    slowdown: float, extra_inflight: tuple[int, ...]
) -> None:
    _, profile = plain_pipeline(3, 1, weights=(1.0, 1.1, 0.95))
    schedule = one_forward_one_backward(3, 60, extra_inflight)
    graph = dependency_graph(schedule, communication_latency_s=0.001)
    deadline_s = (1 + slowdown) * min_iteration_time_s(graph, profile)
    whole = solve(graph, profile, deadline_s=deadline_s)

    repeated = solve_periodic(schedule, graph, profile, deadline_s=deadline_s, communication_latency_s=0.001)

    evaluated = evaluate_clocks(graph, profile, repeated.sm_clocks_mhz)
    assert evaluated.iteration_time_s == repeated.iteration_time_s <= deadline_s
    assert repeated.energy_j == pytest.approx(evaluated.energy_j, rel=1e-12)
    assert repeated.lower_bound_j <= whole.energy_j
    assert repeated.energy_j <= whole.energy_j * (1 + 4e-3)


def test_with_a_straggler_the_plan_uses_its_time() -> None:
    _, profile = plain_pipeline(3, 1)
    schedule = one_forward_one_backward(3, 60)
    graph = dependency_graph(schedule)

    repeated = solve_periodic(schedule, graph, profile, deadline_s=1e3, forced=True)

    assert repeated.iteration_time_s == repeated.slowest_time_s


def test_deadline_below_t_min_is_refused() -> None:
    graph, profile = plain_pipeline(3, 60)

    with pytest.raises(TargetError, match="T_min"):
        solve_periodic(one_forward_one_backward(3, 60), graph, profile, deadline_s=1.0)


def test_only_long_1f1b_pipelines_are_compressed() -> None:
    num_microbatches = LONG_PIPELINE // 4 + 1
    long_1f1b, long_gpipe = one_forward_one_backward(2, num_microbatches), gpipe(2, num_microbatches)
    short = one_forward_one_backward(2, 100)

    assert is_periodic(long_1f1b, dependency_graph(long_1f1b))
    assert not is_periodic(long_gpipe, dependency_graph(long_gpipe))
    assert not is_periodic(short, dependency_graph(short))
    assert not is_periodic(None, dependency_graph(long_1f1b))
