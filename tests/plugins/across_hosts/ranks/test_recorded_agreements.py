"""Exchanges of version 0.3 through a training's store, recorded in virtual trainings, and replayed.

`plan_windows.json`: the leader of one of two replicas, with stragglers, blocks at full speed, revoked and replaced
plans. `orders.json`: the leader of a pipeline that changes its order of instructions, and the iterations that all
ranks ran in another order: version 0.3 agreed on orders apart from plans, by a vote of the ranks. `statements.json`:
what each of two replicas read of the other's pace and budget after a change, and the values that it derived.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd_across_hosts.ranks.replica_paces import ReplicaPaces
from gpuenergyd_across_hosts.rules.plan_windows import MemberState, PlanWindow, PlanWindowFollower, PlanWindowGrantor
from tests.support.memory_store import MemoryStore

RECORDED = Path(__file__).parent / "recorded"


def load(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))


def update(leader: PlanWindowGrantor, groups: list[Any]) -> None:
    """Report members to the leader."""
    for iteration_index, installed, farthest_index, members in groups:
        state = MemberState(iteration_index, frozenset(installed), farthest_index)
        leader.update(dict.fromkeys(leader.members if members == "all" else members, state))


def replay(leader: PlanWindowGrantor, step: list[Any]) -> None:
    match step:
        case ["grant", groups, ahead, is_change_near, guarded_index, *_]:
            update(leader, groups)
            leader.is_change_near, leader.guarded_index = is_change_near, guarded_index
            leader.grant(ahead)
        case ["update", groups]:
            update(leader, groups)
        case ["propose", plan_id, is_short, replaces, *_]:
            leader.propose(plan_id, is_short=is_short, replaces=frozenset(replaces))
        case ["block", num_iterations]:
            leader.request_block(num_iterations)
        case ["let_expire"]:
            leader.let_expire()
        case ["revoke"]:
            leader.revoke()
        case _:
            raise AssertionError(step)


def test_plans_get_the_windows_of_version_0_3() -> None:
    members, *steps = load("plan_windows")
    leader = PlanWindowGrantor(frozenset(members))
    expected: list[Any] = []

    for step in steps:
        replay(leader, step)
        if step[0] == "grant":
            expected = step[5] if len(step) > 5 else expected
            windows, revoked, wanted = expected
            assert leader.windows == tuple(PlanWindow(*row) for row in windows)
            assert (leader.revoked, leader.plan_to_install) == (revoked, wanted)


def test_orders_begin_and_end_no_later_than_in_version_0_3() -> None:
    members, in_order_before, *steps = load("orders")
    leader, follower = PlanWindowGrantor(frozenset(members)), PlanWindowFollower()
    ordered, newest, in_order = set[str](), -1, list[int]()

    for step in steps:
        replay(leader, step)
        if step[0] == "propose" and len(step) > 4:
            ordered.add(step[1])
        follower.update(leader.windows)
        if leader.revoked is not None:
            follower.drop(leader.revoked)
        for newest in range(newest + 1, leader.newest_iteration + 1):  # noqa: B020  goes on from the last one
            if follower.plan_for(newest) in ordered:
                in_order.append(newest)

    # The trial of an order, and the plan with an order before and after a block at full speed.
    before, now = _spans(in_order_before), _spans(in_order)
    assert len(now) == len(before) == 3
    assert all(begin <= known_begin for (begin, _), (known_begin, _) in zip(now, before, strict=True))
    assert all(end <= known_end for (_, end), (_, known_end) in zip(now, before, strict=True))


def _spans(iterations: list[int]) -> list[tuple[int, int]]:
    """Return the first and the last iteration of each run of iterations."""
    begins = [k for k in iterations if k - 1 not in iterations]
    ends = [k for k in iterations if k + 1 not in iterations]
    return list(zip(begins, ends, strict=True))


def test_statements_are_read_as_in_version_0_3() -> None:
    paces, store = ReplicaPaces(), MemoryStore()
    for row in load("statements"):
        if isinstance(row, bool):
            paces, store = ReplicaPaces(is_first=row), MemoryStore()
            continue
        now_s, reported, pace, budget = row
        store.counters[f"{store.prefix}/replicas"] = len(reported)
        for index, values in enumerate(reported):
            if values is not None:
                store.set(f"pace/{index}", json.dumps(_content(*values)))

        others = paces.others(store, now_s)

        found = [others.slowest_time_s, others.age_s, others.is_news, others.least_overhead_s]
        assert found == pytest.approx(pace, abs=1e-5)
        names = ("permitted_slowdown_ratio", "is_decided", "age_s", "excess_s", "num_replicas", "others_spent_s",
                 "others_age_s")  # fmt: skip
        assert [paces.budget(now_s)[name] for name in names] == pytest.approx(budget, abs=1e-4)


def _content(
    own_time_s: float | None,
    num_readings: int,
    iteration_index: int,
    overhead_s: float | None,
    is_first: object,
    *share: object,
) -> dict[str, object]:
    names = ("permitted_slowdown_ratio", "is_decided", "excess_s", "spent_s")
    return {
        "own_time_s": own_time_s,
        "num_readings": num_readings,
        "iteration_index": iteration_index,
        "overhead_s": overhead_s,
        "is_first": is_first,
        "budget": dict(zip(names, share, strict=True)) if share else None,
    }
