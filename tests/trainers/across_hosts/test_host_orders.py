"""All hosts of a training run their orders in an iteration or none does, whatever becomes of the links between them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.client.agreed_orders import OrderedPlans
from gpuenergyd.client.order_register import OrderRegister
from gpuenergyd.client.plans import PreparedPlan
from gpuenergyd.core.distributed.order_windows import (
    LEAST_AHEAD,
    HostOffer,
    OrderWindow,
    WindowProposer,
    common_turns,
    has_orders_within,
    iterations_ahead,
)
from gpuenergyd_trainers.across_hosts.host_orders import HostExchange, TrainingHosts, find_hosts
from tests.support.examples import examples
from tests.support.memory_store import MemoryStore

T = TypeVar("T")
ORDER = (("F", 0, 0), ("I", 0, 0), ("W", 0, 0))
AHEAD = 3
NUM_ITERATIONS = 36
MOST_PAUSES = 10
PAUSE_ITERATIONS = 0.1


def plan(epoch: int, apply_at: int, *, is_ordered: bool, training_id: str = "t") -> PreparedPlan:
    return PreparedPlan(
        epoch, apply_at, {}, b"", f"plan-{epoch}", order=ORDER if is_ordered else (),
        training_id=training_id if is_ordered else "",
    )  # fmt: skip


class CutError(Exception):
    """The store cannot be reached."""


@dataclass
class Link(MemoryStore):
    """One host's link to the store: cut at times, and failing once before or after an operation."""

    whole: MemoryStore = field(default_factory=MemoryStore)
    cuts: Sequence[tuple[float, float]] = ()
    now: float = 0.0
    fails_in: int | None = None
    is_applied: bool = False
    """Whether the operation that fails next has its effect all the same."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._do(lambda: self.whole.set(key, value))

    def get(self, key: str) -> bytes | None:
        """Return a key's value."""
        return self._do(lambda: self.whole.get(key))

    def get_all(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the values of all keys."""
        return self._do(lambda: self.whole.get_all(keys))

    def set_once(self, key: str, value: str) -> bytes:
        """Write a key unless it has a value."""
        return self._do(lambda: self.whole.set_once(key, value))

    def delete(self, key: str) -> None:
        """Delete a key."""
        self._do(lambda: self.whole.delete(key))

    def _do(self, act: Callable[[], T]) -> T:
        if any(begin <= self.now < end for begin, end in self.cuts):
            raise CutError
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                self.fails_in = None
                if self.is_applied:
                    act()
                raise CutError
        return act()


class Host:
    """One host: its ranks, and the exchange that its first rank carries."""

    def __init__(self, number: int, num_hosts: int, num_ranks: int, folder: Path, link: Link) -> None:
        self.link = link
        self.given_up_at: list[int] = []
        self.ranks: list[Any] = [
            self._open(partial(OrderRegister, rank=rank, num_ranks=num_ranks, folder=folder, host=number))
            for rank in range(num_ranks)
        ]
        self.carrier = HostExchange(self.ranks[0].agreement, number, num_hosts)
        self.has_given_up = False
        self.is_abandoned = False

    def _open(self, register: Any) -> Any:
        return OrderedPlans(register, self.pause)

    def exchange(self) -> None:
        """Exchange through the store, as the carrier's thread does."""
        if self.is_abandoned:
            return
        with suppress(CutError):
            self.carrier.exchange(self.link, AHEAD)

    def pause(self, num_pauses: int) -> bool:
        """The store thread goes on while a rank waits."""
        self.link.now += PAUSE_ITERATIONS
        self.exchange()
        self.has_given_up |= num_pauses >= MOST_PAUSES
        return num_pauses < MOST_PAUSES


@contextmanager
def hosts(num_hosts: int, num_ranks: int, cuts: Sequence[tuple[int, float, float]] = ()) -> Iterator[list[Host]]:
    """Hosts with shared memory of their own and one store."""
    store = MemoryStore()
    with TemporaryDirectory() as name:
        found = []
        for number in range(num_hosts):
            own_cuts = [(begin, begin + length) for host, begin, length in cuts if host == number]
            found.append(Host(number, num_hosts, num_ranks, Path(name), Link(whole=store, cuts=own_cuts)))
        try:
            yield found
        finally:
            for host in found:
                for rank in host.ranks:
                    rank.close()


# --- all or none ---


@st.composite
def trainings(draw: st.DrawFn) -> dict[str, Any]:
    """Plans sent in some iterations and how late, links that are cut or fail, exchanges, starts, and a leaving rank."""
    num_hosts, per_host = draw(st.integers(2, 3)), draw(st.integers(1, 2))
    num_ranks = num_hosts * per_host
    sent = []
    for epoch in range(1, draw(st.integers(1, 5)) + 1):
        at = draw(st.integers(0, NUM_ITERATIONS * 2 // 3))
        sent.append(
            {
                "plan": plan(
                    epoch,
                    at + draw(st.integers(0, 3)),
                    is_ordered=draw(st.booleans()) or epoch == 1,
                    training_id=draw(st.sampled_from(["t", "t", "t", "u"])),
                ),
                "at": at,
                "delays": draw(st.lists(st.floats(0, 3), min_size=num_ranks, max_size=num_ranks)),
                "lost": draw(st.sets(st.integers(0, 4 * num_ranks), max_size=1)),
            }
        )
    return {
        "num_hosts": num_hosts,
        "per_host": per_host,
        "sent": sent,
        "cuts": draw(
            st.lists(
                st.tuples(st.integers(0, num_hosts - 1), st.floats(0, NUM_ITERATIONS), st.floats(0.1, 8)), max_size=3
            )
        ),
        "periods": draw(st.lists(st.sampled_from([0.2, 0.5, 0.9, 1.7]), min_size=num_hosts, max_size=num_hosts)),
        "starts": draw(st.lists(st.floats(0, 0.999), min_size=num_ranks * 5, max_size=num_ranks * 5)),
        "ahead": draw(st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=num_ranks, max_size=num_ranks)),
        "faults": draw(st.dictionaries(st.integers(0, 80), st.tuples(st.integers(0, 6), st.booleans()), max_size=6)),
        "leaving": draw(st.one_of(st.none(), st.tuples(st.integers(0, num_ranks - 1), st.integers(1, NUM_ITERATIONS)))),
    }


def events(training: dict[str, Any]) -> list[tuple[float, int, str, int, Any]]:
    """Return what happens, in order: (instant, tie-breaker, what, rank or host, plan or iteration)."""
    num_ranks = training["num_hosts"] * training["per_host"]
    found: list[tuple[float, int, str, int, Any]] = []
    for own in training["sent"]:
        for rank, delay in enumerate(own["delays"]):
            if rank not in own["lost"]:
                found.append((own["at"] + delay, 0, "message", rank, own["plan"]))
    for iteration_index in range(NUM_ITERATIONS):
        for rank in range(num_ranks):
            start = training["starts"][(iteration_index % 5) * num_ranks + rank]
            found.append((iteration_index + start - training["ahead"][rank], 1, "begin", rank, iteration_index))
    for host, period in enumerate(training["periods"]):
        found += [(k * period, 2, "exchange", host, k) for k in range(int(NUM_ITERATIONS / period))]
    if training["leaving"] is not None:
        rank, at = training["leaving"]
        found.append((at, 3, "leave", rank, None))
    return sorted(found, key=lambda event: event[:4])


def run(training: dict[str, Any]) -> tuple[dict[int, dict[int, set[bool]]], list[Host]]:
    """Return by iteration and host which kinds of orders its ranks ran."""
    ran: dict[int, dict[int, set[bool]]] = {}
    left: set[int] = set()
    per_host = training["per_host"]
    with hosts(training["num_hosts"], per_host, training["cuts"]) as found:
        for now, _, what, number, value in events(training):
            if what == "exchange":
                host = found[number]
                host.link.now = now
                host.link.fails_in, host.link.is_applied = training["faults"].get(value, (None, False))
                host.exchange()
                continue
            if number in left:
                continue
            host, own = found[number // per_host], found[number // per_host].ranks[number % per_host]
            host.link.now, host.link.fails_in = now, None
            if what == "message":
                own.add([value])
            elif what == "begin":
                is_ordered = bool(own.plan_for(value).order)
                ran.setdefault(value, {}).setdefault(number // per_host, set()).add(is_ordered)
            else:
                left.add(number)
                if number % per_host == 0:
                    host.carrier.is_leaving = True
                    host.exchange()
                    host.is_abandoned = True
                own.close()
        return ran, found


@settings(deadline=None, max_examples=examples(200))
@given(trainings())
def test_in_every_iteration_all_hosts_run_orders_or_none_does(training: dict[str, Any]) -> None:
    ran, found = run(training)

    mixed = 0
    for by_host in ran.values():
        assert all(len(kinds) == 1 for kinds in by_host.values())  # ranks of one host never differ
        reachable = [kinds for host, kinds in by_host.items() if not found[host].has_given_up]
        assert len(set(map(frozenset, reachable))) <= 1
        mixed += len(set(map(frozenset, by_host.values()))) > 1
    num_given_up = sum(host.has_given_up for host in found)
    assert mixed <= num_given_up * AHEAD  # the rest of the one window that a host was in doubt about


@settings(deadline=None, max_examples=examples(50))
@given(
    st.integers(2, 4), st.integers(1, 2), st.lists(st.floats(0, 3), min_size=8, max_size=8), st.sampled_from([0.2, 0.4])
)
def test_all_hosts_change_together_soon_and_back(
    num_hosts: int, per_host: int, delays: list[float], period: float
) -> None:
    num_ranks = num_hosts * per_host
    there, back = plan(2, 4, is_ordered=True), plan(3, 20, is_ordered=False)
    training = {
        "num_hosts": num_hosts,
        "per_host": per_host,
        "sent": [
            {"plan": there, "at": 2, "delays": delays[:num_ranks], "lost": ()},
            {"plan": back, "at": 18, "delays": delays[:num_ranks], "lost": ()},
        ],
        "cuts": (),
        "periods": [period] * num_hosts,
        "starts": [0.1 * (k % 7) for k in range(5 * num_ranks)],
        "ahead": [0] * num_ranks,
        "faults": {},
        "leaving": None,
    }

    ran, _ = run(training)

    ordered = [k for k, by_host in ran.items() if all(kinds == {True} for kinds in by_host.values())]
    plain = [k for k, by_host in ran.items() if all(kinds == {False} for kinds in by_host.values())]
    assert len(ordered) + len(plain) == NUM_ITERATIONS
    assert ordered == list(range(ordered[0], ordered[-1] + 1))  # window after window, without a gap
    assert 4 <= ordered[0] <= 4 + max(delays[:num_ranks]) + 2 * AHEAD
    assert 19 <= ordered[-1] <= 21 + 3 * AHEAD + max(delays[:num_ranks])


# --- parts ---


@contextmanager
def one_host(num_ranks: int = 1) -> Iterator[Host]:
    """One host of two, whose first rank has a plan with an order from iteration 1 on."""
    with hosts(2, num_ranks) as found:
        found[0].ranks[0].add([plan(1, 1, is_ordered=True)])
        yield found[0]


def test_a_window_that_has_begun_is_not_promised() -> None:
    with one_host() as host:
        rank = host.ranks[0]
        rank.plan_for(5)

        assert not rank.agreement.promise(OrderWindow(0, 5, 8))
        assert rank.agreement.promise(OrderWindow(1, 6, 8))
        assert not rank.agreement.promise(OrderWindow(2, 8, 10))  # one at a time
        rank.agreement.settle(1, is_granted=False)
        assert rank.agreement.promise(OrderWindow(2, 8, 10))


def test_a_window_without_orders_to_its_end_is_not_promised() -> None:
    with one_host() as host:
        host.ranks[0].add([plan(2, 8, is_ordered=False)])

        assert not host.ranks[0].agreement.promise(OrderWindow(0, 6, 9))
        assert host.ranks[0].agreement.promise(OrderWindow(0, 6, 8))


def test_a_granted_window_is_followed_although_the_plan_is_withdrawn() -> None:
    with one_host() as host:
        rank = host.ranks[0]
        assert rank.agreement.promise(OrderWindow(0, 3, 5))
        rank.agreement.settle(0, is_granted=True)
        rank.clear()

        assert [bool(rank.plan_for(k).order) for k in range(2, 7)] == [False, True, True, False, False]


def test_promised_iterations_count_as_launched() -> None:
    with one_host() as host:
        rank = host.ranks[0]
        assert rank.bound_until == 0
        assert rank.agreement.promise(OrderWindow(0, 3, 5))
        rank.plan_for(1)
        assert rank.bound_until == 5
        rank.agreement.settle(0, is_granted=False)
        rank.plan_for(2)

        assert rank.bound_until == 0


def test_a_host_in_doubt_waits_gives_up_and_promises_nothing_more() -> None:
    with one_host() as host:
        rank = host.ranks[0]
        assert rank.agreement.promise(OrderWindow(0, 3, 6))
        host.link.cuts = [(0.0, 1e9)]

        assert not rank.plan_for(3).order
        assert host.has_given_up
        host.has_given_up = False
        assert not rank.plan_for(4).order
        assert not host.has_given_up  # it waits once
        assert not rank.agreement.promise(OrderWindow(1, 7, 9))
        offer = rank.agreement.offer()
        assert offer is not None
        assert offer.turns == ()


def test_a_rank_in_doubt_learns_that_the_window_was_granted() -> None:
    with one_host() as host:
        rank = host.ranks[0]
        assert rank.agreement.promise(OrderWindow(0, 3, 6))
        host.link.whole.set_once("verdict/0", "granted")

        assert rank.plan_for(3).order


def test_a_window_is_decided_once_and_the_next_one_begins_where_it_ends() -> None:
    proposer = WindowProposer()
    turns = ((1, True),)
    offers = [HostOffer(4, turns), HostOffer(3, turns)]
    first = proposer.propose(offers, 3)
    assert first == OrderWindow(0, 7, 10)
    assert proposer.decision(offers) is None
    assert proposer.propose(offers, 3) is None  # not decided yet
    promised = [HostOffer(5, turns, 0), HostOffer(5, turns, 0)]
    assert proposer.decision(promised) is True
    assert proposer.decision([HostOffer(7, turns), HostOffer(6, turns, 0)]) is False
    proposer.is_decided = True

    assert proposer.propose(promised, 3) == OrderWindow(1, 10, 13)


def test_a_window_ends_where_a_host_returns_to_1f1b_and_begins_where_it_comes_back() -> None:
    block = ((1, True), (8, False), (10, True))
    offers = [HostOffer(4, ((1, True),)), HostOffer(4, block)]
    assert common_turns([own.turns for own in offers]) == block
    assert not has_orders_within(block, 7, 9)
    proposer = WindowProposer()

    assert proposer.propose(offers, 3) == OrderWindow(0, 7, 8)
    proposer.is_decided = True
    later = [HostOffer(5, ((1, True),), 0), HostOffer(5, block, 0)]
    assert proposer.propose(later, 3) == OrderWindow(1, 10, 13)


@pytest.mark.parametrize(("iteration_s", "ahead"), [(0.0, LEAST_AHEAD), (1.0, LEAST_AHEAD), (0.08, 8)])
def test_windows_are_proposed_as_far_ahead_as_the_agreement_takes(iteration_s: float, ahead: int) -> None:
    assert iterations_ahead(0.1, iteration_s) == ahead


def test_hosts_are_found_in_the_launchers_variables() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    assert find_hosts(environ) == TrainingHosts(1, 2, 1, 4)
    assert find_hosts({**environ, "WORLD_SIZE": "7"}) is None
    assert find_hosts({**environ, "LOCAL_RANK": "0"}) is None
    assert find_hosts({}) is None
