"""The exchange of a loop with other hosts: started by the first rank of a host, ended with the job, never harmful."""

import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

import pytest

from gpuenergyd.client import exchanges
from gpuenergyd.client.exchanges import PaceExchange, PipelineExchange, find_pipeline_membership, start_pace_exchange
from gpuenergyd.client.rank import RankDescription

FIRST_OF_TWO_HOSTS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}
CLIENT: Any = object()
POINTS = {point.name: point for point in importlib.metadata.entry_points(group="gpuenergyd.exchanges")}


def install(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any] | None) -> None:
    class Point:
        def load(self) -> Callable[..., Any]:
            assert start is not None
            return start

    def entry_points(*, group: str, name: str) -> list[Point]:
        assert group == "gpuenergyd.exchanges"
        assert name in POINTS
        return [] if start is None else [Point()]

    monkeypatch.setattr(exchanges, "entry_points", entry_points)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**FIRST_OF_TWO_HOSTS, "LOCAL_RANK": "1"},
        {**FIRST_OF_TWO_HOSTS, "LOCAL_WORLD_SIZE": "4"},
        {**FIRST_OF_TWO_HOSTS, "WORLD_SIZE": "many"},
    ],
)
def test_only_the_first_rank_of_a_host_among_several_exchanges(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    install(monkeypatch, lambda *_, **__: pytest.fail("started"))
    assert start_pace_exchange("loop", CLIENT, None, run_key="run", dp_rank=2, environ=environ) is None


def test_the_first_rank_starts_the_exchange_and_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def start(client: Any, **options: Any) -> Callable[[], None]:
        given.append((client, options))
        return lambda: given.append("stopped")

    install(monkeypatch, start)
    stop = start_pace_exchange("loop", CLIENT, "s", run_key="run", dp_rank=2, environ=FIRST_OF_TWO_HOSTS)
    assert stop is not None
    stop()

    assert given == [(CLIENT, {"run_key": "run", "dp_rank": 2, "socket_path": "s"}), "stopped"]


def test_without_the_plugin_each_rank_of_a_training_on_several_hosts_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, None)
    options: dict[str, Any] = {"run_key": "run", "dp_rank": 2, "environ": FIRST_OF_TWO_HOSTS}

    assert start_pace_exchange("loop", CLIENT, None, **options) is None
    assert start_pace_exchange("replica", CLIENT, None, **options) is None
    assert find_pipeline_membership(RankDescription(num_pp_ranks=2)) is None

    missing = "the plugin gpuenergyd_across_hosts is not installed"
    compared = f"gpuenergyd: ranks on other hosts are not compared with those of this one: {missing}"
    assert [record.getMessage() for record in caplog.records] == [
        *(compared, compared),
        f"gpuenergyd: the pipeline spans hosts, but {missing}; training continues at full speed",
    ]


def test_an_exchange_that_fails_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(_client: Any, **_options: Any) -> Callable[[], None]:
        raise RuntimeError("no store")

    install(monkeypatch, start)
    with caplog.at_level(logging.WARNING):
        stop = start_pace_exchange("loop", CLIENT, None, run_key="r", dp_rank=2, environ=FIRST_OF_TWO_HOSTS)

    assert stop is None
    (record,) = caplog.records
    assert "ranks on other hosts are not compared" in record.getMessage()
    assert "no store" in record.getMessage()


# --- the contract of exchanges, for those that are installed ---


def test_the_installed_project_offers_all_exchanges() -> None:
    assert sorted(POINTS) == ["loop", "pipeline", "replica"]


@pytest.mark.parametrize("name", ["loop", "replica"])
def test_without_a_store_no_paces_are_exchanged(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    exchange: PaceExchange = POINTS[name].load()

    assert exchange(CLIENT, run_key="run", dp_rank=0, socket_path=None) is None


def test_a_member_of_a_pipeline_is_a_job_of_its_own_with_plans_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange: PipelineExchange = POINTS["pipeline"].load()
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    ranks = [RankDescription(run_key="run", pp_rank=pp, num_pp_ranks=2, dp_rank=3, is_first=pp == 0) for pp in (0, 1)]

    members = [member for rank in ranks if (member := exchange(rank)) is not None]

    described = [member.rank for member in members]
    assert [(rank.pp_rank, rank.num_pp_ranks, rank.dp_rank) for rank in described] == [(0, 1, 3)] * 2
    assert [rank.is_first for rank in described] == [True, False]
    assert described[0].run_key != described[1].run_key
    assert members[0].plans is not None
    assert members[0].plans is not members[1].plans
