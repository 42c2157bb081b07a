"""Deletes expired rows, finest detail first, so that the size of the history is limited.

Hourly rollups and jobs do not expire; above the size limit the oldest ended jobs are deleted with all their rows.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Table, delete, func, select

from gpuenergyd.store import schema
from gpuenergyd.store.encoding.series import RAW_TIER, SECOND_TIER
from gpuenergyd.store.maintenance.compaction import compact_iterations
from gpuenergyd.store.maintenance.stored_summaries import store_summaries

FORECASTS_KEPT = timedelta(days=60)
"""At least the 28 days over which forecast skill is computed."""
MINUTE_S = 60
_MAX_PER_TRANSACTION = timedelta(hours=6)
"""Time span that one transaction deletes; limits how long it blocks the writer."""

_JOBS_AT_ONCE = 64
"""Number of jobs that one transaction deletes if the database exceeds its size limit."""
_OF_JOBS = tuple(table for table in schema.metadata.sorted_tables if "job_id" in table.c and table is not schema.models)
"""Tables with rows per job. Models are not included: later runs continue with them, and they expire by age."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long each tier is stored, and the maximum database size in any case; 0 bytes means unlimited.

    If the database is too large, the oldest samples are deleted first, then seconds, then timelines, then ended jobs.
    """

    samples: timedelta = timedelta(hours=48)
    seconds: timedelta = timedelta(days=7)
    minutes: timedelta = timedelta(days=396)
    timelines: timedelta = timedelta(days=30)
    """How long timelines are stored, counted from the end of the job."""
    max_bytes: int = 0


def delete_expired(connection: Connection, now: datetime, retention: Retention, *, host: str | None = None) -> bool:
    """Delete some expired rows in the open transaction; return whether there are more.

    With `host`, only its jobs are cleaned up, because each host that shares a history cleans up its own.
    """
    of_host = () if host is None else (schema.jobs.c.host == host,)
    old_jobs = select(schema.jobs.c.job_id).where(schema.jobs.c.ended_at < now - retention.timelines, *of_host)
    connection.execute(delete(schema.iteration_spans).where(schema.iteration_spans.c.job_id.in_(old_jobs)))
    connection.execute(delete(schema.forecasts).where(schema.forecasts.c.issued_at < now - FORECASTS_KEPT))
    tiers: list[tuple[Table, ColumnElement[bool], timedelta]] = [
        (schema.gpu_series, schema.gpu_series.c.tier == RAW_TIER, retention.samples),
        (schema.gpu_series, schema.gpu_series.c.tier == SECOND_TIER, retention.seconds),
        (schema.gpu_rollups, schema.gpu_rollups.c.bucket_s == MINUTE_S, retention.minutes),
    ]
    has_more = [_delete_from_tier(connection, table, which, now - kept) for table, which, kept in tiers]
    connection.execute(delete(schema.models).where(schema.models.c.learned_at < now - retention.minutes))
    # Summaries first, because they are computed from single iterations.
    has_more.append(store_summaries(connection, now, host=host) or compact_iterations(connection, now, host=host))
    if retention.max_bytes and used_bytes(connection) > retention.max_bytes:
        has_more.append(_shrink(connection))
    return any(has_more)


def used_bytes(connection: Connection) -> int:
    """Return the size of the used pages of an SQLite database, 0 for other databases."""
    if connection.dialect.name != "sqlite":
        return 0
    pages, free_pages, page_bytes = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free_pages) * page_bytes


def release_free_pages(engine: Engine) -> None:
    """Return some free pages of an SQLite database to the file system."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection:
        # The pragma frees one page per step and returns no columns; only executescript steps it to completion.
        driver: Any = connection.connection.driver_connection
        driver.executescript("PRAGMA incremental_vacuum(2000)")


def _delete_from_tier(connection: Connection, table: Table, which: ColumnElement[bool], cutoff: datetime) -> bool:
    oldest: datetime | None = connection.execute(select(func.min(table.c.started_at)).where(which)).scalar()
    if oldest is None or oldest >= cutoff:
        return False
    until = min(cutoff, oldest + _MAX_PER_TRANSACTION)
    connection.execute(delete(table).where(which, table.c.started_at < until))
    return until < cutoff


def _shrink(connection: Connection) -> bool:
    """Delete the oldest detail regardless of its age; return whether there was any."""
    series = schema.gpu_series
    for tier in (RAW_TIER, SECOND_TIER):
        oldest: datetime | None = connection.execute(
            select(func.min(series.c.started_at)).where(series.c.tier == tier)
        ).scalar()
        if oldest is not None:
            connection.execute(
                delete(series).where(series.c.tier == tier, series.c.started_at < oldest + _MAX_PER_TRANSACTION)
            )
            return True
    spans = schema.iteration_spans
    first = (
        select(schema.jobs.c.job_id)
        .where(schema.jobs.c.job_id.in_(select(spans.c.job_id)))
        .order_by(schema.jobs.c.started_at)
        .limit(1)
        .scalar_subquery()
    )
    has_deleted_spans = connection.execute(delete(spans).where(spans.c.job_id == first)).rowcount > 0
    return has_deleted_spans or _delete_oldest_jobs(connection)


def _delete_oldest_jobs(connection: Connection) -> bool:
    """Delete the jobs that ended first with all their rows; return whether there were any."""
    jobs = schema.jobs
    oldest = select(jobs.c.job_id).where(jobs.c.ended_at.is_not(None)).order_by(jobs.c.ended_at).limit(_JOBS_AT_ONCE)
    job_ids = connection.execute(oldest).scalars().all()
    for table in _OF_JOBS:
        connection.execute(delete(table).where(table.c.job_id.in_(job_ids)))
    return bool(job_ids)
