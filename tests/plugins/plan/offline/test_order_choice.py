"""Chosen orders, replayed by an independent evaluator: on time, within memory, and with the energy that is promised."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import InstructionKind, dependency_graph, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.errors import TargetError
from gpuenergyd_plan.offline import order_choice as choice
from gpuenergyd_plan.offline.order_choice import plan_order
from gpuenergyd_policies.planning.frontier import solve
from gpuenergyd_policies.planning.orders import search
from gpuenergyd_policies.planning.orders.relaxation import OrderPlan, OrderTask
from tests.policies.planning.orders.cases import POWER_W, full_speed_time_s, split_profile
from tests.policies.planning.orders.replay import Replay, replayed
from tests.support.examples import examples


def _replayed(plan: OrderPlan, profile: PipelineProfile, num_microbatches: int, latency_s: float = 0.0) -> Replay:
    clocks = dict(zip(plan.graph.instructions, plan.solved.sm_clocks_mhz, strict=True))
    by_name = {(i.pp_rank, str(i.kind), i.microbatch_index): (i, clock) for i, clock in clocks.items()}

    def cost(rank: int, kind: str, microbatch: int) -> tuple[float, float]:
        instruction, clock = by_name[rank, kind, microbatch]
        option = profile[instruction.instruction_class].at_clock(clock)
        return option.time_s, option.energy_j

    orders = [[(str(i.kind), i.microbatch_index) for i in order] for order in plan.schedule.orders]
    return replayed(orders, cost, num_microbatches=num_microbatches, blocking_power_w=POWER_W, latency_s=latency_s)


@settings(max_examples=examples(15), deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.9, 1.0, 1.0, 1.1]), min_size=1, max_size=4),
    num_microbatches=st.integers(1, 9),
    room=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    overhead=st.sampled_from([0.0, 0.03, 0.3]),
    latency_s=st.sampled_from([0.0, 0.05]),
)
def test_plans_are_never_later_than_1f1b_hold_no_more_than_fits_and_cost_what_they_promise(
    weights: list[float], num_microbatches: int, room: list[int], overhead: float, latency_s: float
) -> None:
    num_ranks = len(weights)
    profile = split_profile(weights, overhead=overhead)
    deadline_s = full_speed_time_s(profile, num_ranks, num_microbatches, latency_s)
    limits = [num_ranks - r + room[r] for r in range(num_ranks)]

    task = OrderTask(num_microbatches, profile, deadline_s, limits, communication_latency_s=latency_s)
    plan = plan_order(task)

    replay = _replayed(plan, profile, num_microbatches, latency_s)
    assert replay.iteration_time_s <= deadline_s * (1 + 1e-12)
    assert all(held <= limit for held, limit in zip(replay.held_microbatches, limits, strict=True))
    assert replay.energy_j == pytest.approx(plan.solved.energy_j, rel=1e-9)
    assert plan.any_order_j is not None
    assert plan.any_order_j <= replay.energy_j * (1 + 1e-9)
    plain = solve(
        dependency_graph(one_forward_one_backward(num_ranks, num_microbatches), communication_latency_s=latency_s),
        profile,
        deadline_s=deadline_s,
    )
    assert replay.energy_j <= plain.energy_j * (1 + 2e-3)


@pytest.mark.thorough
def test_splitting_and_memory_each_save_energy_at_the_same_iteration_time() -> None:
    profile = split_profile([1.0, 1.0, 1.0, 1.05])
    deadline_s = full_speed_time_s(profile, 4, 12)
    plain = solve(dependency_graph(one_forward_one_backward(4, 12)), profile, deadline_s=deadline_s)

    in_place = plan_order(OrderTask(12, profile, deadline_s, [4, 3, 2, 1]))
    roomy = plan_order(OrderTask(12, profile, deadline_s, [4, 4, 4, 4]))

    assert in_place.solved.energy_j < 0.95 * plain.energy_j
    assert roomy.solved.energy_j < 0.99 * in_place.solved.energy_j


def test_backwards_stay_whole_where_splitting_costs_too_much() -> None:
    profile = split_profile([1.0, 1.0, 1.05], overhead=0.5)

    plan = plan_order(OrderTask(8, profile, full_speed_time_s(profile, 3, 8), [3, 2, 1]))

    kinds = {i.kind for order in plan.schedule.orders for i in order}
    assert kinds == {InstructionKind.F, InstructionKind.B}


def test_too_little_memory_for_the_deadline_is_refused() -> None:
    profile = split_profile([1.0, 1.0, 1.0])

    with pytest.raises(
        TargetError, match="no order was found that is that fast with at most 1, 1, 1 microbatches held"
    ):
        plan_order(OrderTask(8, profile, full_speed_time_s(profile, 3, 8), [1, 1, 1]))


def test_less_memory_than_1f1b_holds_is_used_where_the_deadline_permits_it() -> None:
    profile = split_profile([1.0, 1.0, 1.0, 1.0], input_share=0.3)

    plan = plan_order(OrderTask(12, profile, 1.3 * full_speed_time_s(profile, 4, 12), [3, 3, 2, 1]))

    replay = _replayed(plan, profile, 12)
    assert all(held <= limit for held, limit in zip(replay.held_microbatches, (3, 3, 2, 1), strict=True))
    assert replay.iteration_time_s <= 1.3 * full_speed_time_s(profile, 4, 12)


@pytest.mark.thorough
def test_the_order_of_a_long_pipeline_is_found_with_fewer_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = split_profile([1.0, 1.0, 1.05])
    deadline_s = full_speed_time_s(profile, 3, 40)
    full = plan_order(OrderTask(40, profile, deadline_s, [3, 3, 3]))

    monkeypatch.setattr(choice, "SHORT_PIPELINE", 60)
    short = plan_order(OrderTask(40, profile, deadline_s, [3, 3, 3]))

    assert _replayed(short, profile, 40).iteration_time_s <= deadline_s
    assert short.solved.energy_j <= 1.005 * full.solved.energy_j


def test_a_search_without_time_still_returns_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "MOST_WORK", 1)
    monkeypatch.setattr(search, "FEWEST_STARTS", 1)
    profile = split_profile([1.0, 1.0])

    plan = plan_order(OrderTask(6, profile, full_speed_time_s(profile, 2, 6), [2, 2]))

    assert _replayed(plan, profile, 6).held_microbatches <= (2, 2)
