"""Energy and power of GPUs per time bucket, and raw samples."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from gpuenergyd.store.encoding.series import RAW_TIER, SECOND_TIER, series_points
from gpuenergyd.store.reader import Reader, Row
from gpuenergyd.store.reading.time_range import TimeRange
from gpuenergyd.store.records import RollupRecord, SampleRecord, merge_rollups


def rollups(reader: Reader, bucket_s: int, time_range: TimeRange, job_id: str | None) -> tuple[RollupRecord, ...]:
    """Return the rollups of one bucket length, sorted by GPU and time; all jobs and idle time if `job_id` is None."""
    if bucket_s == 1:
        return _seconds(reader, time_range, job_id)
    where = {
        "bucket_s = ?": bucket_s,
        "started_at >= ?": time_range.since,
        "started_at < ?": time_range.until,
        "job_id = ?": job_id,
    }
    # Reading in the order of the table's key is free; the stable sort by GPU keeps that order within each GPU.
    rows = reader.values(RollupRecord._fields, "gpu_rollups", where, order_by="started_at, gpu_uuid, job_id")
    return tuple(sorted(map(RollupRecord._make, rows), key=attrgetter("gpu_uuid")))


def samples(reader: Reader, gpu_uuid: str, time_range: TimeRange) -> tuple[SampleRecord, ...]:
    """Return the raw samples of one GPU that are still stored, oldest first."""
    points = _packed_points(reader, time_range, {"tier = ?": RAW_TIER, "gpu_uuid = ?": gpu_uuid})
    return tuple(SampleRecord(gpu_uuid, at, **values) for _, at, values in points)


def _packed_points(
    reader: Reader, time_range: TimeRange, where: Mapping[str, object]
) -> Iterator[tuple[Row, datetime, dict[str, Any]]]:
    """Yield (packed minute, instant, values), sorted by GPU and time."""
    first_minute = time_range.since - timedelta(minutes=1) if time_range.since is not None else None
    where = {**where, "started_at >= ?": first_minute, "started_at < ?": time_range.until}
    for row in reader.select("*", "gpu_series", where, order_by="gpu_uuid, started_at, job_id"):
        for at, values in series_points(row.tier, row.started_at, row.points):
            if time_range.contains(at):
                yield row, at, values


def _seconds(reader: Reader, time_range: TimeRange, job_id: str | None) -> tuple[RollupRecord, ...]:
    """Return one-second rollups; a job that left a GPU and returned within a second gets one rollup for it."""
    parts: dict[tuple[str, datetime, str], list[RollupRecord]] = defaultdict(list)
    for row, at, values in _packed_points(reader, time_range, {"tier = ?": SECOND_TIER, "job_id = ?": job_id}):
        second = at.replace(microsecond=0)
        named: dict[str, Any] = {name: value or 0.0 if name.endswith("_s") else value for name, value in values.items()}
        part = RollupRecord(1, row.gpu_uuid, second, row.job_id, **named)
        parts[row.gpu_uuid, second, row.job_id].append(part)
    return tuple(map(merge_rollups, parts.values()))
