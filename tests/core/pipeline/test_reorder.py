"""Orders that a running 1F1B may take: equal communication, equal sums of gradients, no deadlock in any mixture."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuenergyd.core.pipeline.graph import (
    Instruction,
    InstructionKind,
    Schedule,
    dependency_graph,
    gpipe,
    one_forward_one_backward,
)
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, check_plan
from gpuenergyd.core.pipeline.reorder import (
    DELAYED_WEIGHTS,
    PLAIN_ORDER,
    SPLIT_IN_PLACE,
    Orders,
    check_orders,
    is_plain_1f1b,
    is_stage_of_plain_1f1b,
    order_name,
    split_in_place,
)
from gpuenergyd.errors import PlanError, ScheduleError

F, B, I, W = InstructionKind.F, InstructionKind.B, InstructionKind.I, InstructionKind.W  # noqa: E741  torch's own names


@st.composite
def pipelines(draw: st.DrawFn) -> Schedule:
    num_ranks = draw(st.integers(2, 6))
    return one_forward_one_backward(num_ranks, draw(st.integers(num_ranks, 12)))


@st.composite
def delayed_orders(draw: st.DrawFn, plain: Schedule) -> Orders:
    """Split backwards of any microbatches, each weight gradient at any later place that keeps their sequence."""
    orders = []
    for order in plain.orders:
        result: list[Instruction] = []
        waiting: list[Instruction] = []
        for own in order:
            is_split = own.kind is B and (bool(waiting) or draw(st.booleans()))
            if not is_split:
                result.append(own)
                continue
            result.append(replace(own, kind=I))
            waiting.append(replace(own, kind=W))
            due = draw(st.integers(0, len(waiting)))
            result += waiting[:due]
            del waiting[:due]
        orders.append((*result, *waiting))
    return tuple(orders)


def summed(order: Sequence[Instruction]) -> list[int]:
    return [own.microbatch_index for own in order if own.kind in {B, W}]


def exchanged(order: Sequence[Instruction]) -> list[tuple[bool, int]]:
    return [(own.kind is F, own.microbatch_index) for own in order if own.kind is not W]


@given(st.data(), pipelines())
def test_offered_orders_accumulate_each_gradient_in_1f1bs_sequence(data: st.DataObject, plain: Schedule) -> None:
    orders = data.draw(delayed_orders(plain))
    check_orders(orders, plain)
    for order, before in zip(orders, plain.orders, strict=True):
        assert summed(order) == summed(before)
        assert exchanged(order) == exchanged(before)


@given(st.data(), pipelines())
def test_ranks_that_run_different_orders_at_once_never_deadlock(data: st.DataObject, plain: Schedule) -> None:
    first, second = data.draw(delayed_orders(plain)), data.draw(delayed_orders(plain))
    mixed = tuple(data.draw(st.sampled_from(own)) for own in zip(first, second, plain.orders, strict=True))
    dependency_graph(replace(plain, orders=mixed))


@given(st.data(), pipelines())
def test_an_order_with_any_two_neighbours_swapped_is_offered_only_if_sums_and_exchange_are_equal(
    data: st.DataObject, plain: Schedule
) -> None:
    orders = [list(order) for order in data.draw(delayed_orders(plain))]
    rank = data.draw(st.integers(0, len(orders) - 1))
    at = data.draw(st.integers(0, len(orders[rank]) - 2))
    own = orders[rank]
    own[at], own[at + 1] = own[at + 1], own[at]
    swapped = tuple(map(tuple, orders))
    place = {o: k for k, o in enumerate(own)}
    are_equal = (
        summed(own) == summed(plain.orders[rank])
        and exchanged(own) == exchanged(plain.orders[rank])
        and all(place[replace(o, kind=I)] < k for o, k in place.items() if o.kind is W)
    )
    if are_equal:
        check_orders(swapped, plain)
    else:
        with pytest.raises(ScheduleError):
            check_orders(swapped, plain)


@given(pipelines())
def test_a_split_in_place_holds_as_many_microbatches_as_1f1b(plain: Schedule) -> None:
    split = split_in_place(plain)
    check_orders(split.orders, plain)
    assert order_name(split.orders) == SPLIT_IN_PLACE
    assert order_name(plain.orders) == PLAIN_ORDER
    assert [split.peak_inflight(r) for r in range(plain.num_ranks)] == [
        plain.peak_inflight(r) for r in range(plain.num_ranks)
    ]


def test_a_delayed_weight_gradient_has_a_name_of_its_own() -> None:
    plain = one_forward_one_backward(2, 2)
    last = (*(i for i in split_in_place(plain).orders[0] if i.kind is not W), *(Instruction(0, W, m) for m in range(2)))
    assert order_name((last, plain.orders[1])) == DELAYED_WEIGHTS


def test_only_1f1b_with_whole_backwards_and_enough_microbatches_can_change() -> None:
    assert is_plain_1f1b(one_forward_one_backward(4, 8))
    assert not is_plain_1f1b(one_forward_one_backward(4, 3))
    assert not is_plain_1f1b(one_forward_one_backward(4, 8, (1, 1, 0, 0)))
    assert not is_plain_1f1b(one_forward_one_backward(1, 8))
    with pytest.raises(ScheduleError, match="'gpipe' cannot change"):
        check_orders(gpipe(2, 4).orders, gpipe(2, 4))


@given(pipelines())
def test_each_stage_of_1f1b_is_known_without_the_others(plain: Schedule) -> None:
    for order, split in zip(plain.orders, split_in_place(plain).orders, strict=True):
        alone, own = ([replace(i, pp_rank=0) for i in one] for one in (order, split))
        stage = replace(plain, orders=(tuple(alone),))
        assert is_stage_of_plain_1f1b(stage.orders[0])
        check_orders((tuple(own),), stage)
        with pytest.raises(ScheduleError):
            check_orders((tuple(own[::-1]),), stage)
        swapped = replace(plain, orders=((*alone[1:], alone[0]),))
        with pytest.raises(ScheduleError, match="it is not 1F1B"):
            check_orders((tuple(own),), swapped)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda order: order[:-1], "no weight gradient of microbatch 3"),
        (lambda order: (*order, order[-1]), "comes twice"),
        (lambda order: (order[1], order[0], *order[2:]), "sequence of 1F1B"),
        (lambda order: (*order[:-4], order[-2], order[-4], order[-3], order[-1]), "sequence of 1F1B"),
        (lambda order: (*order[:-1], replace(order[-1], pp_rank=1)), "before its input gradient"),
        (lambda order: (*order[:-1], replace(order[-1], chunk_index=1)), "before its input gradient"),
    ],
)
def test_a_refused_order_says_what_is_wrong(change: object, problem: str) -> None:
    plain = one_forward_one_backward(2, 4)
    orders = split_in_place(plain).orders
    with pytest.raises(ScheduleError, match=problem):
        check_orders((change(orders[0]), orders[1]), plain)  # type: ignore[operator]


def test_a_plan_with_orders_is_checked_against_them() -> None:
    plain = one_forward_one_backward(2, 4)
    split = split_in_place(plain)
    ranks = tuple(RankClocks(r, (None,) * len(order)) for r, order in enumerate(split.orders))
    check_plan(ClockPlan("p", PlanPurpose.TRIAL, ranks, orders=split.orders), plain, [(1410,)] * 2)
    with pytest.raises(ScheduleError, match="orders for 1 rank;"):
        check_plan(ClockPlan("p", PlanPurpose.TRIAL, ranks[:1], orders=split.orders[:1]), plain, [(1410,)] * 2)
    with pytest.raises(PlanError, match="orders for 2 ranks, clocks for 0"):  # nothing would take ranks back to 1F1B
        check_plan(ClockPlan("p", PlanPurpose.TRIAL, orders=split.orders), plain, [(1410,)] * 2)
    assert ClockPlan("p", PlanPurpose.TUNED, orders=split.orders).schedule(plain) == replace(plain, orders=split.orders)
    assert ClockPlan("p", PlanPurpose.TUNED).schedule(plain) is plain
