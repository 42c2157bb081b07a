"""Members of a pipeline across hosts run a plan's order in an iteration or none does, whatever the messages do."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.client.agreed_orders import AgreedOrderedPlans
from gpuenergyd.client.plans import PlannedClocks, PreparedPlan
from gpuenergyd.core.distributed.order_consent import turns_within
from gpuenergyd.core.distributed.order_windows import OrderWindow
from gpuenergyd.core.distributed.plan_windows import MemberState, PlanWindow, PlanWindowGrantor
from tests.support.examples import examples
from tests.support.memory_store import MemoryStore
from tests.trainers.across_hosts.test_host_orders import AHEAD, NUM_ITERATIONS, Host, Link

CLOCKS = {("F", 0, 0): PlannedClocks(1200, 0, 0)}
WITHDRAWN = PreparedPlan(99, 0, {}, b"", "untuned")


def slice_of(plan_id: str, epoch: int, *, is_ordered: bool, training_id: str = "t") -> PreparedPlan:
    """Return a slice whose order names its plan."""
    order = (("F", 0, 0), ("I", epoch, 0), ("W", epoch, 0)) if is_ordered else ()
    return PreparedPlan(
        epoch, 0, CLOCKS, b"", plan_id, full_speed_sm_clock_mhz=1410, order=order,
        training_id=training_id if is_ordered else "",
    )  # fmt: skip


class WindowedHost(Host):
    """A host whose ranks are members of a pipeline across hosts."""

    def _open(self, register: Any) -> AgreedOrderedPlans:
        return AgreedOrderedPlans(register, self.pause)


@contextmanager
def hosts(num_hosts: int, per_host: int, cuts: Sequence[tuple[int, float, float]] = ()) -> Iterator[list[WindowedHost]]:
    """Hosts with shared memory of their own and one store."""
    store = MemoryStore()
    with TemporaryDirectory() as name:
        found = [
            WindowedHost(
                number, num_hosts, per_host, Path(name),
                Link(whole=store, cuts=[(begin, begin + length) for host, begin, length in cuts if host == number]),
            )
            for number in range(num_hosts)
        ]  # fmt: skip
        try:
            yield found
        finally:
            for host in found:
                for rank in host.ranks:
                    rank.close()


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    """Plans proposed in some iterations, late or lost messages of leader and daemons, cut links, and a leaver."""
    num_hosts, per_host = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    num_ranks = num_hosts * per_host
    proposed = sorted(draw(st.sets(st.integers(0, NUM_ITERATIONS * 2 // 3), min_size=1, max_size=4)))
    late = st.sampled_from([0.0, 0.0, 0.2, 0.7, 2.5])
    return {
        "num_hosts": num_hosts,
        "per_host": per_host,
        "proposed": [(at, draw(st.booleans()) or k == 0) for k, at in enumerate(proposed)],
        "blocks": draw(st.sets(st.integers(6, NUM_ITERATIONS), max_size=1)),
        "revoked": draw(st.sets(st.integers(6, NUM_ITERATIONS), max_size=1)),
        "delays": draw(st.lists(late, min_size=7, max_size=7)),
        "lost": draw(st.sets(st.integers(0, 8 * NUM_ITERATIONS), max_size=20)),
        "cleared": draw(st.sets(st.tuples(st.integers(0, num_ranks - 1), st.integers(4, NUM_ITERATIONS)), max_size=1)),
        "withdrawn": draw(
            st.sets(st.tuples(st.integers(0, num_ranks - 1), st.integers(4, NUM_ITERATIONS)), max_size=1)
        ),
        "cuts": draw(
            st.lists(
                st.tuples(st.integers(0, num_hosts - 1), st.floats(0, NUM_ITERATIONS), st.floats(0.1, 8)), max_size=2
            )
        ),
        "periods": draw(st.lists(st.sampled_from([0.2, 0.5, 0.9]), min_size=num_hosts, max_size=num_hosts)),
        "starts": draw(st.lists(st.floats(0, 0.999), min_size=num_ranks * 5, max_size=num_ranks * 5)),
        "faults": draw(st.dictionaries(st.integers(0, 80), st.tuples(st.integers(0, 6), st.booleans()), max_size=4)),
        "leaving": draw(st.one_of(st.none(), st.tuples(st.integers(0, num_ranks - 1), st.integers(1, NUM_ITERATIONS)))),
    }


class Training:
    """The leader, whose agreement reaches the ranks late or not at all, and the ranks."""

    def __init__(self, training: dict[str, Any], found: list[WindowedHost]) -> None:
        self.training, self.hosts = training, found
        self.per_host = training["per_host"]
        self.num_ranks = training["num_hosts"] * self.per_host
        self.grantor = PlanWindowGrantor(frozenset(map(str, range(self.num_ranks))))
        self.orders: dict[str, bool] = {}
        self.messages: list[tuple[float, int, Any]] = []
        self.num_sent = 0
        self.left: set[int] = set()
        self.newest = [-1] * self.num_ranks
        self.ran: dict[int, dict[int, set[Any]]] = {}

    def rank(self, number: int) -> AgreedOrderedPlans:
        """Return a rank."""
        rank: AgreedOrderedPlans = self.hosts[number // self.per_host].ranks[number % self.per_host]
        return rank

    def send(self, now: float, number: int, message: Any) -> None:
        """Have something reach a rank later, or never."""
        self.num_sent += 1
        if self.num_sent not in self.training["lost"]:
            self.messages.append((now + self.training["delays"][self.num_sent % 7], number, message))

    def deliver(self, now: float) -> None:
        """Let what is due arrive."""
        due = [own for own in self.messages if own[0] <= now]
        self.messages = [own for own in self.messages if own[0] > now]
        for _, number, message in due:
            if number not in self.left:
                message(self.rank(number))

    def lead(self, now: float, index: int) -> None:
        """Propose, grant, and publish."""
        training, grantor = self.training, self.grantor
        for k, (at, is_ordered) in enumerate(training["proposed"]):
            if at == index and f"p{k}" not in self.orders:
                self.orders[f"p{k}"] = is_ordered
                grantor.propose(f"p{k}", is_ordered=is_ordered)
                for number in range(self.num_ranks):
                    plan = slice_of(f"p{k}", k + 1, is_ordered=is_ordered)
                    self.send(now, number, lambda rank, plan=plan: rank.add([plan]))
        if index in training["blocks"]:
            grantor.request_block(3)
        if index in training["revoked"]:
            grantor.revoke()
        states = {
            str(number): MemberState(self.newest[number], self.rank(number).installed)
            for number in range(self.num_ranks)
            if number not in self.left
        }
        grantor.update(states)
        grantor.grant(AHEAD)
        windows, revoked = grantor.windows, grantor.revoked
        for number in range(self.num_ranks):
            self.send(now, number, lambda rank: rank.add_windows(windows))
            if revoked is not None:
                self.send(now, number, lambda rank: rank.drop(revoked))

    def begin(self, number: int, index: int, now: float) -> None:
        """Begin an iteration of a rank."""
        host = self.hosts[number // self.per_host]
        host.link.now, host.link.fails_in = now, None
        order = self.rank(number).plan_for(index).order
        self.newest[number] = index
        self.ran.setdefault(index, {}).setdefault(number // self.per_host, set()).add(order)

    def leave(self, number: int) -> None:
        """Have a rank leave."""
        self.left.add(number)
        host = self.hosts[number // self.per_host]
        if number % self.per_host == 0:
            host.carrier.is_leaving = True
            host.exchange()
            host.is_abandoned = True
        self.rank(number).close()

    def run(self) -> None:
        """Run all iterations."""
        training = self.training
        events: list[tuple[float, int, int, int]] = []
        for index in range(NUM_ITERATIONS):
            starts = training["starts"][index % 5 * self.num_ranks :]
            events += [(index + starts[number], 1, number, index) for number in range(self.num_ranks)]
            events += [(index + part, 0, -1, index) for part in (0.05, 0.55)]
        for number, period in enumerate(training["periods"]):
            events += [(k * period, 2, number, k) for k in range(int(NUM_ITERATIONS / period))]
        for now, what, number, k in sorted(events):
            self.deliver(now)
            if what == 0:
                self.lead(now, k)
            elif what == 2:
                host = self.hosts[number]
                host.link.now = now
                host.link.fails_in, host.link.is_applied = training["faults"].get(k, (None, False))
                host.exchange()
            elif number not in self.left:
                if (number, k) in training["cleared"]:
                    self.rank(number).clear()
                if (number, k) in training["withdrawn"]:
                    self.rank(number).add([WITHDRAWN])
                self.begin(number, k, now)
                if training["leaving"] == (number, k):
                    self.leave(number)


@settings(deadline=None, max_examples=examples(200))
@given(trainings())
def test_in_every_iteration_all_members_run_the_order_of_one_plan_or_none_does(training: dict[str, Any]) -> None:
    with hosts(training["num_hosts"], training["per_host"], training["cuts"]) as found:
        run = Training(training, found)
        run.run()

    mixed = 0
    for by_host in run.ran.values():
        assert all(len(orders) == 1 for orders in by_host.values())  # ranks of one host never differ
        reachable = [next(iter(orders)) for host, orders in by_host.items() if not found[host].has_given_up]
        assert len(set(reachable)) <= 1
        mixed += len({order for orders in by_host.values() for order in orders}) > 1
    assert mixed <= sum(host.has_given_up for host in found) * AHEAD


def test_without_disturbance_all_members_run_a_plans_order_without_a_gap_until_it_is_revoked() -> None:
    training: dict[str, Any] = {
        "num_hosts": 3, "per_host": 1, "proposed": [(2, True), (20, False)], "blocks": set(), "revoked": set(),
        "delays": [0.0] * 7, "lost": set(), "cleared": set(), "withdrawn": set(), "cuts": (), "periods": [0.2] * 3,
        "starts": [0.1] * 15, "faults": {}, "leaving": None,
    }  # fmt: skip
    with hosts(3, 1) as found:
        run = Training(training, found)
        run.run()

    ordered = [index for index, by_host in run.ran.items() if all(next(iter(own)) for own in by_host.values())]
    assert ordered == list(range(ordered[0], ordered[-1] + 1))
    assert ordered[0] <= 2 + 4 * AHEAD
    assert 20 <= ordered[-1] <= 20 + 3 * AHEAD


def test_a_revoked_plan_is_followed_where_its_order_was_promised() -> None:
    with hosts(2, 1) as (host, _):
        rank = host.ranks[0]
        rank.add([slice_of("p", 1, is_ordered=True)])
        rank.add_windows([PlanWindow("p", 3, 20)])
        assert rank.agreement.promise(OrderWindow(0, 3, 5))
        rank.agreement.settle(0, is_granted=True)
        rank.drop("p")

        followed = [rank.plan_for(index) for index in range(2, 7)]
    assert [bool(plan.order) for plan in followed] == [False, True, True, False, False]
    assert [bool(plan.clocks) for plan in followed] == [False, True, True, False, False]


def test_in_a_window_that_others_have_not_agreed_on_a_rank_runs_1f1b_at_full_speed() -> None:
    with hosts(2, 1) as (host, _):
        rank = host.ranks[0]
        rank.add([slice_of("p", 1, is_ordered=True), slice_of("q", 2, is_ordered=False)])
        rank.add_windows([PlanWindow("p", 3, 5), PlanWindow("q", 5, 9)])

        followed = [rank.plan_for(index) for index in (3, 4, 5)]
    assert [plan.is_full_speed for plan in followed] == [True, True, False]
    assert [bool(plan.order) for plan in followed] == [False, False, False]
    assert [bool(plan.clocks) for plan in followed] == [False, False, True]


def test_no_window_is_promised_beyond_those_that_the_leader_has_granted() -> None:
    with hosts(2, 1) as (host, _):
        rank = host.ranks[0]
        rank.add([slice_of("p", 1, is_ordered=True)])
        rank.add_windows([PlanWindow("p", 3, 6)])
        assert not rank.agreement.promise(OrderWindow(0, 4, 7))
        rank.add_windows([PlanWindow("p", 3, 9)])

        assert rank.agreement.promise(OrderWindow(0, 4, 7))


def test_turns_of_windows_that_follow_each_other_are_one() -> None:
    assert turns_within([(8, 12), (3, 8)]) == ((3, True), (12, False))
    assert turns_within([(3, 8), (10, 12)], 5) == ((5, True), (8, False), (10, True), (12, False))
    assert turns_within([(3, 8)], 8) == ()
    assert len(turns_within([(k, k + 1) for k in range(0, 20, 2)])) == 4
