"""What the history forgets, and when: fine detail first, so that its size stays bounded. Hours and jobs stay."""

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Table, delete, func, select

from gpuenergyd.store import schema
from gpuenergyd.store.encoding.series import RAW_TIER, SECOND_TIER
from gpuenergyd.store.maintenance.compaction import compact_iterations
from gpuenergyd.store.maintenance.stored_summaries import keep_summaries

FORECASTS_KEPT = timedelta(days=60)
"""Forecasts as they were issued: the skill shown looks back for 28 days."""
MINUTE_S = 60
_AT_ONCE = timedelta(hours=6)
"""How much time one transaction forgets, so that a long backlog never blocks writing for long."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How long each tier is kept, and how large the database may be whatever that says; 0 bytes is no bound.

    When it is too large, the oldest samples go first, then the oldest seconds, then the oldest timelines.
    """

    samples: timedelta = timedelta(hours=48)
    seconds: timedelta = timedelta(days=7)
    minutes: timedelta = timedelta(days=396)
    timelines: timedelta = timedelta(days=30)
    """Counted from the end of their job."""
    max_bytes: int = 0


def forget_old(connection: Connection, now: datetime, retention: Retention, *, host: str | None = None) -> bool:
    """Forget some of what is too old, in the transaction that is open; return whether there is more.

    Of jobs only those of `host`, where one is named: where many share a history, each looks after its own.
    """
    own = () if host is None else (schema.jobs.c.host == host,)
    old_jobs = select(schema.jobs.c.job_id).where(schema.jobs.c.ended_at < now - retention.timelines, *own)
    connection.execute(delete(schema.iteration_spans).where(schema.iteration_spans.c.job_id.in_(old_jobs)))
    connection.execute(delete(schema.forecasts).where(schema.forecasts.c.issued_at < now - FORECASTS_KEPT))
    tiers: list[tuple[Table, ColumnElement[bool], timedelta]] = [
        (schema.gpu_series, schema.gpu_series.c.tier == RAW_TIER, retention.samples),
        (schema.gpu_series, schema.gpu_series.c.tier == SECOND_TIER, retention.seconds),
        (schema.gpu_rollups, schema.gpu_rollups.c.bucket_s == MINUTE_S, retention.minutes),
    ]
    has_more = [_forget_tier(connection, table, which, now - kept) for table, which, kept in tiers]
    connection.execute(delete(schema.models).where(schema.models.c.learned_at < now - retention.minutes))
    # Figures first: they are those of every single iteration.
    has_more.append(keep_summaries(connection, now, host=host) or compact_iterations(connection, now, host=host))
    if retention.max_bytes and used_bytes(connection) > retention.max_bytes:
        has_more.append(_shrink(connection))
    return any(has_more)


def used_bytes(connection: Connection) -> int:
    """Return what the database holds, freed pages not counted; 0 where the database does not say."""
    if connection.dialect.name != "sqlite":
        return 0
    pages, free_pages, page_bytes = (
        int(connection.exec_driver_sql(f"PRAGMA {name}").scalar() or 0)
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free_pages) * page_bytes


def give_back_space(engine: Engine) -> None:
    """Hand some of the freed pages back to the file system; SQLite only."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection:
        # It frees one page per step and has no columns: of the driver's calls only this one steps it to its end.
        driver: Any = connection.connection.driver_connection
        driver.executescript("PRAGMA incremental_vacuum(2000)")


def _forget_tier(connection: Connection, table: Table, which: ColumnElement[bool], cutoff: datetime) -> bool:
    oldest: datetime | None = connection.execute(select(func.min(table.c.started_at)).where(which)).scalar()
    if oldest is None or oldest >= cutoff:
        return False
    until = min(cutoff, oldest + _AT_ONCE)
    connection.execute(delete(table).where(which, table.c.started_at < until))
    return until < cutoff


def _shrink(connection: Connection) -> bool:
    """Forget the oldest fine detail, whatever its age; return whether there was any."""
    series = schema.gpu_series
    for tier in (RAW_TIER, SECOND_TIER):
        oldest: datetime | None = connection.execute(
            select(func.min(series.c.started_at)).where(series.c.tier == tier)
        ).scalar()
        if oldest is not None:
            connection.execute(delete(series).where(series.c.tier == tier, series.c.started_at < oldest + _AT_ONCE))
            return True
    spans = schema.iteration_spans
    first = (
        select(schema.jobs.c.job_id)
        .where(schema.jobs.c.job_id.in_(select(spans.c.job_id)))
        .order_by(schema.jobs.c.started_at)
        .limit(1)
        .scalar_subquery()
    )
    return connection.execute(delete(spans).where(spans.c.job_id == first)).rowcount > 0
