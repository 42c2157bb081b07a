"""Ranks on several hosts agree on plans: whatever is lost, late or restarted, an iteration never sees two plans."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.distributed.plan_windows import (
    AHEAD_ITERATIONS,
    BRIEF_ITERATIONS,
    MAX_AHEAD_ITERATIONS,
    MemberState,
    PlanWindow,
    PlanWindowFollower,
    PlanWindowGrantor,
)

MEMBERS = ("0.0", "1.0", "2.0")


def news(iteration: int, *installed: str) -> dict[str, MemberState]:
    return dict.fromkeys(MEMBERS, MemberState(iteration, frozenset(installed)))


def giver() -> PlanWindowGrantor:
    return PlanWindowGrantor(frozenset(MEMBERS))


def test_a_plan_begins_for_all_at_one_iteration_ahead_of_the_newest() -> None:
    leader = giver()
    leader.hear(news(7))
    leader.propose("a")
    assert not leader.give()
    leader.hear({**news(8, "a"), "1.0": MemberState(9, frozenset({"a"}))})

    assert leader.give()
    assert leader.proposed is None
    assert leader.terms == (PlanWindow("a", 9 + AHEAD_ITERATIONS, 9 + 3 * AHEAD_ITERATIONS),)


def test_a_plan_that_one_member_has_not_installed_is_not_agreed() -> None:
    leader = giver()
    leader.propose("a")
    leader.hear({**news(8, "a"), "1.0": MemberState(8, frozenset())})

    assert not leader.give()
    assert leader.terms == ()


def test_a_term_goes_on_while_all_are_heard_of() -> None:
    leader = agreed("a", at=10)
    leader.hear(news(13, "a"))

    assert leader.give()
    assert leader.terms[-1].end_iteration == 13 + 2 * AHEAD_ITERATIONS
    assert leader.terms[-1].begin_iteration == 10 + AHEAD_ITERATIONS


def test_a_plan_that_is_only_tried_has_a_brief_term_and_is_tried_again_only_if_nothing_came_of_it() -> None:
    leader = giver()
    leader.propose("a", is_brief=True)
    leader.hear(news(10, "a"))
    assert leader.give()
    (term,) = leader.terms
    given_at = []
    for iteration in range(11, 30):
        leader.hear(news(iteration, "a"))
        if leader.give():
            given_at.append(iteration)

    assert term.end_iteration - term.begin_iteration == BRIEF_ITERATIONS
    assert min(given_at) > term.end_iteration
    assert leader.terms[-1].end_iteration - leader.terms[-1].begin_iteration == BRIEF_ITERATIONS


def test_a_plan_that_may_soon_have_a_successor_is_only_kept_from_running_out() -> None:
    leader = agreed("a", at=10)
    leader.is_change_near = True
    end = leader.terms[-1].end_iteration
    for iteration in range(11, end):
        leader.hear(news(iteration, "a"))
        leader.give()

        assert leader.terms[-1].end_iteration == max(end, iteration + AHEAD_ITERATIONS)

    leader.is_change_near = False
    assert leader.give()
    assert leader.terms[-1].end_iteration == end - 1 + 2 * AHEAD_ITERATIONS


def test_a_plan_that_waits_for_its_successor_is_only_kept_from_running_out() -> None:
    leader = agreed("a", at=10)
    leader.propose("b")
    leader.hear(news(15, "a"))

    assert leader.give()
    assert leader.terms[-1].end_iteration == 15 + AHEAD_ITERATIONS


def test_a_term_ends_when_one_member_falls_silent() -> None:
    leader = agreed("a", at=10)
    moving = {member: MemberState(40, frozenset({"a"})) for member in MEMBERS[:2]}
    leader.hear(moving)

    assert not leader.give()
    assert leader.terms[-1].end_iteration <= 10 + 3 * AHEAD_ITERATIONS


def test_a_term_ends_when_one_daemon_gives_the_plan_up() -> None:
    leader = agreed("a", at=10)
    leader.hear({**news(14, "a"), "2.0": MemberState(14, frozenset())})

    assert not leader.give()


def test_a_plan_that_ended_is_taken_up_again_by_all_together() -> None:
    leader = agreed("a", at=10)
    leader.hear(news(90, "a"))

    assert leader.give()
    assert leader.terms[-1] == PlanWindow("a", 90 + AHEAD_ITERATIONS, 90 + 3 * AHEAD_ITERATIONS)


def test_the_next_plan_begins_where_the_one_before_ends() -> None:
    leader = agreed("a", at=10)
    leader.propose("b")
    leader.hear(news(13, "a", "b"))
    assert leader.give()

    before, current = leader.terms
    assert (before.plan_id, current.plan_id) == ("a", "b")
    assert current.begin_iteration == before.end_iteration


def test_a_stuck_proposal_takes_the_plan_before_it_to_full_speed() -> None:
    leader = agreed("a", at=10)
    leader.propose("b")
    given_ends = []
    for iteration in range(11, 60):
        leader.hear(news(iteration, "a"))
        leader.give()
        given_ends.append(leader.terms[-1].end_iteration)

    assert max(given_ends) < 50


def test_an_abandoned_plan_runs_out_and_the_next_one_waits_for_its_end() -> None:
    leader = agreed("a", at=10)
    leader.abandon()
    leader.hear(news(12, "a"))
    assert not leader.give()
    assert leader.wanted is None

    leader.propose("b")
    leader.hear(news(13, "a", "b"))
    assert leader.give()
    before, current = leader.terms
    assert current.begin_iteration >= before.end_iteration
    assert leader.wanted == "b"


def test_a_released_plan_is_followed_no_more_at_once() -> None:
    leader = agreed("a", at=10)
    keeper = PlanWindowFollower()
    keeper.hear(leader.terms)
    in_force_at = leader.terms[-1].begin_iteration
    assert keeper.plan_for(in_force_at) == "a"
    end = leader.terms[-1].end_iteration
    leader.release()
    assert leader.released == "a"
    keeper.drop("a")

    assert list(leader.terms) == []
    assert keeper.plan_for(in_force_at) is None
    leader.propose("b")
    leader.hear(news(11, "a", "b"))
    assert leader.give()
    assert [term.begin_iteration >= end for term in leader.terms] == [True]


def test_more_time_ahead_is_given_when_words_are_slow_and_never_without_bound() -> None:
    leader = giver()
    leader.propose("a")
    leader.hear(news(0, "a"))
    leader.give(ahead=10**6)

    assert leader.terms[-1].begin_iteration == MAX_AHEAD_ITERATIONS


def test_strangers_and_old_news_are_ignored() -> None:
    leader = agreed("a", at=10)
    leader.hear({"9.9": MemberState(10**6, frozenset())})
    leader.hear(news(3))

    assert leader.newest_iteration == 10


def test_a_member_hears_terms_in_any_order_and_any_number_of_times() -> None:
    keeper = PlanWindowFollower()
    keeper.hear([PlanWindow("a", 5, 20)])
    keeper.hear([PlanWindow("a", 5, 12), PlanWindow("b", 20, 30)])

    assert [keeper.plan_for(i) for i in (4, 5, 19, 20, 29, 30)] == [None, "a", "a", "b", "b", None]


def test_a_member_whose_daemon_lost_everything_follows_nothing() -> None:
    keeper = PlanWindowFollower()
    keeper.hear([PlanWindow("a", 5, 20)])
    keeper.forget()

    assert keeper.plan_for(10) is None


def agreed(plan_id: str, *, at: int) -> PlanWindowGrantor:
    leader = giver()
    leader.propose(plan_id)
    leader.hear(news(at, plan_id))
    assert leader.give()
    return leader


@dataclass
class Rank:
    """A rank of the model: what it has heard, and what its daemon has installed."""

    keeper: PlanWindowFollower = field(default_factory=PlanWindowFollower)
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
            "ahead": st.integers(1, 12),
        }
    ),
    min_size=20,
    max_size=40,
)


@settings(max_examples=40)
@given(ROUNDS)
def test_no_iteration_ever_sees_two_plans_whatever_is_late_lost_or_restarted(rounds: list[dict[str, Any]]) -> None:
    leader, ranks = giver(), [Rank() for _ in MEMBERS]
    published: list[tuple[PlanWindow, ...]] = [()]
    iteration = num_plans = 0
    for this in rounds:
        if this["is_another_plan_proposed"] and leader.proposed is None:
            num_plans += 1
            leader.propose(f"plan-{num_plans}")
        for which in this["restarted"] - this["installs"]:
            ranks[which].installed.clear()
            ranks[which].keeper.forget()
        for which in this["installs"]:
            ranks[which].installed |= {leader.proposed} if leader.proposed else set()
        for which in this["told"]:
            leader.hear({MEMBERS[which]: MemberState(iteration, frozenset(ranks[which].installed))})
        leader.give(ahead=this["ahead"])
        published.append(leader.terms)
        for which in this["hears"]:
            ranks[which].keeper.hear(published[max(0, len(published) - 1 - this["hears_of_rounds_ago"])])
        for _ in range(this["num_iterations"]):
            iteration += 1
            followed = {rank.keeper.plan_for(iteration) for rank in ranks} - {None}
            assert len(followed) <= 1, f"iteration {iteration}: {followed}"

    # Nothing is heard any more: the store is gone, or the leader. Every term ends, and full speed follows.
    longest = max((term.end_iteration for terms in published for term in terms), default=0)
    for last in range(iteration, max(iteration, longest) + 1):
        assert len({rank.keeper.plan_for(last) for rank in ranks} - {None}) <= 1
    assert [rank.keeper.plan_for(max(iteration, longest)) for rank in ranks] == [None] * 3


@pytest.mark.parametrize("ahead", [AHEAD_ITERATIONS, 9])
def test_a_heard_term_never_lasts_longer_than_a_few_words_ahead_of_the_newest_iteration(ahead: int) -> None:
    leader = agreed("a", at=10)
    for iteration in range(10, 60):
        leader.hear(news(iteration, "a"))
        leader.give(ahead=ahead)

        assert leader.terms[-1].end_iteration <= max(iteration + 3 * ahead, 10 + 3 * AHEAD_ITERATIONS)


def test_a_term_covers_its_begin_and_not_its_end() -> None:
    assert [PlanWindow("a", 5, 7).covers(index) for index in (4, 5, 6, 7)] == [False, True, True, False]


def test_a_member_follows_a_plan_up_to_the_end_of_its_longest_term() -> None:
    keeper = PlanWindowFollower()
    keeper.hear([PlanWindow("a", 5, 9), PlanWindow("a", 5, 7)])

    assert [keeper.plan_for(index) for index in (4, 5, 8, 9)] == [None, "a", "a", None]
    keeper.hear([PlanWindow("b", 9, 11)])
    assert keeper.plan_for(10) == "b"
    keeper.drop("b")
    keeper.drop("never heard of")
    assert keeper.plan_for(10) is None


def test_before_anybody_is_heard_of_no_iteration_is_known() -> None:
    assert giver().newest_iteration == -1
    assert giver().wanted is None
    assert not giver().give()


def test_all_must_be_heard_of_and_be_no_further_apart_than_two_words() -> None:
    leader = giver()
    leader.propose("a")
    installed = frozenset({"a"})
    leader.hear({member: MemberState(20, installed) for member in MEMBERS[:2]})
    assert not leader.give()

    leader.hear({MEMBERS[2]: MemberState(20 - 2 * AHEAD_ITERATIONS - 1, installed)})
    assert not leader.give()
    leader.hear({MEMBERS[2]: MemberState(20 - 2 * AHEAD_ITERATIONS, installed)})
    assert leader.give()


def test_a_term_is_prolonged_once_it_would_end_within_two_words() -> None:
    leader = agreed("a", at=10)
    end = leader.terms[-1].end_iteration
    leader.hear(news(end - 2 * AHEAD_ITERATIONS, "a"))
    assert not leader.give()

    leader.hear(news(end - 2 * AHEAD_ITERATIONS + 1, "a"))
    assert leader.give()
    assert leader.terms[-1].end_iteration == end + 1


def test_a_term_that_ends_now_is_taken_up_ahead_and_one_that_ends_next_goes_on() -> None:
    over, nearly = agreed("a", at=10), agreed("a", at=10)
    end = over.terms[-1].end_iteration
    over.hear(news(end, "a"))
    nearly.hear(news(end - 1, "a"))

    assert over.give()
    assert nearly.give()
    assert over.terms[-1] == PlanWindow("a", end + AHEAD_ITERATIONS, end + 3 * AHEAD_ITERATIONS)
    assert nearly.terms[-1] == PlanWindow("a", 10 + AHEAD_ITERATIONS, end - 1 + 2 * AHEAD_ITERATIONS)


def test_a_proposal_is_stuck_after_four_words() -> None:
    leader = agreed("a", at=10)
    leader.propose("b")
    leader.hear(news(10 + 4 * AHEAD_ITERATIONS, "a"))
    assert leader.give()

    leader.hear(news(10 + 4 * AHEAD_ITERATIONS + 1, "a"))
    assert not leader.give()


def test_a_plan_that_was_tried_is_tried_again_two_words_after_its_term() -> None:
    leader = giver()
    leader.propose("a", is_brief=True)
    leader.hear(news(10, "a"))
    leader.give()
    end = leader.terms[-1].end_iteration

    leader.hear(news(end + 2 * AHEAD_ITERATIONS - 1, "a"))
    assert not leader.give()
    leader.hear(news(end + 2 * AHEAD_ITERATIONS, "a"))
    assert leader.give()


def test_a_member_is_heard_of_again_at_the_same_iteration_and_never_at_an_earlier_one() -> None:
    leader = giver()
    leader.propose("a")
    leader.hear(news(10))
    leader.hear(news(9, "a"))
    assert not leader.give()

    leader.hear(news(10, "a"))
    assert leader.give()


def test_releasing_where_no_term_was_given_releases_nothing() -> None:
    leader = giver()
    leader.propose("a")
    leader.release()

    assert (leader.released, leader.wanted, leader.terms) == (None, None, ())
