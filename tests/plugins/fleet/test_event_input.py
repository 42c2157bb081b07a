"""Grid events from outside: whatever is wrong with one is told in one line, and nothing else changes."""

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpuenergyd.errors import UsageError
from gpuenergyd_fleet.decisions.grid_event import GridEvent, LoadUnit, replaces
from gpuenergyd_fleet.event_input import EventFile, event_of_json, events_of_file

NOW_S = datetime(2026, 11, 24, 12, tzinfo=UTC).timestamp()
GIVEN = {
    "event_id": "event-17",
    "start": "2026-11-24T12:10:00Z",
    "end": "2026-11-24T12:20:00Z",
    "value": 70,
    "unit": "percent",
}
HEADER = "event_id,start,end,value,unit,reason\n"
LINE = "event-17,2026-11-24T12:10:00Z,2026-11-24T12:20:00Z,70,percent,test\n"


@dataclass
class MemoryStore:
    """Events by id."""

    kept: dict[str, GridEvent] = field(default_factory=dict)

    def put_event(self, event: GridEvent) -> bool:
        has_changed = replaces(event, self.kept.get(event.event_id))
        if has_changed:
            self.kept[event.event_id] = event
        return has_changed

    def events(self) -> tuple[GridEvent, ...]:
        return tuple(self.kept.values())


def _parsed(content: bytes) -> GridEvent:
    return event_of_json(content, now_s=NOW_S, issued_s=NOW_S, source="test")


def test_an_event_is_read() -> None:
    event = _parsed(json.dumps(GIVEN).encode())
    assert event == GridEvent(
        "event-17", NOW_S + 600, NOW_S + 1200, 70.0, LoadUnit.PERCENT, issued_s=NOW_S, source="test"
    )
    assert _parsed(json.dumps(GIVEN | {"cancelled": True}).encode()).is_cancelled


@pytest.mark.fault(32)
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"value": -5}, "value = -5 percent"),
        ({"value": 0}, "value = 0 percent"),
        ({"value": 101}, "valid are finite values above 0 up to 100 percent"),
        ({"value": float("nan")}, "value = nan percent"),
        ({"value": float("inf")}, "value = inf percent"),
        ({"value": 10**400}, "must be a number"),
        ({"value": True}, "value must be a number"),
        ({"value": "70"}, "value must be a number"),
        ({"value": 1e9, "unit": "MW"}, "up to 100000 MW"),
        ({"unit": "horses"}, "valid: W, kW, MW, percent"),
        ({"unit": ["W"]}, "unit must be a text"),
        ({"start": "2026-11-24T12:10:00"}, "must be a time with its zone"),
        ({"start": "tomorrow"}, "must be a time with its zone"),
        ({"start": "2026-11-24T12:30:00Z"}, "the end must be after the start"),
        ({"start": "2026-11-24T10:00:00Z", "end": "2026-11-24T11:00:00Z"}, "the end is in the past"),
        ({"start": "2029-11-24T10:00:00Z", "end": "2029-11-24T11:00:00Z"}, "ahead are valid"),
        ({"end": "2027-11-24T10:00:00Z"}, "s long; at most"),
        ({"event_id": ""}, "event_id ''"),
        ({"event_id": "x" * 65}, "1 to 64 printable ASCII"),
        ({"event_id": "a b"}, "without blanks"),
        ({"event_id": "a\nb"}, "printable"),
        ({"event_id": None}, "event_id must be a text"),
        ({"reason": "two\nlines"}, "one printable line"),
        ({"reason": "x" * 201}, "at most 200 characters"),
        ({"cancelled": "yes"}, "cancelled must be true or false"),
        ({"watts": 5}, "unknown key 'watts'"),
    ],
)
def test_an_impossible_event_is_refused_in_one_line(changes: dict[str, object], wrong: str) -> None:
    with pytest.raises(UsageError) as refused:
        _parsed(json.dumps(GIVEN | changes).encode())
    assert wrong in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"[]", b"5", b"{}", b"{", b"\xff\xfe", b"[" * 60_000, b'{"a":' * 5_000])
def test_what_is_no_event_is_refused(content: bytes) -> None:
    with pytest.raises(UsageError):
        _parsed(content)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "columns ''"),
        ("a,b\n", "columns 'a,b'"),
        (HEADER + "event-17,x\n", "line 2: 2 values"),
        (HEADER + LINE + LINE, "line 3: event_id 'event-17' is there twice"),
        (HEADER + LINE.replace("70", "much"), "line 2: value 'much' must be a number"),
        (HEADER + LINE.replace("percent", "horses"), "line 2: unit 'horses'"),
        (HEADER + LINE.replace("2026-11-24T12:20:00Z", "later"), "line 2: end 'later'"),
        (HEADER + LINE * 101, "at most 100 are read"),
        ("x" * (2**20 + 1), "larger than"),
    ],
)
def test_a_wrong_file_names_its_line(tmp_path: Path, text: str, wrong: str) -> None:
    path = tmp_path / "events.csv"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        events_of_file(path, NOW_S)
    assert wrong in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_is_followed_and_what_vanishes_from_it_is_cancelled(tmp_path: Path) -> None:
    path, store = tmp_path / "events.csv", MemoryStore()
    file = EventFile(path)

    def trouble_with(text: str | None) -> str:
        if text is not None:
            path.write_text(text)
        file.update(store, NOW_S)
        return file.trouble or ""

    assert "events.csv" in trouble_with(None)
    assert trouble_with(HEADER + LINE + LINE.replace("event-17", "event-18")) == ""
    assert not any(event.is_cancelled for event in store.events())
    assert "must be a number" in trouble_with(HEADER + LINE.replace("70", "wrong"))
    assert len(store.kept) == 2
    path.write_text(HEADER + LINE.replace("70", "60"))
    os.utime(path, (2e9, 2e9))
    assert trouble_with(None) == ""
    assert store.kept["event-17"].value == 60.0
    assert store.kept["event-18"].is_cancelled


def test_events_that_are_over_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "events.csv"
    path.write_text(HEADER + LINE)
    assert len(events_of_file(path, NOW_S)) == 1
    assert events_of_file(path, NOW_S + 1200) == ()
