"""What the history forgets, and when: fine detail first, so that its size stays bounded. Minutes and jobs stay."""

from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Engine, delete, func, select

from gpuenergyd.store import schema

SECONDS_KEPT = timedelta(days=7)
"""One-second rollups; the one-minute ones stay."""
TIMELINES_KEPT = timedelta(days=30)
"""Timelines of iterations, counted from the end of their job."""
SHORT_BUCKET_S = 1
_AT_ONCE = timedelta(hours=6)
"""How much time one transaction forgets, so that a long backlog never blocks writing for long."""


def forget_old(connection: Connection, now: datetime) -> bool:
    """Forget some of what is too old, in the transaction that is open; return whether there is more."""
    rollups, spans, jobs = schema.gpu_rollups, schema.iteration_spans, schema.jobs
    old_jobs = select(jobs.c.job_id).where(jobs.c.ended_at < now - TIMELINES_KEPT)
    connection.execute(delete(spans).where(spans.c.job_id.in_(old_jobs)))
    cutoff = now - SECONDS_KEPT
    oldest: datetime | None = connection.execute(
        select(func.min(rollups.c.started_at)).where(rollups.c.bucket_s == SHORT_BUCKET_S)
    ).scalar()
    if oldest is None or oldest >= cutoff:
        return False
    until = min(cutoff, oldest + _AT_ONCE)
    connection.execute(delete(rollups).where(rollups.c.bucket_s == SHORT_BUCKET_S, rollups.c.started_at < until))
    return until < cutoff


def give_back_space(engine: Engine) -> None:
    """Hand some of the freed pages back to the file system; SQLite only."""
    if engine.dialect.name != "sqlite":
        return
    with engine.connect() as connection:
        # It frees one page per step and has no columns: of the driver's calls only this one steps it to its end.
        driver: Any = connection.connection.driver_connection
        driver.executescript("PRAGMA incremental_vacuum(2000)")
