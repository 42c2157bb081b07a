"""Collects samples and one-second rollups by minute until they are packed and written.

A minute is written every few seconds while it fills and once more when it is complete, always as a whole, so a crash
loses only the last seconds. Adding a record twice has no effect, and a minute begun by an earlier daemon is continued.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeGuard

from sqlalchemy import Connection, select

from gpuenergyd.store import schema
from gpuenergyd.store.encoding.series import RAW_TIER, SECOND_TIER, SERIES_UNITS, Value, pack_series, series_points
from gpuenergyd.store.records import Record, RollupRecord, SampleRecord

_MINUTE_S = 60


def is_packed(record: Record) -> TypeGuard[SampleRecord | RollupRecord]:
    """Return whether a record is packed with its minute instead of having its own row."""
    return isinstance(record, SampleRecord) or (isinstance(record, RollupRecord) and record.bucket_s == 1)


class SeriesKey(NamedTuple):
    """The primary key of a packed minute."""

    tier: int
    started_at: datetime
    gpu_uuid: str
    job_id: str


Point = tuple[Value, ...]


@dataclass(slots=True)
class _Minute:
    """The points of a minute by their offset in seconds."""

    points: dict[float, Point] = field(default_factory=dict)
    is_changed: bool = True
    has_stored_points: bool = False
    """Whether the points already in the database for this minute were added."""


@dataclass(slots=True)
class SeriesBuffer:
    """Minutes that are incomplete or not written yet; used only by the writer thread."""

    write_every_s: float = 10.0
    """Interval at which incomplete minutes are written."""
    _minutes: dict[SeriesKey, _Minute] = field(default_factory=dict)
    _written_mono_s: float = float("-inf")
    _newest: dict[tuple[int, str], datetime] = field(default_factory=dict)

    @property
    def has_unwritten(self) -> bool:
        """Whether any minute has changed since it was written."""
        return any(minute.is_changed for minute in self._minutes.values())

    def add(self, record: SampleRecord | RollupRecord) -> None:
        key, at_s, point = _located(record)
        minute = self._minutes.setdefault(key, _Minute())
        minute.points[at_s] = point
        minute.is_changed = True
        newest = self._newest.get((key.tier, key.gpu_uuid))
        if newest is None or newest < key.started_at:
            self._newest[key.tier, key.gpu_uuid] = key.started_at

    def due(self, mono_s: float, *, is_all: bool) -> tuple[SeriesKey, ...]:
        """Return the minutes to write now: complete ones, and periodically incomplete ones."""
        is_time = is_all or mono_s >= self._written_mono_s + self.write_every_s
        return tuple(
            key for key, minute in self._minutes.items() if minute.is_changed and (is_time or self._is_complete(key))
        )

    def rows(self, connection: Connection, keys: tuple[SeriesKey, ...]) -> Iterator[dict[str, Any]]:
        """Yield the rows of some minutes, including points already in the database."""
        for key in keys:
            minute = self._minutes[key]
            if not minute.has_stored_points:
                minute.points = {**_stored_points(connection, key), **minute.points}
                minute.has_stored_points = True
            yield {**key._asdict(), "num_points": len(minute.points), "points": _packed(key.tier, minute.points)}

    def mark_written(self, keys: tuple[SeriesKey, ...], mono_s: float) -> None:
        """Mark minutes as committed to the database, and drop complete ones."""
        if any(not self._is_complete(key) for key in keys):
            self._written_mono_s = mono_s
        for key in keys:
            self._minutes[key].is_changed = False
        # This includes minutes whose last points were written before they were complete.
        for key in [key for key, minute in self._minutes.items() if not minute.is_changed and self._is_complete(key)]:
            del self._minutes[key]

    def _is_complete(self, key: SeriesKey) -> bool:
        # One minute of grace: the energy of a second is known only after the counter has passed its end.
        return self._newest[key.tier, key.gpu_uuid] > key.started_at + timedelta(seconds=_MINUTE_S)


def _located(record: SampleRecord | RollupRecord) -> tuple[SeriesKey, float, Point]:
    if isinstance(record, SampleRecord):
        tier, at, job_id = RAW_TIER, record.at, ""
    else:
        tier, at, job_id = SECOND_TIER, record.started_at, record.job_id
    at = at.astimezone(UTC)
    minute = at.replace(second=0, microsecond=0)
    at_s = round((at - minute).total_seconds(), 3)
    values = tuple(_finite(getattr(record, name)) for name in SERIES_UNITS[tier] if name != "at_s")
    return SeriesKey(tier, minute, record.gpu_uuid, job_id), at_s, values


def _finite(value: Value) -> Value:
    return value if value is not None and math.isfinite(value) else None


def _stored_points(connection: Connection, key: SeriesKey) -> dict[float, Point]:
    table = schema.gpu_series
    query = select(table.c.points).where(*(table.c[name] == value for name, value in key._asdict().items()))
    packed = connection.execute(query).scalar()
    if packed is None:
        return {}
    return {
        round((at - key.started_at).total_seconds(), 3): tuple(values.values())
        for at, values in series_points(key.tier, key.started_at, packed)
    }


def _packed(tier: int, points: Mapping[float, Point]) -> bytes:
    ordered = sorted(points.items())
    names = [name for name in SERIES_UNITS[tier] if name != "at_s"]
    columns: dict[str, list[Value]] = {"at_s": [at_s for at_s, _ in ordered]}
    for k, name in enumerate(names):
        columns[name] = [point[k] for _, point in ordered]
    return pack_series(columns, SERIES_UNITS[tier])
