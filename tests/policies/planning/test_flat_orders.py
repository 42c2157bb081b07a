"""The flattest of several orders: within their common energy and time, and flatter than the cheapest order alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.power_swing import band_energy_w2
from gpuenergyd_policies.planning.flat.orders import flattest_order
from gpuenergyd_policies.planning.flat.plan import EXTRA_ENERGY_RATIO
from gpuenergyd_policies.planning.orders.choice import plan_order
from gpuenergyd_policies.planning.orders.relaxation import OrderTask
from gpuenergyd_policies.planning.plan_evaluation import evaluate_clocks
from tests.policies.planning.orders.cases import full_speed_time_s, split_profile
from tests.support.examples import examples

STEPS = 60_000


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

    found = flattest_order(cheapest, extra_energy_ratio=near_ratio, search_steps=STEPS)

    most_j = cheapest.solved.energy_j * (1 + near_ratio) * (1 + 1e-9)
    assert all(cheapest.solved.energy_j <= order.solved.energy_j <= most_j for order in cheapest.near)
    clocks = [option.sm_clock_mhz for option in found.flat.options]
    again = evaluate_clocks(found.order.graph, found.order.profile, clocks)
    assert again.iteration_time_s <= deadline_s * (1 + 1e-9)
    assert again.energy_j == pytest.approx(found.flat.wave.energy_j)
    assert again.energy_j <= most_j
    held = [found.order.schedule.peak_inflight(r) for r in range(num_ranks)]
    assert all(own <= limit for own, limit in zip(held, limits, strict=True))
    if near_ratio == 0.0:
        assert cheapest.near == ()


def test_where_many_orders_need_nearly_the_least_energy_one_of_them_swings_less_than_the_cheapest() -> None:
    profile = split_profile([0.8, 0.9, 1.0, 1.1], overhead=0.0)
    deadline_s = full_speed_time_s(profile, 4, 8)
    alone = plan_order(OrderTask(8, profile, deadline_s, [8, 7, 6, 5]))
    cheapest = plan_order(OrderTask(8, profile, deadline_s, [8, 7, 6, 5]), near_ratio=EXTRA_ENERGY_RATIO)

    of_cheapest, of_all = flattest_order(alone, search_steps=STEPS), flattest_order(cheapest, search_steps=STEPS)

    assert alone.near == ()
    assert len(cheapest.near) >= 2
    assert band_energy_w2(of_all.flat.wave) < 0.9 * band_energy_w2(of_cheapest.flat.wave)
