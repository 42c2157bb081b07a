"""Statements of replicas through the job's store: paces and budgets hold until the next one, and expire in silence."""

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.core.distributed.stragglers import StragglerRules
from gpuenergyd_across_hosts.ranks.job_store import JobStore
from gpuenergyd_across_hosts.ranks.replica_paces import ReplicaPaces
from tests.support.examples import examples
from tests.support.memory_store import MemoryStore
from tests.support.waiting import LIMIT_S

# --- whatever becomes of the store, and of the replicas ---


class LostError(Exception):
    """The store cannot be reached."""


@dataclass
class Link(MemoryStore):
    """One replica's link to the store: each operation fails while it is cut."""

    is_cut: bool = False

    def set(self, key: str, value: str) -> None:
        self._check()
        super().set(key, value)

    def get(self, key: str) -> bytes | None:
        """Return a key's value."""
        self._check()
        return super().get(key)

    def add(self, key: str, amount: int) -> int:
        self._check()
        return super().add(key, amount)

    def _check(self) -> None:
        if self.is_cut:
            raise LostError


@dataclass
class Replica:
    """A replica: what it measures, and what it has heard."""

    number: int
    link: Link
    paces: ReplicaPaces = field(init=False)
    num_readings: int = 0
    own_time_s: float | None = None
    spent_s: float = 0.0
    excess_s: float = 0.0
    num_news: int = 0
    published: list[float | None] = field(default_factory=list)
    """The own times that it has published."""

    def __post_init__(self) -> None:
        self.paces = ReplicaPaces(is_first=self.number == 0)

    def measure(self, own_time_s: float) -> None:
        """Take a measurement, and spend something."""
        self.own_time_s, self.num_readings = own_time_s, self.num_readings + 1
        self.spent_s += 0.25
        self.excess_s += 0.5

    def restart_daemon(self) -> None:
        """Lose the account and the pace."""
        self.own_time_s, self.num_readings, self.spent_s, self.excess_s = None, 0, 0.0, 0.0

    def publish(self, iteration_index: int, *, has_budget: bool) -> None:
        budget = {
            "permitted_slowdown_ratio": 0.01 * self.number, "is_decided": True,
            "excess_s": self.excess_s, "spent_s": self.spent_s,
        }  # fmt: skip
        with suppress(LostError):
            self.paces.publish(
                self.link, self.own_time_s, num_readings=self.num_readings, iteration_index=iteration_index,
                budget=budget if has_budget else None,
            )  # fmt: skip
            self.published.append(self.own_time_s)


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "pause_s": st.sampled_from([0.2, 0.5, 3.0, 12.0]),
            "measured": st.dictionaries(st.integers(0, 2), st.sampled_from([0.5, 1.0, 1.5, 4.0]), max_size=3),
            "silent": st.sets(st.integers(0, 2), max_size=1),
            "cut": st.sets(st.integers(0, 2), max_size=1),
            "restarted": st.sets(st.integers(0, 2), max_size=1),
            "without_budget": st.sets(st.integers(0, 2), max_size=1),
        }
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=examples(150), deadline=None)
@given(STEPS)
def test_a_pace_was_published_and_is_fresh_and_no_budget_is_charged_twice(steps: list[dict[str, Any]]) -> None:
    store = MemoryStore()
    replicas = [Replica(k, Link(store.values, store.counters)) for k in range(3)]
    spent_s, now_s = [0.0] * 3, 100.0
    num_measured = 0
    for index, step in enumerate(steps):
        now_s += step["pause_s"]
        for replica in replicas:
            number = replica.number
            replica.link.is_cut = number in step["cut"]
            if number in step["restarted"]:
                replica.restart_daemon()
            if number in step["measured"]:
                replica.measure(step["measured"][number])
                spent_s[number] += 0.25
                num_measured += 1
            if number not in step["silent"]:
                replica.publish(index, has_budget=number not in step["without_budget"])
        for replica in replicas:
            try:
                heard = replica.paces.others(replica.link, now_s)
            except LostError:
                continue
            replica.num_news += heard.is_news
            if heard.slowest_time_s is not None:
                others = [other for other in replicas if other is not replica]
                assert any(heard.slowest_time_s in other.published for other in others)
                assert heard.age_s <= StragglerRules().counts_for_s(heard.slowest_time_s)
            budget = replica.paces.budget(now_s)
            assert 0 <= budget["others_spent_s"] <= sum(spent_s) - spent_s[replica.number]
            assert 0 <= budget["excess_s"] <= 2 * (sum(spent_s) - spent_s[replica.number])
            assert budget["permitted_slowdown_ratio"] in {None, 0.0}
            assert budget["age_s"] <= now_s - 100.0
    assert all(replica.num_news <= 2 * num_measured + 3 for replica in replicas)

    # Nothing is published any more.
    for replica in replicas:
        replica.link.is_cut = False
        replica.paces.others(replica.link, now_s + 1.0)
        assert replica.paces.others(replica.link, now_s + 30.0).slowest_time_s is None
        first_heard = replica.paces.budget(now_s + 30.0)
        assert first_heard["permitted_slowdown_ratio"] is None or first_heard["age_s"] > 28.9


