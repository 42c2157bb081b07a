"""Flat plans: as fast as the plan of least energy, hardly more energy, and less swing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.power_swing import PowerWave, band_energy_w2, harmonics_in_band
from gpuenergyd.core.policy_api.policy import OfflineRequest
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import TargetError, UsageError
from gpuenergyd_other_policies.uniform import plan_offline as plan_uniform
from gpuenergyd_plan.flat.kernels import Band, FlatOptions, FlatState, find_harmonics
from gpuenergyd_plan.flat.plan import EXTRA_ENERGY_RATIO, flat_plan, flattest_order
from gpuenergyd_plan.offline.bubble_aware import plan_offline
from gpuenergyd_plan.offline.order_choice import plan_order
from gpuenergyd_policies.full_speed import plan_offline as plan_full_speed
from gpuenergyd_policies.planning.compiled import floats, ints
from gpuenergyd_policies.planning.frontier import Effort, SolvedPlan, solve
from gpuenergyd_policies.planning.orders.relaxation import OrderTask
from gpuenergyd_policies.planning.plan_evaluation import baseline, evaluate_clocks
from gpuenergyd_policies.planning.power_waves import wave_of
from tests.policies.planning.orders.cases import full_speed_time_s, split_profile
from tests.policies.planning.pipelines import Pipeline, plain_pipeline, random_pipelines
from tests.support.examples import examples

WEIGHTS = (1.0, 0.8, 0.9, 1.1)
STEPS = 60_000


def _solved_at(pipeline: Pipeline, slowdown_ratio: float) -> SolvedPlan:
    graph, profile = pipeline
    deadline_s = baseline(graph, profile).iteration_time_s * (1 + slowdown_ratio)
    return solve(graph, profile, deadline_s=deadline_s, effort=Effort.QUICK)


def _wave(pipeline: Pipeline, solved: SolvedPlan) -> PowerWave:
    graph, profile = pipeline
    clocks = zip(graph.instructions, solved.sm_clocks_mhz, strict=True)
    return wave_of(graph, profile, [profile[i.instruction_class].at_clock(mhz) for i, mhz in clocks])


@settings(max_examples=examples(25), deadline=None)
@given(random_pipelines(), st.floats(0.0, 0.4), st.sampled_from([0.0, 0.002, 0.02]), st.integers(1, 5))
def test_a_flat_plan_is_as_fast_within_its_energy_and_swings_no_more(
    pipeline: Pipeline, slowdown_ratio: float, extra_ratio: float, seed: int
) -> None:
    graph, profile = pipeline
    try:
        solved = _solved_at(pipeline, slowdown_ratio)
    except TargetError:
        return
    least = _wave(pipeline, solved)

    flat = flat_plan(graph, profile, solved, extra_energy_ratio=extra_ratio, search_steps=6_000, seed=seed)

    again = evaluate_clocks(graph, profile, [option.sm_clock_mhz for option in flat.options])
    assert again.iteration_time_s == pytest.approx(flat.wave.iteration_time_s)
    assert again.energy_j == pytest.approx(flat.wave.energy_j)
    assert flat.wave.iteration_time_s <= solved.iteration_time_s * (1 + 1e-9)
    assert flat.wave.energy_j <= solved.energy_j * (1 + extra_ratio + 1e-9)
    assert band_energy_w2(flat.wave) <= band_energy_w2(least) * (1 + 1e-9)


def test_with_slack_the_search_flattens_a_pipeline() -> None:
    pipeline = plain_pipeline(4, 8, weights=WEIGHTS)
    solved = _solved_at(pipeline, 0.05)
    flat = flat_plan(*pipeline, solved, search_steps=150_000)
    assert band_energy_w2(flat.wave) < 0.95 * band_energy_w2(_wave(pipeline, solved))
    assert flat == flat_plan(*pipeline, solved, search_steps=150_000), "the same input gives the same plan"


def test_the_searched_figure_is_the_band_energy_of_the_wave() -> None:
    graph, profile = plain_pipeline(3, 4, weights=(1.0, 1.2, 0.7), latency_s=0.01)
    options = [profile[i.instruction_class].options[(3 * k) % 9] for k, i in enumerate(graph.instructions)]
    wave = wave_of(graph, profile, options)
    spans = evaluate_clocks(graph, profile, [option.sm_clock_mhz for option in options]).timeline.spans
    numbers, n = harmonics_in_band(wave.iteration_time_s), len(options)
    empty = floats(np.zeros(n))
    state = FlatState(
        choice=ints(np.zeros(n)), begin=floats([span.start_s for span in spans]),
        end=floats([span.end_s for span in spans]), real=floats(np.zeros(len(numbers))),
        imaginary=floats(np.zeros(len(numbers))), kept_begin=empty, kept_end=empty, kept_real=empty,
        kept_imaginary=empty, kept_choice=ints(np.zeros(n)), best=ints(np.zeros(n)),
    )  # fmt: skip
    tables = FlatOptions(
        start=ints(range(n + 1)),
        times=floats([option.time_s for option in options]),
        powers=floats([option.energy_j / option.time_s - profile.blocking_power_w for option in options]),
        costs=empty,
    )
    band = Band(numbers.start, floats([1 / (2 * (np.pi * number) ** 2) for number in numbers]))
    assert find_harmonics(tables, band, state, wave.iteration_time_s) == pytest.approx(band_energy_w2(wave))


def test_an_iteration_without_harmonics_in_the_band_keeps_its_plan() -> None:
    pipeline = plain_pipeline(2, 1, weights=(0.05, 0.05))
    solved = _solved_at(pipeline, 0.1)
    assert solved.iteration_time_s < 0.05
    assert tuple(option.sm_clock_mhz for option in flat_plan(*pipeline, solved).options) == solved.sm_clocks_mhz


def _request(*, is_flattest: bool) -> OfflineRequest:
    graph, profile = plain_pipeline(4, 4, weights=WEIGHTS)
    return OfflineRequest("plain", profile, None, graph, PerformanceTarget(0.05), is_flattest=is_flattest)


def test_the_offline_planner_reports_the_swing_and_makes_it_flatter_on_request() -> None:
    usual, flattest = plan_offline(_request(is_flattest=False)), plan_offline(_request(is_flattest=True))
    assert usual.swing is not None
    assert flattest.swing is not None
    assert usual.swing.planned == usual.swing.least_energy == flattest.swing.least_energy
    assert flattest.swing.planned.band_energy_w2 < usual.swing.planned.band_energy_w2
    assert usual.swing.planned.band_energy_w2 < usual.swing.full_speed.band_energy_w2
    assert flattest.iteration_time_s <= usual.iteration_time_s * (1 + 1e-9)
    assert flattest.energy_j <= usual.energy_j * (1 + EXTRA_ENERGY_RATIO + 1e-9)
    assert flattest.lower_bound_j == usual.lower_bound_j
    assert flattest.swing.planned.mean_w == pytest.approx(flattest.energy_j / flattest.iteration_time_s)


@pytest.mark.parametrize("planner", [plan_full_speed, plan_uniform])
def test_planners_that_know_no_swing_refuse_it(planner: object) -> None:
    assert callable(planner)
    with pytest.raises(UsageError, match="--flattest: only policy bubble-aware"):
        planner(_request(is_flattest=True))


@settings(max_examples=examples(10), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.9, 1.0, 1.1]), min_size=2, max_size=4),
    num_microbatches=st.integers(2, 8),
    room=st.integers(0, 3),
    near_ratio=st.sampled_from([0.0, 0.002, 0.02]),
)
def test_the_flattest_order_keeps_to_time_memory_and_the_least_energy_of_all(
    weights: list[float], num_microbatches: int, room: int, near_ratio: float
) -> None:
    num_ranks = len(weights)
    profile, limits = split_profile(weights, overhead=0.03), [num_ranks - r + room for r in range(num_ranks)]
    deadline_s = full_speed_time_s(profile, num_ranks, num_microbatches)
    cheapest = plan_order(OrderTask(num_microbatches, profile, deadline_s, limits), near_ratio=near_ratio)

    order, flat = flattest_order(cheapest, extra_energy_ratio=near_ratio, search_steps=STEPS)

    most_j = cheapest.solved.energy_j * (1 + near_ratio) * (1 + 1e-9)
    assert all(cheapest.solved.energy_j <= near.solved.energy_j <= most_j for near in cheapest.near)
    clocks = [option.sm_clock_mhz for option in flat.options]
    again = evaluate_clocks(order.graph, order.profile, clocks)
    assert again.iteration_time_s <= deadline_s * (1 + 1e-9)
    assert again.energy_j == pytest.approx(flat.wave.energy_j)
    assert again.energy_j <= most_j
    held = [order.schedule.peak_inflight(r) for r in range(num_ranks)]
    assert all(own <= limit for own, limit in zip(held, limits, strict=True))
    if near_ratio == 0.0:
        assert cheapest.near == ()


def test_where_many_orders_need_nearly_the_least_energy_one_of_them_swings_less_than_the_cheapest() -> None:
    profile = split_profile([0.8, 0.9, 1.0, 1.1], overhead=0.0)
    deadline_s = full_speed_time_s(profile, 4, 8)
    alone = plan_order(OrderTask(8, profile, deadline_s, [8, 7, 6, 5]))
    cheapest = plan_order(OrderTask(8, profile, deadline_s, [8, 7, 6, 5]), near_ratio=EXTRA_ENERGY_RATIO)

    (_, of_cheapest), (_, of_all) = (flattest_order(own, search_steps=STEPS) for own in (alone, cheapest))

    assert alone.near == ()
    assert len(cheapest.near) >= 2
    assert band_energy_w2(of_all.wave) < 0.9 * band_energy_w2(of_cheapest.wave)
