"""The OpenADR receiver: the file follows what the server lists, and each version of an event is answered once."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.errors import GpuEnergyError
from gpuenergyd_fleet.decisions.grid_event import MAX_OPEN_EVENTS
from gpuenergyd_fleet.event_input import EventFile, events_of_file
from gpuenergyd_fleet.openadr.load_targets import OPENADR_SOURCE
from gpuenergyd_fleet.openadr.receiver import OneLine, Receiver
from tests.plugins.fleet.openadr.test_load_targets import NOW_S, TERMS, event_with
from tests.plugins.fleet.test_event_input import MemoryStore


class _Server:
    """A session whose server lists what a test sets."""

    period_s = 1.0

    def __init__(self, *listed: Any) -> None:
        self.listed: list[Any] | None = list(listed)
        self.answers: list[tuple[str, bool]] = []

    async def exchange(self) -> list[Any]:
        if self.listed is None:
            raise GpuEnergyError("out of reach")
        return self.listed

    async def answer(self, event: Any, *, opts_in: bool) -> None:
        self.answers.append((event["event_descriptor"]["event_id"], opts_in))


def _receiver(server: _Server, folder: Path) -> Receiver:
    return Receiver(server, folder / "events.csv", TERMS, clock=lambda: NOW_S)


def _step(receiver: Receiver, times: int = 1) -> list[tuple[str, float]]:
    for _ in range(times):
        asyncio.run(receiver.step())
    return [(own.event_id, own.value) for own in events_of_file(receiver.path, NOW_S)]


def test_the_file_has_what_the_server_lists_and_each_version_is_answered_once(tmp_path: Path) -> None:
    server = _Server(event_with("SIMPLE", "level", 2.0))
    receiver = _receiver(server, tmp_path)
    assert _step(receiver, times=3) == [("event-17", 75)]

    server.listed = [event_with("SIMPLE", "level", 3.0, modification_number=1)]
    assert _step(receiver, times=2) == [("event-17", 50)]

    server.listed = [event_with("SIMPLE", "level", 3.0, modification_number=2, event_status="cancelled")]
    assert _step(receiver, times=2) == []
    assert server.answers == [("event-17", True)] * 3


def test_an_event_that_the_server_lists_no_longer_is_over(tmp_path: Path) -> None:
    server = _Server(event_with("SIMPLE", "level", 2.0))
    receiver = _receiver(server, tmp_path)
    assert len(_step(receiver)) == 1

    server.listed = []
    assert _step(receiver) == []


def test_while_the_server_is_out_of_reach_the_file_stays_and_so_does_that_of_an_earlier_process(tmp_path: Path) -> None:
    server = _Server(event_with("SIMPLE", "level", 2.0))
    _step(_receiver(server, tmp_path))
    later = _receiver(server, tmp_path)
    server.listed = None

    with pytest.raises(GpuEnergyError):
        _step(later)

    assert [own.event_id for own in events_of_file(later.path, NOW_S)] == ["event-17"]


def test_refused_events_are_opted_out_of_with_one_line_and_do_not_hinder_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = event_with("ELECTRICITY_PRICE", "price", 0.3, event_id="price\n1")
    server = _Server(bad, "nonsense", None, event_with("SIMPLE", "level", 1.0))

    with caplog.at_level(logging.WARNING):
        assert _step(_receiver(server, tmp_path), times=1) == [("event-17", 90)]

    assert server.answers == [("price\n1", False), ("event-17", True)]
    assert len(caplog.messages) == 3
    assert all(line.isprintable() for line in caplog.messages)


def test_a_refusal_is_logged_once_and_not_again_with_each_exchange(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = _Server(event_with("ELECTRICITY_PRICE", "price", 0.3))

    with caplog.at_level(logging.WARNING):
        _step(_receiver(server, tmp_path), times=1)
        receiver = _receiver(server, tmp_path)
        _step(receiver, times=5)

    assert len(caplog.messages) == 2


def test_a_flood_fills_the_file_only_as_far_as_the_coordinator_reads_it(tmp_path: Path) -> None:
    flood = [event_with("SIMPLE", "level", 1.0, event_id=f"event-{k}") for k in range(5000)]
    server = _Server(*flood, *flood)

    found = _step(_receiver(server, tmp_path))

    assert len(found) == MAX_OPEN_EVENTS
    assert sum(not opts_in for _, opts_in in server.answers) == MAX_OPEN_EVENTS


def test_the_coordinator_cancels_what_vanishes_from_this_file_and_nothing_else(tmp_path: Path) -> None:
    store, server = MemoryStore(), _Server(event_with("SIMPLE", "level", 2.0))
    receiver = _receiver(server, tmp_path)
    _step(receiver)
    of_site = tmp_path / "site.csv"
    of_site.write_text("event_id,start,end,value,unit\nown,2027-01-01T18:00:00Z,2027-01-01T19:00:00Z,5,kW\n")
    files = [EventFile(receiver.path, OPENADR_SOURCE), EventFile(of_site)]
    for file in files:
        file.update(store, NOW_S)
    server.listed = []
    _step(receiver)

    for file in files:
        file.update(store, NOW_S)

    assert {own.event_id: (own.source, own.is_cancelled) for own in store.events()} == {
        "event-17": ("openadr", True),
        "own": ("file", False),
    }


def test_lines_of_the_library_become_single_printable_ones_and_repetitions_vanish() -> None:
    only = OneLine()
    records = [
        logging.LogRecord(
            "openleadr", logging.WARNING, "f", 1, "status %s: %s", (500, "<a>\n\x1b[31m" + "x" * 9999), None
        )
        for _ in range(2)
    ]

    kept = [only.filter(record) for record in records]

    assert kept == [True, False]
    assert records[0].getMessage().isprintable()
    assert len(records[0].getMessage()) <= 300
