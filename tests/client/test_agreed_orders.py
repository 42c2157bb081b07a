"""Ranks of a training run their orders in an iteration or none does, whatever becomes of messages and ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.client.agreed_orders import OrderedPlans
from gpuenergyd.client.order_register import OrderRegister
from gpuenergyd.client.plans import NO_PLAN, PreparedPlan
from gpuenergyd.core.distributed.order_consent import MAX_TURNS, PlannedOrder, has_order, is_agreed, turns_of
from tests.support.examples import examples

ORDER = (("F", 0, 0), ("I", 0, 0), ("W", 0, 0))
LONGEST_DELAY = 4
NUM_ITERATIONS = 24


def plan(epoch: int, apply_at: int, *, is_ordered: bool, training_id: str = "t") -> PreparedPlan:
    return PreparedPlan(
        epoch, apply_at, {}, b"", f"plan-{epoch}", order=ORDER if is_ordered else (),
        training_id=training_id if is_ordered else "",
    )  # fmt: skip


@contextmanager
def ranks(num_ranks: int, folder: Path | None = None) -> Iterator[list[OrderedPlans]]:
    """Ranks whose registers lie in a folder of their own."""
    with TemporaryDirectory() as name:
        where = Path(name) if folder is None else folder
        opened = [
            OrderedPlans(partial(OrderRegister, rank=rank, num_ranks=num_ranks, folder=where))
            for rank in range(num_ranks)
        ]
        try:
            yield opened
        finally:
            for one in opened:
                one.close()
            assert list(where.iterdir()) == []


def run(plans: OrderedPlans, iteration_index: int) -> bool:
    """Begin an iteration; return whether the rank runs an order of its own."""
    return bool(plans.plan_for(iteration_index).order)


# --- all or none ---


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    """Plans sent in some iterations; by rank, delays of each, none for a lost one; leavers; who begins first."""
    num_ranks = draw(st.integers(2, 5))
    sent: list[dict[str, Any]] = []
    for epoch in range(1, draw(st.integers(1, 6)) + 1):
        at = draw(st.integers(0, NUM_ITERATIONS - 1))
        # Replicas decide by themselves: a plan is for some of the ranks.
        sent.append(
            {
                "plan": plan(epoch, at + draw(st.integers(0, 4)), is_ordered=draw(st.booleans())),
                "at": at,
                "delays": draw(
                    st.lists(st.one_of(st.none(), st.floats(0, LONGEST_DELAY)), min_size=num_ranks, max_size=num_ranks)
                ),
            }
        )
    return {
        "num_ranks": num_ranks,
        "sent": sent,
        "starts": draw(
            st.lists(
                st.lists(st.floats(0, 0.999), min_size=num_ranks, max_size=num_ranks),
                min_size=NUM_ITERATIONS,
                max_size=NUM_ITERATIONS,
            )
        ),
        "ahead": draw(st.lists(st.integers(0, 5), min_size=num_ranks, max_size=num_ranks)),
        "leaving": {
            rank: draw(st.integers(1, NUM_ITERATIONS))
            for rank in draw(st.sets(st.integers(0, num_ranks - 1), max_size=1))
        },
        "lost_daemon_at": draw(st.one_of(st.none(), st.floats(0, NUM_ITERATIONS))),
    }


def events(training: dict[str, Any]) -> list[tuple[float, int, str, int, Any]]:
    """Return what happens, in order: (instant, tie-breaker, what, rank, plan or iteration)."""
    found: list[tuple[float, int, str, int, Any]] = []
    for own in training["sent"]:
        for rank, delay in enumerate(own["delays"]):
            if delay is not None:
                found.append((own["at"] + delay, 0, "message", rank, own["plan"]))
    for iteration_index, starts in enumerate(training["starts"]):
        for rank, start in enumerate(starts):
            begin = iteration_index + start - training["ahead"][rank]  # programs launch ahead of their GPUs
            found.append((begin, 1, "begin", rank, iteration_index))
    for rank, iteration_index in training["leaving"].items():
        found.append((iteration_index, 2, "leave", rank, None))
    if training["lost_daemon_at"] is not None:
        found += [(training["lost_daemon_at"], 3, "lost", rank, None) for rank in range(training["num_ranks"])]
    return sorted(found, key=lambda event: event[:4])


@settings(deadline=None, max_examples=examples(150))
@given(trainings())
def test_in_every_iteration_all_ranks_that_are_left_run_orders_or_none_does(training: dict[str, Any]) -> None:
    ran: dict[int, set[bool]] = {}
    left: set[int] = set()
    with ranks(training["num_ranks"]) as plans:
        for _, _, what, rank, value in events(training):
            if rank in left:
                continue
            if what == "message":
                plans[rank].add([value])
            elif what == "begin":
                ran.setdefault(value, set()).add(run(plans[rank], value))
            elif what == "lost":
                plans[rank].clear()
            else:
                left.add(rank)
                plans[rank].close()

    assert all(len(kinds) == 1 for kinds in ran.values())


@settings(deadline=None, max_examples=examples(60))
@given(st.integers(2, 5), st.lists(st.floats(0, 0.999), min_size=5, max_size=5), st.integers(0, 4), st.randoms())
def test_once_all_ranks_have_a_plan_all_change_with_the_next_iteration_and_back(
    num_ranks: int, delays: list[float], apply_at: int, shuffled: Any
) -> None:
    del delays
    order = list(range(num_ranks))
    with ranks(num_ranks) as plans:
        for rank in order:
            plans[rank].add([plan(1, 0, is_ordered=False)])
        for iteration_index in range(20):
            if iteration_index == 5:
                for own in plans:
                    own.add([plan(2, 5 + apply_at, is_ordered=True)])
            if iteration_index == 12:
                for own in plans:
                    own.add([plan(3, 12, is_ordered=False)])
            shuffled.shuffle(order)
            kinds = {run(plans[rank], iteration_index) for rank in order}
            assert kinds == {5 + apply_at <= iteration_index < 12}


def test_one_rank_without_a_plan_keeps_all_others_in_their_newest_plain_plan() -> None:
    with ranks(3) as plans:
        for own in plans:
            own.add([plan(1, 0, is_ordered=False)])
        for own in plans[:2]:
            own.add([plan(2, 3, is_ordered=True)])

        followed = [own.plan_for(4) for own in plans]
        plans[2].add([plan(2, 3, is_ordered=True)])
        later = [own.plan_for(5) for own in plans]

    assert [own.plan_epoch for own in followed] == [1, 1, 1]
    assert [own.plan_epoch for own in later] == [2, 2, 2]


def test_a_block_at_full_speed_on_one_replica_is_in_1f1b_on_all() -> None:
    with ranks(2) as plans:
        for own in plans:
            own.add([plan(1, 0, is_ordered=False), plan(2, 3, is_ordered=True)])
        plans[0].add([plan(3, 5, is_ordered=False), plan(4, 7, is_ordered=True)])

        followed = [[own.plan_for(k).plan_epoch for own in plans] for k in range(3, 9)]

    assert followed == [[2, 2], [2, 2], [3, 1], [3, 1], [4, 2], [4, 2]]


def test_a_decision_is_kept_by_a_rank_whose_plan_is_withdrawn_before_it_begins() -> None:
    with ranks(2) as plans:
        for own in plans:
            own.add([plan(1, 2, is_ordered=True)])
        first = run(plans[0], 2)
        plans[1].clear()
        second = run(plans[1], 2)

        assert (first, second) == (True, True)
        assert not run(plans[0], 3)
        assert not run(plans[1], 3)


def test_a_rank_that_refuses_orders_ends_them_for_all() -> None:
    with ranks(2) as plans:
        for own in plans:
            own.add([plan(1, 2, is_ordered=True)])
        assert run(plans[0], 2)
        assert run(plans[1], 2)
        plans[1].agreement.bar()

        assert not any(run(own, 3) for own in plans)


def test_ranks_move_to_the_register_of_the_next_daemon_together() -> None:
    with ranks(2) as plans:
        for own in plans:
            own.add([plan(1, 0, is_ordered=True)])
        assert all(run(own, 1) for own in plans)
        plans[0].add([plan(2, 2, is_ordered=True, training_id="u")])

        assert not any(run(own, 2) for own in plans)
        plans[1].add([plan(2, 2, is_ordered=True, training_id="u")])
        assert not run(plans[0], 3)
        assert not run(plans[1], 3)
        assert all(run(own, 4) for own in plans)


def test_without_a_plan_with_an_order_no_register_is_opened(tmp_path: Path) -> None:
    with ranks(2, tmp_path) as plans:
        plans[0].add([plan(1, 0, is_ordered=False)])

        assert plans[0].plan_for(0).plan_epoch == 1
        assert plans[1].plan_for(0) is NO_PLAN
        assert list(tmp_path.iterdir()) == []


# --- the register ---


def test_a_register_is_unlinked_once_all_ranks_have_opened_it(tmp_path: Path) -> None:
    registers = [OrderRegister("t", rank, 2, tmp_path) for rank in range(2)]
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    for register in registers:
        register.state(((0, True),))

    assert registers[0].decide(0)
    assert list(tmp_path.iterdir()) == []
    for register in registers:
        register.close()


def test_a_register_of_other_ranks_is_refused(tmp_path: Path) -> None:
    register = OrderRegister("t", 0, 2, tmp_path)
    with pytest.raises(ValueError, match="is for 2 ranks; this training has 3"):
        OrderRegister("t", 0, 3, tmp_path)
    register.close()


def test_a_link_in_place_of_a_register_is_refused(tmp_path: Path) -> None:
    register = OrderRegister("t", 0, 2, tmp_path)
    (path,) = tmp_path.iterdir()
    register.close()
    (tmp_path / "elsewhere").touch()
    path.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        OrderRegister("t", 0, 2, tmp_path)


def test_a_rank_without_shared_memory_keeps_its_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plans = OrderedPlans(partial(OrderRegister, rank=0, num_ranks=1, folder=tmp_path / "missing"))
    plans.add([plan(1, 0, is_ordered=True)])

    assert plans.plan_for(0) is NO_PLAN
    assert "the order of instructions stays as it is" in caplog.text


# --- turns ---


def test_turns_are_those_of_the_newest_plan_that_applies() -> None:
    plans = [PlannedOrder(1, 3, True), PlannedOrder(3, 9, True), PlannedOrder(2, 6, False)]
    assert turns_of(plans) == ((3, True), (6, False), (9, True))
    assert turns_of([*plans, PlannedOrder(4, 0, False)]) == ((0, False),)


def test_only_the_last_turns_are_stated() -> None:
    plans = [PlannedOrder(k, k, k % 2 == 0) for k in range(9)]
    turns = turns_of(plans)
    assert len(turns) == MAX_TURNS
    assert not has_order(turns, 4)
    assert has_order(turns, 8)
    assert is_agreed([turns, turns], 8)
    assert not is_agreed([turns, ()], 8)


def test_nothing_is_stated_about_iterations_that_a_rank_has_begun() -> None:
    plans = [PlannedOrder(1, 3, True), PlannedOrder(2, 9, False)]
    assert turns_of(plans, 5) == ((5, True), (9, False))
    assert turns_of(plans, 12) == ((12, False),)
