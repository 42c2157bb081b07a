"""Replicas tell each other their pace through the job's store: each reading once, and no dead one's for ever."""

import json

import pytest

from gpuenergyd_trainers.across_hosts.job_store import JobStore
from gpuenergyd_trainers.across_hosts.replica_paces import ReplicaPaces
from tests.support.memory_store import MemoryStore


def test_of_all_others_the_slowest_is_told_and_the_least_time_outside_instructions() -> None:
    store = MemoryStore()
    replicas = [ReplicaPaces() for _ in range(3)]
    for number, replica in enumerate(replicas):
        replica.publish(store, 1.0 + number, num_readings=1, iteration_index=4, overhead_s=0.3 - 0.1 * number)

    others = [replica.others(store, 1.0) for replica in replicas]

    assert [other.slowest_time_s for other in others] == [3.0, 3.0, 2.0]
    assert [other.least_overhead_s for other in others] == pytest.approx([0.1, 0.1, 0.2])
    assert all(other.is_news for other in others)


def test_a_reading_is_news_once_however_many_iterations_go_by() -> None:
    store = MemoryStore()
    told, other = ReplicaPaces(), ReplicaPaces()
    news = []
    for at_s, (num_readings, iteration_index) in enumerate(((1, 4), (1, 5), (2, 6), (2, 6))):
        other.publish(store, 1.2, num_readings=num_readings, iteration_index=iteration_index)
        news.append(told.others(store, at_s).is_news)

    assert news == [True, False, True, False]


def test_a_replica_that_does_not_know_its_pace_or_is_alone_says_nothing() -> None:
    store = MemoryStore()
    told, other = ReplicaPaces(), ReplicaPaces()
    other.publish(store, None, num_readings=0, iteration_index=1)
    told.publish(store, 1.0, num_readings=1, iteration_index=1)

    assert told.others(store, 1.0).slowest_time_s is None
    assert other.others(store, 1.0).slowest_time_s == 1.0


def test_a_replica_that_has_fallen_silent_counts_no_more_until_it_is_heard_of_again() -> None:
    store = MemoryStore()
    told, other = ReplicaPaces(), ReplicaPaces()
    other.publish(store, 1.2, num_readings=1, iteration_index=1)
    seen = [told.others(store, at_s) for at_s in (1.0, 10.0, 12.0)]
    other.publish(store, 1.2, num_readings=1, iteration_index=2)
    seen.append(told.others(store, 13.0))

    assert [others.slowest_time_s for others in seen] == [1.2, 1.2, None, 1.2]
    assert [others.age_s for others in seen] == [0.0, 9.0, 0.0, 0.0]


def test_what_is_said_is_one_small_key_for_each_replica() -> None:
    store = MemoryStore()
    replica = ReplicaPaces()
    for iteration_index in range(50):
        replica.publish(store, 1.0, num_readings=iteration_index, iteration_index=iteration_index)

    (said,) = store.values.values()
    assert len(said) < 200
    assert json.loads(said)["own_time_s"] == 1.0


def test_the_more_replicas_there_are_the_less_often_each_asks_for_the_others() -> None:
    store = MemoryStore()
    replicas = [ReplicaPaces() for _ in range(100)]
    for replica in replicas:
        replica.publish(store, 1.0, num_readings=1, iteration_index=1)
    told = replicas[0]
    told.others(store, 1.0)
    replicas[7].publish(store, 1.5, num_readings=2, iteration_index=2)

    early, late = told.others(store, 1.4), told.others(store, 1.6)

    assert (early.slowest_time_s, early.is_news) == (1.0, False)
    assert (late.slowest_time_s, late.is_news) == (1.5, True)


def test_a_real_store_tells_replicas_of_each_other() -> None:
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    stores = [JobStore("127.0.0.1", server.port, "gpuenergyd/run", limit_s=20) for _ in range(2)]
    replicas = [ReplicaPaces() for _ in stores]
    before = [replica.others(store, 0.0) for replica, store in zip(replicas, stores, strict=True)]
    for number, (replica, store) in enumerate(zip(replicas, stores, strict=True)):
        replica.publish(store, 1.0 + number, num_readings=1, iteration_index=1)

    assert [others.slowest_time_s for others in before] == [None, None]
    assert replicas[0].others(stores[0], 1.0).slowest_time_s == 2.0
    assert replicas[1].others(stores[1], 1.0).slowest_time_s == 1.0
