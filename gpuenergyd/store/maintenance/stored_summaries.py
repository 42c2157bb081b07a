"""Figures of ended jobs, worked out once: a report over a month must not read a million iterations.

A job's figures are kept when it has ended, by the writer's tidying, before its iterations become blocks; a job that
goes on after all, or gets another iteration, loses them.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select

from gpuenergyd.store import schema
from gpuenergyd.store.readers.sqlalchemy import EngineReader
from gpuenergyd.store.reading.stored_summaries import FIGURES_VERSION, encoded_figures
from gpuenergyd.store.reading.summaries import job_summary
from gpuenergyd.store.reading.summary_inputs import parts_of_jobs

_SETTLED = timedelta(minutes=1)
"""How long after a job's end its last records may still come."""
_AT_ONCE = 16


def keep_summaries(connection: Connection, now: datetime, *, host: str | None = None) -> bool:
    """Work out the figures of jobs that have ended, in the transaction that is open; return whether there are more."""
    jobs, kept = schema.jobs, schema.job_figures
    query = (
        select(jobs)
        .join(kept, kept.c.job_id == jobs.c.job_id, isouter=True)
        .where(
            jobs.c.ended_at < now - _SETTLED, kept.c.job_id.is_(None), *(() if host is None else (jobs.c.host == host,))
        )
        .order_by(jobs.c.started_at)
        .limit(_AT_ONCE)
    )
    rows = connection.execute(query).all()
    if rows:
        parts = dict(parts_of_jobs(EngineReader(connection), [row.job_id for row in rows]))
        figures = [
            {
                "job_id": row.job_id,
                "version": FIGURES_VERSION,
                "figures": encoded_figures(job_summary(row, parts[row.job_id])),
            }
            for row in rows
        ]
        connection.execute(insert(kept), figures)
    return len(rows) == _AT_ONCE


def forget_summaries(connection: Connection, job_ids: Iterable[str]) -> None:
    """Forget the figures of jobs of which there is something new."""
    wanted = list(job_ids)
    if wanted:
        connection.execute(delete(schema.job_figures).where(schema.job_figures.c.job_id.in_(wanted)))
