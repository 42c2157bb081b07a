"""Plan windows: an iteration never runs under two plans, whatever messages are lost, late or repeated."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd_across_hosts.rules.plan_windows import (
    AHEAD_ITERATIONS,
    MAX_AHEAD_ITERATIONS,
    SHORT_WINDOW_ITERATIONS,
    UNGUARDED_ITERATIONS,
    MemberState,
    PlanWindow,
    PlanWindowFollower,
    PlanWindowGrantor,
)
from tests.support.examples import examples

MEMBERS = ("0.0", "1.0", "2.0")


def states(iteration: int, *installed: str) -> dict[str, MemberState]:
    return dict.fromkeys(MEMBERS, MemberState(iteration, frozenset(installed)))


def grantor() -> PlanWindowGrantor:
    return PlanWindowGrantor(frozenset(MEMBERS))


def proposed_by(leader: PlanWindowGrantor) -> str | None:
    """Return the plan that has no window yet."""
    in_force = leader.windows[-1].plan_id if leader.windows else None
    return leader.plan_to_install if leader.plan_to_install != in_force else None


def test_a_window_begins_ahead_of_the_newest_iteration() -> None:
    leader = grantor()
    leader.update(states(7))
    leader.propose("a")
    assert not leader.grant()
    leader.update({**states(8, "a"), "1.0": MemberState(9, frozenset({"a"}))})

    assert leader.grant()
    assert leader.windows == (PlanWindow("a", 9 + AHEAD_ITERATIONS, 9 + 3 * AHEAD_ITERATIONS),)


def test_a_window_with_a_change_near_is_only_kept_from_expiring() -> None:
    leader = agreed("a", at=10)
    leader.is_change_near = True
    end = leader.windows[-1].end_iteration
    for iteration in range(11, end):
        leader.update(states(iteration, "a"))
        leader.grant()

        assert leader.windows[-1].end_iteration == max(end, iteration + AHEAD_ITERATIONS)

    leader.is_change_near = False
    assert leader.grant()
    assert leader.windows[-1].end_iteration == end - 1 + 2 * AHEAD_ITERATIONS


def test_a_window_with_a_proposed_successor_is_only_kept_from_expiring() -> None:
    leader = agreed("a", at=10)
    leader.propose("b")
    leader.update(states(15, "a"))

    assert leader.grant()
    assert leader.windows[-1].end_iteration == 15 + AHEAD_ITERATIONS


def test_a_window_expires_when_a_member_stops_reporting() -> None:
    leader = agreed("a", at=10)
    moving = {member: MemberState(40, frozenset({"a"})) for member in MEMBERS[:2]}
    leader.update(moving)

    assert not leader.grant()
    assert leader.windows[-1].end_iteration <= 10 + 3 * AHEAD_ITERATIONS


def test_a_window_expires_when_a_daemon_uninstalls_the_plan() -> None:
    leader = agreed("a", at=10)
    leader.update({**states(14, "a"), "2.0": MemberState(14, frozenset())})

    assert not leader.grant()


def test_a_window_expires_when_the_guard_sees_no_iterations_any_more() -> None:
    leader = agreed("a", at=10)
    leader.guarded_index = 10
    granted_at = []
    for iteration in range(11, 100):
        leader.update(states(iteration, "a"))
        if leader.grant():
            granted_at.append(iteration)

    assert max(granted_at) <= 10 + UNGUARDED_ITERATIONS + 4 * AHEAD_ITERATIONS
    leader.guarded_index = 98
    assert leader.grant()


def test_the_next_window_begins_where_the_previous_one_ends() -> None:
    leader = agreed("a", at=10)
    leader.propose("b")
    leader.update(states(13, "a", "b"))
    assert leader.grant()

    before, current = leader.windows
    assert (before.plan_id, current.plan_id) == ("a", "b")
    assert current.begin_iteration == before.end_iteration


def test_after_let_expire_the_next_window_waits_for_the_end_of_the_current_one() -> None:
    leader = agreed("a", at=10)
    leader.let_expire()
    leader.update(states(12, "a"))
    assert not leader.grant()
    assert leader.plan_to_install is None

    leader.propose("b")
    leader.update(states(13, "a", "b"))
    assert leader.grant()
    before, current = leader.windows
    assert current.begin_iteration >= before.end_iteration
    assert leader.plan_to_install == "b"


def test_a_revoked_plan_has_no_window() -> None:
    leader = agreed("a", at=10)
    follower = PlanWindowFollower()
    follower.update(leader.windows)
    in_force_at = leader.windows[-1].begin_iteration
    assert follower.plan_for(in_force_at) == "a"
    end = leader.windows[-1].end_iteration
    leader.revoke()
    assert leader.revoked == "a"
    follower.drop("a")

    assert list(leader.windows) == []
    assert follower.plan_for(in_force_at) is None
    leader.propose("b")
    leader.update(states(11, "a", "b"))
    assert leader.grant()
    assert [window.begin_iteration >= end for window in leader.windows] == [True]


def test_windows_begin_further_ahead_when_messages_are_slow_up_to_a_limit() -> None:
    leader = grantor()
    leader.propose("a")
    leader.update(states(0, "a"))
    leader.grant(ahead=10**6)

    assert leader.windows[-1].begin_iteration == MAX_AHEAD_ITERATIONS


def test_unknown_members_and_outdated_reports_are_ignored() -> None:
    leader = agreed("a", at=10)
    leader.update({"9.9": MemberState(10**6, frozenset())})
    leader.update(states(3))

    assert leader.newest_iteration == 10


def test_a_follower_accepts_windows_in_any_order_and_repeatedly() -> None:
    follower = PlanWindowFollower()
    follower.update([PlanWindow("a", 5, 20)])
    follower.update([PlanWindow("a", 5, 12), PlanWindow("b", 20, 30)])

    assert [follower.plan_for(i) for i in (4, 5, 19, 20, 29, 30)] == [None, "a", "a", "b", "b", None]


def agreed(plan_id: str, *, at: int) -> PlanWindowGrantor:
    leader = grantor()
    leader.propose(plan_id)
    leader.update(states(at, plan_id))
    assert leader.grant()
    return leader


@dataclass
class Rank:
    """A rank of the model: what it has heard, and what its daemon has installed."""

    follower: PlanWindowFollower = field(default_factory=PlanWindowFollower)
    installed: set[str] = field(default_factory=set)


WHO = st.sets(st.sampled_from(range(3))).filter(lambda who: len(who) != 1) | st.just({0, 1, 2})
ROUNDS = st.lists(
    st.fixed_dictionaries(
        {
            "num_iterations": st.integers(0, 3),
            "told": WHO,
            "installs": WHO,
            "hears": WHO,
            "hears_of_rounds_ago": st.integers(0, 5),
            "restarted": st.just(set[int]()) | WHO,
            "is_another_plan_proposed": st.booleans(),
            "is_block_requested": st.booleans(),
            "ahead": st.integers(1, 12),
        }
    ),
    min_size=20,
    max_size=40,
)


@settings(max_examples=examples(40))
@given(ROUNDS)
def test_no_iteration_runs_under_two_plans(rounds: list[dict[str, Any]]) -> None:
    leader, ranks = grantor(), [Rank() for _ in MEMBERS]
    published: list[tuple[PlanWindow, ...]] = [()]
    iteration = num_plans = 0
    for this in rounds:
        if this["is_another_plan_proposed"] and proposed_by(leader) is None:
            num_plans += 1
            leader.propose(f"plan-{num_plans}")
        for which in this["restarted"] - this["installs"]:
            ranks[which].installed.clear()
            ranks[which].follower.clear()
        for which in this["installs"]:
            ranks[which].installed |= {plan_id} if (plan_id := proposed_by(leader)) else set()
        for which in this["told"]:
            leader.update({MEMBERS[which]: MemberState(iteration, frozenset(ranks[which].installed))})
        if this["is_block_requested"]:
            leader.request_block(3)
        leader.grant(ahead=this["ahead"])
        published.append(leader.windows)
        for which in this["hears"]:
            ranks[which].follower.update(published[max(0, len(published) - 1 - this["hears_of_rounds_ago"])])
        for _ in range(this["num_iterations"]):
            iteration += 1
            followed = {rank.follower.plan_for(iteration) for rank in ranks} - {None}
            assert len(followed) <= 1, f"iteration {iteration}: {followed}"

    # Nothing is heard any more: the store is gone, or the leader. Every window ends, and full speed follows.
    longest = max((window.end_iteration for windows in published for window in windows), default=0)
    for last in range(iteration, max(iteration, longest) + 1):
        assert len({rank.follower.plan_for(last) for rank in ranks} - {None}) <= 1
    assert [rank.follower.plan_for(max(iteration, longest)) for rank in ranks] == [None] * 3


@settings(max_examples=examples(40))
@given(ROUNDS, st.lists(st.booleans(), min_size=40, max_size=40))
def test_only_plans_that_may_be_mixed_share_an_iteration_and_no_rank_returns_to_a_replaced_one(
    rounds: list[dict[str, Any]], are_replacing: list[bool]
) -> None:
    leader, ranks = grantor(), [Rank() for _ in MEMBERS]
    published: list[tuple[tuple[PlanWindow, ...], str | None]] = [((), None)]
    replaced_by: dict[str, str] = {}
    last = [""] * len(ranks)
    iteration = num_plans = 0
    for this, is_replacing in zip(rounds, are_replacing, strict=False):
        if this["is_another_plan_proposed"] and proposed_by(leader) is None:
            num_plans += 1
            before = f"plan-{num_plans - 1}"
            leader.propose(f"plan-{num_plans}", replaces=frozenset({before} if is_replacing else ()))
            if is_replacing:
                replaced_by[before] = f"plan-{num_plans}"
        for which in this["installs"]:
            ranks[which].installed |= {plan_id} if (plan_id := proposed_by(leader)) else set()
        for which in this["told"]:
            leader.update({MEMBERS[which]: MemberState(iteration, frozenset(ranks[which].installed))})
        leader.grant(ahead=this["ahead"])
        published.append((leader.windows, leader.revoked))
        for which in this["hears"]:
            windows, revoked = published[max(0, len(published) - 1 - this["hears_of_rounds_ago"])]
            ranks[which].follower.update(windows)
            if revoked is not None:
                ranks[which].follower.drop(revoked)
        for _ in range(this["num_iterations"]):
            iteration += 1
            plans = [rank.follower.plan_for(iteration) for rank in ranks]
            followed = {plan_id for plan_id in plans if plan_id is not None}
            assert len(followed) <= 2
            assert all(replaced_by.get(a) == b or replaced_by.get(b) == a for a in followed for b in followed - {a})
            for which, plan_id in enumerate(plans):
                assert plan_id is None or replaced_by.get(plan_id) != last[which]
                last[which] = plan_id or last[which]


def test_a_plan_that_may_be_mixed_replaces_the_one_in_force_from_the_next_iteration_on() -> None:
    leader = agreed("a", at=10)
    leader.update(states(13, "a"))
    leader.propose("b", replaces=frozenset({"a"}))
    leader.update(states(13, "a", "b"))

    assert leader.grant()
    assert leader.revoked == "a"
    assert leader.windows == (PlanWindow("b", 14, 14 + 2 * AHEAD_ITERATIONS),)
    assert leader.plan_to_install == "b"


@pytest.mark.parametrize("replaces", [frozenset[str](), frozenset({"z"})])
def test_a_plan_that_may_not_be_mixed_with_the_one_in_force_waits_for_the_end_of_its_window(
    replaces: frozenset[str],
) -> None:
    leader = agreed("a", at=10)
    leader.propose("b", replaces=replaces)
    leader.update(states(13, "a", "b"))

    assert leader.grant()
    before, after = leader.windows
    assert (after.begin_iteration, leader.revoked) == (before.end_iteration, None)


def test_a_plan_is_not_replaced_while_some_member_may_still_follow_the_one_before() -> None:
    leader = agreed("a", at=10)
    leader.propose("b")
    leader.update(states(12, "a", "b"))
    leader.grant()
    before, _ = leader.windows
    leader.propose("c", replaces=frozenset({"b"}))
    leader.update(states(before.end_iteration - 2, "a", "b", "c"))
    assert leader.grant()

    assert leader.revoked is None
    assert leader.windows[-1].begin_iteration > before.end_iteration


def test_a_dropped_plan_is_not_followed_again_when_an_older_message_arrives_late() -> None:
    follower = PlanWindowFollower()
    follower.update([PlanWindow("a", 0, 9)])
    follower.drop("a")
    follower.update([PlanWindow("a", 0, 12), PlanWindow("b", 5, 9)])

    assert [follower.plan_for(k) for k in (4, 5)] == [None, "b"]


@pytest.mark.parametrize("ahead", [AHEAD_ITERATIONS, 9])
def test_a_window_never_ends_far_ahead_of_the_newest_iteration(ahead: int) -> None:
    leader = agreed("a", at=10)
    for iteration in range(10, 60):
        leader.update(states(iteration, "a"))
        leader.grant(ahead=ahead)

        assert leader.windows[-1].end_iteration <= max(iteration + 3 * ahead, 10 + 3 * AHEAD_ITERATIONS)


def test_newest_iteration_is_unknown_before_the_first_report() -> None:
    assert grantor().newest_iteration == -1
    assert grantor().plan_to_install is None
    assert not grantor().grant()


def test_all_members_must_report_recent_iterations() -> None:
    leader = grantor()
    leader.propose("a")
    installed = frozenset({"a"})
    leader.update({member: MemberState(20, installed) for member in MEMBERS[:2]})
    assert not leader.grant()

    leader.update({MEMBERS[2]: MemberState(20 - 2 * AHEAD_ITERATIONS - 1, installed)})
    assert not leader.grant()
    leader.update({MEMBERS[2]: MemberState(20 - 2 * AHEAD_ITERATIONS, installed)})
    assert leader.grant()


def test_a_window_is_extended_when_its_end_is_near() -> None:
    leader = agreed("a", at=10)
    end = leader.windows[-1].end_iteration
    leader.update(states(end - 2 * AHEAD_ITERATIONS, "a"))
    assert not leader.grant()

    leader.update(states(end - 2 * AHEAD_ITERATIONS + 1, "a"))
    assert leader.grant()
    assert leader.windows[-1].end_iteration == end + 1


def test_an_ended_window_is_resumed_ahead_and_an_ending_one_continues() -> None:
    over, nearly = agreed("a", at=10), agreed("a", at=10)
    end = over.windows[-1].end_iteration
    over.update(states(end, "a"))
    nearly.update(states(end - 1, "a"))

    assert over.grant()
    assert nearly.grant()
    assert over.windows[-1] == PlanWindow("a", end + AHEAD_ITERATIONS, end + 3 * AHEAD_ITERATIONS)
    assert nearly.windows[-1] == PlanWindow("a", 10 + AHEAD_ITERATIONS, end - 1 + 2 * AHEAD_ITERATIONS)


def test_a_proposal_is_stuck_after_four_times_the_lead() -> None:
    leader = agreed("a", at=10)
    leader.propose("b")
    leader.update(states(10 + 4 * AHEAD_ITERATIONS, "a"))
    assert leader.grant()

    leader.update(states(10 + 4 * AHEAD_ITERATIONS + 1, "a"))
    assert not leader.grant()


def test_a_short_window_is_repeated_after_twice_the_lead() -> None:
    leader = grantor()
    leader.propose("a", is_short=True)
    leader.update(states(10, "a"))
    leader.grant()
    begin, end = leader.windows[-1].begin_iteration, leader.windows[-1].end_iteration
    assert end - begin == SHORT_WINDOW_ITERATIONS

    leader.update(states(end + 2 * AHEAD_ITERATIONS - 1, "a"))
    assert not leader.grant()
    leader.update(states(end + 2 * AHEAD_ITERATIONS, "a"))
    assert leader.grant()


def test_reports_of_the_same_iteration_replace_and_earlier_ones_do_not() -> None:
    leader = grantor()
    leader.propose("a")
    leader.update(states(10))
    leader.update(states(9, "a"))
    assert not leader.grant()

    leader.update(states(10, "a"))
    assert leader.grant()


def test_revoke_without_a_window_revokes_nothing() -> None:
    leader = grantor()
    leader.propose("a")
    leader.revoke()

    assert (leader.revoked, leader.plan_to_install, leader.windows) == (None, None, ())


def test_a_block_at_full_speed_is_a_gap_between_two_windows_of_one_plan() -> None:
    leader, follower = agreed("a", at=10), PlanWindowFollower()
    first = leader.windows[-1]
    leader.request_block(4)
    leader.update(states(first.begin_iteration, "a"))

    assert leader.grant()
    begin = first.end_iteration + 4
    assert leader.windows == (first, PlanWindow("a", begin, begin + AHEAD_ITERATIONS))
    assert leader.plan_to_install == "a"
    follower.update(leader.windows)
    at_full_speed = [i for i in range(first.begin_iteration, begin + 1) if follower.plan_for(i) is None]
    assert at_full_speed == list(range(first.end_iteration, begin))

    leader.update(states(begin, "a"))
    assert leader.grant()
    assert leader.windows[-1] == PlanWindow("a", begin, begin + 2 * AHEAD_ITERATIONS), "one block for each request"


def test_a_block_waits_until_its_plan_runs_and_is_forgotten_with_it() -> None:
    leader = agreed("a", at=10)
    leader.request_block(4)
    assert not leader.grant(), "the window has not begun"

    leader.propose("b")
    leader.update(states(13, "a", "b"))
    assert leader.grant()
    leader.update(states(leader.windows[-1].begin_iteration, "a", "b"))
    leader.grant()
    assert {window.plan_id for window in leader.windows} == {"a", "b"}

    over = agreed("a", at=10)
    over.request_block(4)
    over.let_expire()
    over.update(states(13, "a"))
    assert not over.grant()


def test_a_revoked_plan_is_left_during_the_block_too() -> None:
    leader, follower = agreed("a", at=10), PlanWindowFollower()
    leader.request_block(4)
    leader.update(states(12, "a"))
    assert leader.grant()
    follower.update(leader.windows)
    leader.revoke()
    follower.drop("a")

    assert leader.windows == ()
    assert {follower.plan_for(index) for index in range(12, 40)} == {None}
