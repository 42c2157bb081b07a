"""Ranks of one run find each other in a store that an earlier run has used, whatever their launchers count."""

import json

from gpuenergyd.client.environment import find_run_key, without_restarts
from gpuenergyd_across_hosts.ranks.run_agreement import RunAgreement
from tests.support.memory_store import MemoryStore


def run_of(agreement: RunAgreement, store: MemoryStore, now_s: float) -> str | None:
    found = agreement.find(store, now_s)
    return None if found is None else found.prefix


def test_all_ranks_use_the_name_that_the_first_one_draws() -> None:
    store, first, other = MemoryStore(), RunAgreement(0, is_first=True), RunAgreement(0, is_first=False)
    assert run_of(other, store, 0.0) is None

    name = run_of(first, store, 0.1)

    assert name is not None
    assert run_of(other, store, 0.2) == name


def test_a_name_that_an_earlier_run_has_left_is_not_used() -> None:
    store = MemoryStore()
    before = run_of(RunAgreement(0, is_first=True), store, 0.0)
    other, first = RunAgreement(0, is_first=False), RunAgreement(0, is_first=True)
    assert [run_of(other, store, now_s) for now_s in (10.0, 20.0, 30.0)] == [None] * 3

    name = run_of(first, store, 31.0)

    assert name != before
    assert run_of(other, store, 31.1) == name


def test_a_rank_that_begins_late_knows_the_name_after_the_next_beat() -> None:
    store, first = MemoryStore(), RunAgreement(0, is_first=True)
    name = run_of(first, store, 0.0)
    late = RunAgreement(0, is_first=False)
    assert run_of(late, store, 0.5) is None

    assert run_of(first, store, 0.9) == name
    assert run_of(late, store, 0.9) is None
    assert run_of(first, store, 1.0) == name
    assert run_of(late, store, 1.0) == name


def test_the_first_rank_writes_once_a_second_and_the_others_read_only_until_they_know() -> None:
    store, first, other = MemoryStore(), RunAgreement(3, is_first=True), RunAgreement(3, is_first=False)
    run_of(other, store, 0.0)
    for step in range(100):
        run_of(first, store, step / 10)
        run_of(other, store, step / 10)

    name, num_beats = json.loads(store.values[f"{store.prefix}/3/run"])
    store.values.clear()
    assert num_beats == 9
    assert run_of(other, store, 20.0) == f"{store.prefix}/{name}"


def test_hosts_whose_launchers_have_counted_other_restarts_use_one_key() -> None:
    launcher = {"TORCHELASTIC_RUN_ID": "a7", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    keys = [find_run_key(environ={**launcher, "TORCHELASTIC_RESTART_COUNT": count}) for count in ("0", "1")]

    assert keys[0] != keys[1]
    assert {without_restarts(key) for key in keys} == {find_run_key(environ=launcher)}
    assert without_restarts("torchelastic_restart_count=2") == ""
    assert without_restarts("my own key") == "my own key"
