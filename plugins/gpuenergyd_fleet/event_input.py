"""Reads grid events from the webhook's JSON or from a CSV file, and writes such a file."""

import csv
import io
import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from gpuenergyd.atomic_file import replace_file
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd_fleet.decisions.grid_event import MAX_OPEN_EVENTS, GridEvent, LoadUnit, event_problem

log = logging.getLogger(__name__)

COLUMNS = ("event_id", "start", "end", "value", "unit", "reason")
MAX_BYTES = 2**20
FILE_SOURCE = "file"
_OPTIONAL = {"reason", "cancelled"}


class EventStore(Protocol):
    """The store of events."""

    def put_event(self, event: GridEvent) -> bool:
        """Return whether the store has changed."""
        ...

    def events(self) -> tuple[GridEvent, ...]: ...


def event_of_json(content: bytes, *, now_s: float, issued_s: float, source: str) -> GridEvent:
    """Return the event of a JSON object.

    Raises:
        UsageError: it is not an event, or it is invalid.
    """
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        raise UsageError("the body must be a JSON object") from None
    if not isinstance(given, dict):
        raise UsageError("the body must be a JSON object")
    _check_keys(given)
    return _event(given, is_cancelled=given.get("cancelled", False), now_s=now_s, issued_s=issued_s, source=source)


def _check_keys(given: Mapping[str, Any]) -> None:
    """Raise UsageError for unknown or missing keys, and for values of the wrong type."""
    known = {*COLUMNS, "cancelled"}
    if unknown := sorted(given.keys() - known):
        raise UsageError(f"unknown key {unknown[0]!r:.40}; valid: {', '.join(sorted(known))}")
    if missing := sorted(known - _OPTIONAL - given.keys()):
        raise UsageError(f"{missing[0]} is missing")
    for key in ("event_id", "start", "end", "unit", "reason"):
        if not isinstance(given.get(key, ""), str):
            raise UsageError(f"{key} must be a text")
    if isinstance(given["value"], bool) or not isinstance(given["value"], int | float):
        raise UsageError("value must be a number")
    if not isinstance(given.get("cancelled", False), bool):
        raise UsageError("cancelled must be true or false")


def events_of_file(path: Path, now_s: float, source: str = FILE_SOURCE) -> tuple[GridEvent, ...]:
    """Return the events of a CSV file that have not ended.

    Raises:
        UsageError: the file cannot be read, or a line is invalid; the message names file and line.
    """
    found: dict[str, GridEvent] = {}
    changed_s, rows = _read_rows(path)
    for line, given in rows:
        where = f"{path}: line {line}"
        try:
            if _instant("end", given["end"]) <= now_s:
                continue
            event = _event(given, now_s=now_s, issued_s=changed_s, source=source)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from None
        if event.event_id in found:
            raise UsageError(f"{where}: event_id {event.event_id!r} is there twice")
        found[event.event_id] = event
    return tuple(found.values())


def write_events(path: Path, events: Iterable[GridEvent]) -> None:
    """Replace a CSV file of events atomically; everybody may read it.

    Raises:
        OSError: the folder cannot be written.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for event in events:
        begin, end = (datetime.fromtimestamp(at_s, UTC).isoformat() for at_s in (event.start_s, event.end_s))
        writer.writerow([event.event_id, begin, end, repr(event.value), event.unit.value, event.reason])
    replace_file(path, text.getvalue().encode(), mode=0o644, is_durable=True)


def _read_rows(path: Path) -> tuple[float, list[tuple[int, dict[str, str]]]]:
    """Return when a file changed, and its rows with their line numbers."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
            changed_s = path.stat().st_mtime
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: larger than {MAX_BYTES} bytes")
    reader = csv.reader(io.StringIO(content.decode("utf-8-sig", "replace")))
    try:
        header = tuple(name.strip() for name in next(reader, []))
        if header not in {COLUMNS, COLUMNS[:-1]}:
            raise UsageError(f"{path}: columns {','.join(header)!r:.80}; valid: {','.join(COLUMNS)}")
        rows = [(line, row) for line, row in enumerate(reader, start=2) if row]
    except csv.Error as error:
        raise UsageError(f"{path}: {error}") from None
    if len(rows) > MAX_OPEN_EVENTS:
        raise UsageError(f"{path}: {len(rows)} events; at most {MAX_OPEN_EVENTS} are read")
    for line, row in rows:
        if len(row) != len(header):
            raise UsageError(f"{path}: line {line}: {count_text(len(row), 'value')}; expected {', '.join(header)}")
    return changed_s, [(line, dict(zip(header, (text.strip() for text in row), strict=True))) for line, row in rows]


@dataclass(slots=True)
class EventFile:
    """A file of events that is read again when it has changed; events that vanish from it are cancelled."""

    path: Path
    source: str = FILE_SOURCE
    """Source recorded in its events; only events of this source are cancelled when they vanish from the file."""
    trouble: str | None = None
    """Why the present content of the file is not used; None if it is."""
    _stamp: tuple[int, int, int] | None = field(default=None, init=False)

    def update(self, store: EventStore, now_s: float) -> None:
        """Store changes of the file; while it is invalid, its last valid content stays in use."""
        try:
            status = self.path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            if stamp == self._stamp:
                return
            listed = events_of_file(self.path, now_s, self.source)
            names = {event.event_id for event in listed}
            for event in listed:
                store.put_event(event)
            for event in store.events():
                is_open = event.source == self.source and event.end_s > now_s and not event.is_cancelled
                if is_open and event.event_id not in names:
                    issued_s = max(event.issued_s, status.st_mtime)
                    store.put_event(replace(event, is_cancelled=True, issued_s=issued_s))
        except (OSError, GpuEnergyError) as error:
            text = str(error) if isinstance(error, GpuEnergyError) else f"{self.path}: {error.strerror}"
            if text != self.trouble:
                log.warning("grid events: %s; the last valid events count", text)
            self.trouble = text
            return
        self._stamp, self.trouble = stamp, None


def _event(
    given: Mapping[str, Any], *, is_cancelled: bool = False, now_s: float, issued_s: float, source: str
) -> GridEvent:
    if given["unit"] not in set(LoadUnit):
        raise UsageError(f"unit {given['unit']!r:.20}; valid: {', '.join(LoadUnit)}")
    event = GridEvent(
        event_id=given["event_id"], start_s=_instant("start", given["start"]), end_s=_instant("end", given["end"]),
        value=_number(given["value"]), unit=LoadUnit(given["unit"]), reason=given.get("reason", ""),
        is_cancelled=is_cancelled, issued_s=issued_s, source=source,
    )  # fmt: skip
    if (problem := event_problem(event, now_s)) is not None:
        raise UsageError(problem)
    return event


def _number(value: str | float) -> float:
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise UsageError(f"value {str(value)!r:.40} must be a number") from None


def _instant(key: str, text: str) -> float:
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is not None:
            return at.timestamp()
    except (ValueError, OverflowError):
        pass
    raise UsageError(f"{key} {text!r:.40} must be a time with its zone, e.g. 2026-11-24T18:00:00Z")
