"""Plans under a power cap: they stay below it at every instant, and no bound or usual way contradicts them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.power_swing import PowerWave, power_wave
from gpuenergyd.core.pipeline.timeline import timeline
from gpuenergyd.core.policy_api.policy import OfflineRequest, PowerCap
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import TargetError, UsageError
from gpuenergyd_other_policies.uniform import plan_offline as plan_uniform
from gpuenergyd_plan.offline.bubble_aware import plan_offline
from gpuenergyd_plan.offline.under_cap import CappedProblem
from gpuenergyd_policies.full_speed import plan_offline as plan_full_speed
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks
from tests.policies.planning.pipelines import plain_pipeline
from tests.support.examples import examples

WEIGHTS = (1.0, 1.1, 0.9, 1.0)


def _request(cap: PowerCap | None, *, num_microbatches: int = 8) -> OfflineRequest:
    graph, profile = plain_pipeline(4, num_microbatches, weights=WEIGHTS)
    return OfflineRequest("plain", profile, None, graph, PerformanceTarget(), power_cap=cap)


def _peak_by_sampling(request: OfflineRequest, clocks: list[int], window_s: float) -> float:
    """Return the largest power, or mean power in a window, computed from the instructions alone."""
    evaluated = evaluate_clocks(request.graph, request.profile, clocks)
    spans, end_s = evaluated.timeline.spans, evaluated.iteration_time_s
    options = [
        request.profile[i.instruction_class].at_clock(mhz)
        for i, mhz in zip(request.graph.instructions, clocks, strict=True)
    ]

    def energy_until_j(at_s: float) -> float:
        whole, rest_s = divmod(at_s, end_s)
        own_j = [
            o.energy_j * min(1.0, max(0.0, (rest_s - s.start_s) / o.time_s))
            for o, s in zip(options, spans, strict=True)
        ]
        busy_s = sum(min(max(rest_s - s.start_s, 0.0), s.duration_s) for s in spans)
        waited_s = request.graph.num_ranks * rest_s - busy_s
        return whole * evaluated.energy_j + sum(own_j) + request.profile.blocking_power_w * waited_s

    length_s = window_s or end_s * 1e-6
    ends_s = [time_s for span in spans for time_s in (span.start_s, span.end_s)]
    begins_s = [begin_s % end_s for time_s in ends_s for begin_s in (time_s + 1e-9, time_s - length_s)]
    return max((energy_until_j(at_s + length_s) - energy_until_j(at_s)) / length_s for at_s in begins_s)


@pytest.mark.parametrize("ratio", [0.6, 0.75, 0.9])
@pytest.mark.parametrize("window_s", [0.0, 0.05, 10.0])
def test_a_plan_stays_below_the_cap_and_no_faster_than_the_bound(ratio: float, window_s: float) -> None:
    problem = CappedProblem(*plain_pipeline(4, 8, weights=WEIGHTS))
    cap = PowerCap(ratio * problem.full_speed.wave.peak_w, window_s)
    request = _request(cap)

    plan = plan_offline(request)

    clocks = [plan.sm_clocks_mhz[i] for i in request.graph.instructions]
    replayed = evaluate_clocks(request.graph, request.profile, clocks)
    assert plan.power is not None
    assert (plan.iteration_time_s, plan.energy_j) == pytest.approx((replayed.iteration_time_s, replayed.energy_j))
    assert _peak_by_sampling(request, clocks, window_s) <= cap.power_w * (1 + 1e-6)
    assert plan.power.peak_w == pytest.approx(_peak_by_sampling(request, clocks, window_s), rel=1e-3)
    assert plan.power.mean_w == pytest.approx(replayed.energy_j / replayed.iteration_time_s)
    assert plan.power.time_bound_s <= plan.iteration_time_s * (1 + 1e-9)
    assert plan.lower_bound_j is not None
    assert 0.5 * plan.energy_j < plan.lower_bound_j <= plan.energy_j * (1 + 1e-9)
    for usual_s in (plan.power.single_clock_time_s, plan.power.equal_limits_time_s):
        assert usual_s is None or plan.iteration_time_s <= usual_s * (1 + 1e-9)


def test_half_of_the_time_that_one_locked_clock_costs_is_avoided() -> None:
    problem = CappedProblem(*plain_pipeline(4, 8, weights=WEIGHTS))
    avoided = []
    for ratio in (0.7, 0.8, 0.9):
        plan = plan_offline(_request(PowerCap(ratio * problem.full_speed.wave.peak_w)))
        assert plan.power is not None
        assert plan.power.single_clock_time_s is not None
        longer_s = plan.power.single_clock_time_s - plan.baseline_time_s
        avoided.append(1 - (plan.iteration_time_s - plan.baseline_time_s) / longer_s)
    assert min(avoided) >= 0.5


def test_a_cap_above_the_peak_costs_no_time_and_a_longer_window_none_either() -> None:
    full_speed = CappedProblem(*plain_pipeline(4, 8, weights=WEIGHTS)).full_speed
    loose = plan_offline(_request(PowerCap(2 * full_speed.wave.peak_w)))
    instant, windowed = (
        plan_offline(_request(PowerCap(0.8 * full_speed.wave.peak_w, window_s))) for window_s in (0.0, 0.1)
    )

    assert loose.iteration_time_s == pytest.approx(full_speed.iteration_time_s)
    assert loose.energy_j < full_speed.wave.energy_j
    assert windowed.iteration_time_s <= instant.iteration_time_s


def test_a_cap_below_what_is_possible_is_refused_with_the_least_possible() -> None:
    problem = CappedProblem(*plain_pipeline(4, 8, weights=WEIGHTS))
    least_w = problem.least_cap_w

    with pytest.raises(TargetError, match=rf"power cap 1 W cannot be met.*{least_w:.5g} W"):
        plan_offline(_request(PowerCap(1.0)))
    assert plan_offline(_request(PowerCap(least_w * (1 + 1e-6)))).iteration_time_s > 0


@pytest.mark.parametrize("planner", [plan_full_speed, plan_uniform])
def test_planners_that_know_no_cap_refuse_it(planner: object) -> None:
    assert callable(planner)
    with pytest.raises(UsageError, match="--power-cap-w 500: only policy bubble-aware plans under a cap"):
        planner(_request(PowerCap(500.0)))


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.floats(0.5, 2.0), min_size=2, max_size=4),
    st.integers(1, 5),
    st.floats(0.3, 1.1),
    st.sampled_from([0.0, 0.03]),
)
def test_every_plan_found_stays_below_its_cap(
    weights: list[float], microbatches: int, ratio: float, window_s: float
) -> None:
    graph, profile = plain_pipeline(len(weights), microbatches, weights=tuple(weights))
    problem = CappedProblem(graph, profile, search_steps=20_000)
    cap_w = ratio * problem.full_speed.wave.peak_w

    try:
        plan = problem.plan(cap_w, window_s=window_s)
    except TargetError:
        assert cap_w < problem.least_cap_w
        return

    assert plan.wave.peak_mean_w(window_s) <= cap_w * (1 + 1e-6)
    assert problem.time_bound_s(cap_w) <= plan.iteration_time_s * (1 + 1e-9)
    assert plan.iteration_time_s >= problem.full_speed.iteration_time_s * (1 - 1e-9)


def test_a_wave_has_a_step_for_each_change_of_power() -> None:
    graph = dependency_graph(one_forward_one_backward(2, 1))
    planned = timeline(graph, [1.0, 2.0, 1.0, 2.0])

    wave = power_wave(planned, [100.0, 200.0, 100.0, 200.0], 10.0)

    assert wave.times_s == pytest.approx((0.0, 1.0, 2.0, 4.0, 6.0))
    assert wave.powers_w == pytest.approx((110.0, 110.0, 210.0, 210.0))
    assert wave.energy_j == pytest.approx(1060.0)
    assert (wave.peak_w, wave.mean_w) == pytest.approx((210.0, 1060.0 / 6))


def test_the_peak_mean_of_a_window_spans_iterations() -> None:
    wave = PowerWave((0.0, 1.0, 3.0, 4.0), (300.0, 100.0, 300.0))

    assert wave.peak_mean_w(0.0) == 300.0
    assert wave.peak_mean_w(2.0) == pytest.approx(300.0), "the end of an iteration and the begin of the next"
    assert wave.peak_mean_w(3.0) == pytest.approx(700 / 3)
    assert wave.peak_mean_w(4.0) == pytest.approx(200.0)
    assert wave.peak_mean_w(6.0) == pytest.approx(1400 / 6)
    assert math.isclose(wave.peak_mean_w(1e6), 200.0, rel_tol=1e-5)
