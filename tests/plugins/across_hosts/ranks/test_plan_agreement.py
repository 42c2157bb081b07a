"""The agreement on plans: in an iteration each rank follows one plan, clocks and order together, or runs at full speed.

The contract holds whatever becomes of messages, links, daemons and ranks. The leader's side, the ranks' side and the
slices are real; messages between them are late, repeated or lost.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.client.plans import PlannedClocks, PreparedPlan
from gpuenergyd_across_hosts.ranks.agreed_plans import AgreedPlans
from gpuenergyd_across_hosts.rules.plan_windows import AHEAD_ITERATIONS, MemberState, PlanWindowGrantor
from tests.support.examples import examples

NUM_ITERATIONS = 40
LONGEST_DELAY = 3.0
CLOCKS = {("F", 0, 0): PlannedClocks(1200, 0, 0)}
WITHDRAWN = PreparedPlan(99, 0, {}, b"", "untuned")


def slice_of(plan_id: str, epoch: int, *, is_ordered: bool) -> PreparedPlan:
    """Return a slice; an order names its plan."""
    order = (("F", 0, 0), ("I", epoch, 0), ("W", epoch, 0)) if is_ordered else ()
    return PreparedPlan(epoch, 0, CLOCKS, b"", plan_id, full_speed_sm_clock_mhz=1410, order=order)


@dataclass(frozen=True)
class Case:
    """What happens to a training; iterations of rank r begin at k + starts[r], and some ranks launch ahead."""

    num_ranks: int = 3
    proposed: tuple[tuple[int, bool], ...] = ((2, True),)
    """Iterations in which the leader proposes another plan, and whether that has an order."""
    blocks: frozenset[int] = frozenset()
    revoked: frozenset[int] = frozenset()
    """Iterations in which the leader revokes its plan."""
    restarted: frozenset[int] = frozenset()
    """Iterations in which the leader's daemon has begun anew: its plan is not extended."""
    delays: tuple[float, ...] = (0.0,)
    """Delays of messages, in turn, in iterations."""
    lost: frozenset[int] = frozenset()
    """Messages by number."""
    cuts: tuple[tuple[int, float, float], ...] = ()
    """Ranks whose link is cut from one instant to another."""
    cleared: frozenset[tuple[int, int]] = frozenset()
    """Ranks and iterations in which their daemon is gone."""
    withdrawn: frozenset[tuple[int, int]] = frozenset()
    """Ranks and iterations in which their daemon has restored the GPU."""
    leaving: tuple[int, int] | None = None
    starts: tuple[float, ...] = (0.1,) * 4
    ahead: tuple[int, ...] = (0,) * 4


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks = draw(st.integers(2, 4))
    iterations, ranks = st.integers(0, NUM_ITERATIONS), st.integers(0, num_ranks - 1)
    proposed = sorted(draw(st.sets(st.integers(0, NUM_ITERATIONS * 2 // 3), min_size=1, max_size=5)))
    late = st.sampled_from([0.0, 0.0, 0.2, 0.7, LONGEST_DELAY])
    per_rank: dict[str, Any] = {"min_size": num_ranks, "max_size": num_ranks}
    return Case(
        num_ranks=num_ranks,
        proposed=tuple((at, draw(st.booleans())) for at in proposed),
        blocks=draw(st.frozensets(iterations, max_size=2)),
        revoked=draw(st.frozensets(iterations, max_size=2)),
        restarted=draw(st.frozensets(iterations, max_size=1)),
        delays=tuple(draw(st.lists(late, min_size=1, max_size=7))),
        lost=draw(st.frozensets(st.integers(0, 8 * NUM_ITERATIONS), max_size=40)),
        cuts=tuple(draw(st.lists(st.tuples(ranks, st.floats(0, NUM_ITERATIONS), st.floats(0.1, 12)), max_size=2))),
        cleared=draw(st.frozensets(st.tuples(ranks, iterations), max_size=2)),
        withdrawn=draw(st.frozensets(st.tuples(ranks, iterations), max_size=2)),
        leaving=draw(st.none() | st.tuples(ranks, iterations)),
        starts=tuple(draw(st.lists(st.floats(0, 0.999), **per_rank))),
        ahead=tuple(draw(st.lists(st.sampled_from([0, 0, 1, 3]), **per_rank))),
    )


@dataclass
class Training:
    """A leader and its ranks; `followed` has the plan of each rank by iteration."""

    case: Case
    grantor: PlanWindowGrantor = field(init=False)
    ranks: list[AgreedPlans] = field(init=False)
    followed: list[dict[int, PreparedPlan]] = field(default_factory=list)
    proposals: dict[str, PreparedPlan] = field(default_factory=dict)
    granted_until: int = 0
    """The end of the last window that was ever granted."""
    _messages: list[tuple[float, int, Callable[[AgreedPlans], None]]] = field(default_factory=list)
    _num_sent: int = 0
    _newest: list[int] = field(init=False)
    _left: set[int] = field(default_factory=set)
    _dropped: set[tuple[int, str]] = field(default_factory=set)
    """Ranks that have read that a plan was revoked."""

    def __post_init__(self) -> None:
        count = self.case.num_ranks
        self.grantor = PlanWindowGrantor(frozenset(map(str, range(count))))
        self.ranks = [AgreedPlans() for _ in range(count)]
        self._newest = [-1] * count

    def run(self) -> "Training":
        """Run all iterations, then some without any message."""
        case = self.case
        self.followed = [{} for _ in range(3 * NUM_ITERATIONS)]
        events = [(k + part, 0, -1, k) for k in range(NUM_ITERATIONS) for part in (0.05, 0.3, 0.55, 0.8)]
        for rank in range(case.num_ranks):
            start = case.starts[rank] - case.ahead[rank]
            events += [(k + start, 1, rank, k) for k in range(3 * NUM_ITERATIONS)]
        for now, what, rank, k in sorted(events):
            self._deliver(now)
            if what == 0:
                self._lead(now, k)
            elif rank not in self._left:
                self._begin(rank, k)
        return self

    def _lead(self, now: float, index: int) -> None:
        case, grantor = self.case, self.grantor
        for epoch, (at, is_ordered) in enumerate(case.proposed, 1):
            if at == index and f"p{epoch}" not in self.proposals:
                plan = self.proposals[f"p{epoch}"] = slice_of(f"p{epoch}", epoch, is_ordered=is_ordered)
                grantor.propose(plan.plan_id)
        if index in case.blocks:
            grantor.request_block(3)
        if index in case.revoked:
            grantor.revoke()
        if index in case.restarted:
            grantor.let_expire()
        for rank, plans in enumerate(self.ranks):
            if rank not in self._left and not self._is_cut(rank, now):
                grantor.update({str(rank): MemberState(self._newest[rank], plans.installed)})
        grantor.grant(2 + max(case.ahead))
        self.granted_until = max(self.granted_until, *(window.end_iteration for window in grantor.windows), 0)
        wanted, windows, revoked = grantor.plan_to_install, grantor.windows, grantor.revoked
        for rank in range(case.num_ranks):
            if wanted is not None:
                self._send(now, rank, partial(AgreedPlans.add, plans=[self.proposals[wanted]]))
            self._send(now, rank, partial(AgreedPlans.add_windows, windows=windows))
            if revoked is not None:
                self._send(now, rank, partial(self._drop, rank, revoked))

    def _drop(self, rank: int, plan_id: str, plans: AgreedPlans) -> None:
        plans.drop(plan_id)
        self._dropped.add((rank, plan_id))

    def _is_cut(self, rank: int, now: float) -> bool:
        return any(which == rank and begin <= now < begin + length for which, begin, length in self.case.cuts)

    def _send(self, now: float, rank: int, message: Callable[[AgreedPlans], None]) -> None:
        self._num_sent += 1
        if self._num_sent not in self.case.lost and not self._is_cut(rank, now):
            delays = self.case.delays
            self._messages.append((now + delays[self._num_sent % len(delays)], rank, message))

    def _deliver(self, now: float) -> None:
        due = sorted((own for own in self._messages if own[0] <= now), key=lambda own: own[0])
        self._messages = [own for own in self._messages if own[0] > now]
        for _, rank, message in due:
            if rank not in self._left:
                message(self.ranks[rank])

    def _begin(self, rank: int, index: int) -> None:
        if (rank, index) in self.case.cleared:
            self.ranks[rank].clear()
        if (rank, index) in self.case.withdrawn:
            self.ranks[rank].add([WITHDRAWN])
        self.followed[index][rank] = plan = self.ranks[rank].plan_for(index)
        assert not is_followed(plan) or (rank, plan.plan_id) not in self._dropped
        self._newest[rank] = index
        if self.case.leaving == (rank, index):
            self._left.add(rank)


def is_followed(plan: PreparedPlan) -> bool:
    """Return whether a rank follows a plan, and does not run at full speed in its registered order."""
    return bool(plan.clocks)


@settings(deadline=None, max_examples=examples(200))
@given(cases())
def test_in_each_iteration_each_rank_follows_the_one_plan_or_runs_at_full_speed(case: Case) -> None:
    training = Training(case).run()

    for by_rank in training.followed:
        plans = {plan.plan_id for plan in by_rank.values() if is_followed(plan)}
        assert len(plans) <= 1
        for plan in by_rank.values():
            known = training.proposals.get(plan.plan_id)
            assert plan.order == (known.order if known is not None and is_followed(plan) else ())


@settings(deadline=None, max_examples=examples(100))
@given(cases())
def test_without_messages_every_plan_lapses_to_full_speed(case: Case) -> None:
    training = Training(case).run()

    end = training.granted_until
    longest_window = 2 * (2 + max(case.ahead))
    assert end <= NUM_ITERATIONS + (len(case.proposed) + 2) * longest_window + 3 * len(case.blocks)
    assert not any(is_followed(plan) for by_rank in training.followed[end:] for plan in by_rank.values())


@settings(deadline=None, max_examples=examples(100))
@given(
    st.integers(2, 4),
    st.lists(st.floats(0, 0.999), min_size=4, max_size=4),
    st.lists(st.sampled_from([0.0, 0.2, 0.7]), min_size=1, max_size=5),
    st.tuples(st.booleans(), st.booleans()),
)
def test_undisturbed_all_ranks_change_plan_and_order_in_the_same_iteration_without_a_gap(
    num_ranks: int, starts: list[float], delays: list[float], are_ordered: tuple[bool, bool]
) -> None:
    proposed = ((2, are_ordered[0]), (20, are_ordered[1]))
    case = Case(num_ranks, proposed, delays=tuple(delays), starts=tuple(starts[:num_ranks]))
    training = Training(case).run()

    by_iteration = [{plan.plan_id for plan in own.values() if is_followed(plan)} for own in training.followed]
    are_all = [all(map(is_followed, own.values())) for own in training.followed]
    first, second = ([k for k, plans in enumerate(by_iteration) if plans == {name}] for name in ("p1", "p2"))
    assert 2 < first[0] <= 2 + 4 * AHEAD_ITERATIONS
    assert second[0] == first[-1] + 1
    assert second[0] <= 20 + 4 * AHEAD_ITERATIONS
    assert all(are_all[first[0] : NUM_ITERATIONS])


def test_a_rank_that_has_not_heard_of_a_window_runs_its_registered_order_at_full_speed_beside_the_others() -> None:
    training = Training(Case(3, ((2, True),), cuts=((2, 10.0, 30.0),))).run()

    mixed = [k for k, own in enumerate(training.followed) if len(set(map(is_followed, own.values()))) > 1]
    assert 0 < len(mixed) <= 2 * AHEAD_ITERATIONS
    for k in mixed:
        assert not training.followed[k][2].order
        assert training.followed[k][2].is_full_speed
    assert not any(map(is_followed, training.followed[mixed[-1] + 1].values()))


def test_a_revoked_order_ends_with_its_plan_on_each_rank_that_reads_it() -> None:
    training = Training(Case(3, ((2, True),), revoked=frozenset({15}))).run()

    ordered = [k for k, own in enumerate(training.followed) if any(plan.order for plan in own.values())]
    assert ordered == list(range(ordered[0], ordered[-1] + 1))
    assert ordered[-1] == 14
