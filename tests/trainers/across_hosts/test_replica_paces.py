"""Exchange of paces between replicas through the job's store: new measurements, expiry, number of requests."""

import json

import pytest

from gpuenergyd_trainers.across_hosts.job_store import JobStore
from gpuenergyd_trainers.across_hosts.replica_paces import ReplicaPaces
from tests.support.memory_store import MemoryStore
from tests.support.waiting import LIMIT_S


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
