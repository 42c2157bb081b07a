"""Energy and power of GPUs per time bucket, and raw samples."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from gpuenergyd.store.encoding.series import RAW_TIER, SECOND_TIER, series_points
from gpuenergyd.store.readers.reader import Reader, Row
from gpuenergyd.store.reading.time_range import TimeRange
from gpuenergyd.store.records import RollupRecord, SampleRecord, merge_rollups


@dataclass(frozen=True, slots=True)
class RollupFilter:
    """Which rollups or samples to return; None means all."""

    time_range: TimeRange
    gpu_uuid: str | None = None
    job_id: str | None = None

    def conditions(self, *, since: datetime | None) -> dict[str, object]:
        """Return the filter as SQL conditions, with another start."""
        return {
            "started_at >= ?": since,
            "started_at < ?": self.time_range.until,
            "gpu_uuid = ?": self.gpu_uuid,
            "job_id = ?": self.job_id,
        }


def rollups(reader: Reader, bucket_s: int, wanted: RollupFilter) -> tuple[RollupRecord, ...]:
    """Return the rollups of one bucket length by GPU, then time."""
    if bucket_s == 1:
        return _seconds(reader, wanted)
    where = {"bucket_s = ?": bucket_s, **wanted.conditions(since=wanted.time_range.since)}
    # Reading in the order of the table's key is free; the stable sort by GPU keeps it within each GPU.
    rows = reader.values(RollupRecord._fields, "gpu_rollups", where, order_by="started_at, gpu_uuid, job_id")
    return tuple(sorted(map(RollupRecord._make, rows), key=attrgetter("gpu_uuid")))


def samples(reader: Reader, wanted: RollupFilter) -> tuple[SampleRecord, ...]:
    """Return the raw samples that are still stored by GPU, then time."""
    return tuple(
        SampleRecord(row.gpu_uuid, at, **values) for row, at, values in _packed_points(reader, RAW_TIER, wanted)
    )


def _packed_points(reader: Reader, tier: int, wanted: RollupFilter) -> Iterator[tuple[Row, datetime, dict[str, Any]]]:
    """Yield (packed minute, instant, values) of one tier by GPU, then time."""
    since = wanted.time_range.since
    first_minute = since - timedelta(minutes=1) if since is not None else None
    where = {"tier = ?": tier, **wanted.conditions(since=first_minute)}
    for row in reader.select("*", "gpu_series", where, order_by="gpu_uuid, started_at, job_id"):
        for at, values in series_points(tier, row.started_at, row.points):
            if wanted.time_range.contains(at):
                yield row, at, values


def _seconds(reader: Reader, wanted: RollupFilter) -> tuple[RollupRecord, ...]:
    """Return one-second rollups; a job that left a GPU and returned within a second gets one rollup for it."""
    parts: dict[tuple[str, datetime, str], list[RollupRecord]] = defaultdict(list)
    for row, at, values in _packed_points(reader, SECOND_TIER, wanted):
        second = at.replace(microsecond=0)
        named: dict[str, Any] = {name: value or 0.0 if name.endswith("_s") else value for name, value in values.items()}
        part = RollupRecord(1, row.gpu_uuid, second, row.job_id, **named)
        parts[row.gpu_uuid, second, row.job_id].append(part)
    return tuple(map(merge_rollups, parts.values()))