# --- one by one ---


def test_a_share_that_is_missing_for_a_while_is_not_charged_again() -> None:
    store = MemoryStore()
    reader, other = ReplicaPaces(), ReplicaPaces(is_first=True)
    spent = []
    for at_s, share in enumerate(((1.0, 5.0), None, (1.5, 6.0))):
        budget = None
        if share is not None:
            budget = {
                "permitted_slowdown_ratio": 0.02, "is_decided": True, "excess_s": share[0], "spent_s": share[1],
            }  # fmt: skip
        other.publish(store, 1.0, num_readings=1, iteration_index=at_s, budget=budget)
        reader.others(store, at_s)
        found = reader.budget(at_s)
        spent.append((found["excess_s"], found["others_spent_s"], found["permitted_slowdown_ratio"], found["age_s"]))

    assert spent == [(0.0, 5.0, 0.02, 0.0), (0.0, 5.0, 0.02, 0.0), (0.5, 6.0, 0.02, 0.0)]


def test_the_slowest_other_replica_and_the_least_overhead_are_returned() -> None:
    store = MemoryStore()
    replicas = [ReplicaPaces() for _ in range(3)]
    for number, replica in enumerate(replicas):
        replica.publish(store, 1.0 + number, num_readings=1, iteration_index=4, overhead_s=0.3 - 0.1 * number)

    others = [replica.others(store, 1.0) for replica in replicas]

    assert [other.slowest_time_s for other in others] == [3.0, 3.0, 2.0]
    assert [other.least_overhead_s for other in others] == pytest.approx([0.1, 0.1, 0.2])
    assert all(other.is_news for other in others)


def test_a_measurement_is_new_only_once() -> None:
    store = MemoryStore()
    reader, other = ReplicaPaces(), ReplicaPaces()
    news = []
    for at_s, (num_readings, iteration_index) in enumerate(((1, 4), (1, 5), (2, 6), (2, 6))):
        other.publish(store, 1.2, num_readings=num_readings, iteration_index=iteration_index)
        news.append(reader.others(store, at_s).is_news)

    assert news == [True, False, True, False]


def test_a_replica_without_a_pace_has_no_effect() -> None:
    store = MemoryStore()
    reader, other = ReplicaPaces(), ReplicaPaces()
    other.publish(store, None, num_readings=0, iteration_index=1)
    reader.publish(store, 1.0, num_readings=1, iteration_index=1)

    assert reader.others(store, 1.0).slowest_time_s is None
    assert other.others(store, 1.0).slowest_time_s == 1.0


def test_an_expired_message_has_no_effect_until_it_changes() -> None:
    store = MemoryStore()
    reader, other = ReplicaPaces(), ReplicaPaces()
    other.publish(store, 1.2, num_readings=1, iteration_index=1)
    seen = [reader.others(store, at_s) for at_s in (1.0, 10.0, 12.0)]
    other.publish(store, 1.2, num_readings=1, iteration_index=2)
    seen.append(reader.others(store, 13.0))

    assert [others.slowest_time_s for others in seen] == [1.2, 1.2, None, 1.2]
    assert [others.age_s for others in seen] == [0.0, 9.0, 0.0, 0.0]


def test_each_replica_uses_one_small_key() -> None:
    store = MemoryStore()
    replica = ReplicaPaces()
    for iteration_index in range(50):
        replica.publish(store, 1.0, num_readings=iteration_index, iteration_index=iteration_index)

    (reply,) = store.values.values()
    assert len(reply) < 200
    assert json.loads(reply)["own_time_s"] == 1.0


def test_reading_the_others_is_rarer_with_more_replicas() -> None:
    store = MemoryStore()
    replicas = [ReplicaPaces() for _ in range(100)]
    for replica in replicas:
        replica.publish(store, 1.0, num_readings=1, iteration_index=1)
    reader = replicas[0]
    reader.others(store, 1.0)
    replicas[7].publish(store, 1.5, num_readings=2, iteration_index=2)

    early, late = reader.others(store, 1.4), reader.others(store, 1.6)

    assert (early.slowest_time_s, early.is_news) == (1.0, False)
    assert (late.slowest_time_s, late.is_news) == (1.5, True)


def test_replicas_exchange_paces_through_a_real_store() -> None:
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [JobStore("127.0.0.1", server.port, "gpuenergyd/run", limit_s=LIMIT_S) for _ in range(2)]
    replicas = [ReplicaPaces() for _ in stores]
    before = [replica.others(store, 0.0) for replica, store in zip(replicas, stores, strict=True)]
    for number, (replica, store) in enumerate(zip(replicas, stores, strict=True)):
        replica.publish(store, 1.0 + number, num_readings=1, iteration_index=1)

    assert [others.slowest_time_s for others in before] == [None, None]
    assert replicas[0].others(stores[0], 1.0).slowest_time_s == 2.0
    assert replicas[1].others(stores[1], 1.0).slowest_time_s == 1.0
