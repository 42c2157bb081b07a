"""The exchange of a loop with other hosts: started by the first rank of a host, ended with the job, never harmful."""

import importlib.metadata
import logging
from collections.abc import Callable
from typing import Any

import pytest

from gpuenergyd.client import loop_exchange
from gpuenergyd.client.loop_exchange import start_loop_exchange

FIRST_OF_TWO_HOSTS = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0"}
CLIENT: Any = object()


def install(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any] | None) -> None:
    class Point:
        def load(self) -> Callable[..., Any]:
            assert start is not None
            return start

    def entry_points(*, group: str, name: str) -> list[Point]:
        assert (group, name) == ("gpuenergyd.exchanges", "loop")
        return [] if start is None else [Point()]

    monkeypatch.setattr(loop_exchange, "entry_points", entry_points)


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
    assert start_loop_exchange(CLIENT, run_key="run", dp_rank=2, socket_path=None, environ=environ) is None


def test_the_first_rank_starts_the_exchange_and_can_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def start(client: Any, **options: Any) -> Callable[[], None]:
        given.append((client, options))
        return lambda: given.append("stopped")

    install(monkeypatch, start)
    stop = start_loop_exchange(CLIENT, run_key="run", dp_rank=2, socket_path="s", environ=FIRST_OF_TWO_HOSTS)
    assert stop is not None
    stop()

    assert given == [(CLIENT, {"run_key": "run", "dp_rank": 2, "socket_path": "s"}), "stopped"]


def test_without_the_trainers_package_nothing_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    options: dict[str, Any] = {"run_key": "run", "dp_rank": 2, "socket_path": None, "environ": FIRST_OF_TWO_HOSTS}
    assert start_loop_exchange(CLIENT, **options) is None


def test_an_exchange_that_fails_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(_client: Any, **_options: Any) -> Callable[[], None]:
        raise RuntimeError("no store")

    install(monkeypatch, start)
    with caplog.at_level(logging.WARNING):
        stop = start_loop_exchange(CLIENT, run_key="r", dp_rank=2, socket_path=None, environ=FIRST_OF_TWO_HOSTS)

    assert stop is None
    (record,) = caplog.records
    assert "ranks on other hosts are not compared" in record.getMessage()
    assert "no store" in record.getMessage()


def test_the_installed_project_offers_the_exchange() -> None:
    names = [point.name for point in importlib.metadata.entry_points(group="gpuenergyd.exchanges")]
    assert names == ["loop"]
