"""Stores the summaries of ended jobs, so that a report over a month does not read a million iterations.

The writer's cleanup stores a summary once the job has ended, before its iterations are merged into blocks. The summary
is deleted if the job is resumed or gets another iteration.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta

from sqlalchemy import Connection, delete, insert, select

from gpuenergyd.store import schema
from gpuenergyd.store.database import reader_of
from gpuenergyd.store.reading.stored_summaries import SUMMARY_VERSION, encode_summary
from gpuenergyd.store.reading.summaries import job_summary
from gpuenergyd.store.reading.summary_inputs import summary_inputs
from gpuenergyd.store.reading.time_range import ALL_TIME

_SETTLING_TIME = timedelta(minutes=1)
"""Time after a job's end within which its last records may arrive."""
_MAX_PER_TRANSACTION = 16


def store_summaries(connection: Connection, now: datetime, *, host: str | None = None) -> bool:
    """Store summaries of jobs that have ended, in the open transaction; return whether there are more."""
    jobs, stored = schema.jobs, schema.job_summaries
    query = (
        select(jobs)
        .join(stored, stored.c.job_id == jobs.c.job_id, isouter=True)
        .where(
            jobs.c.ended_at < now - _SETTLING_TIME,
            stored.c.job_id.is_(None),
            *(() if host is None else (jobs.c.host == host,)),
        )
        .order_by(jobs.c.started_at)
        .limit(_MAX_PER_TRANSACTION)
    )
    rows = connection.execute(query).all()
    if rows:
        inputs = dict(summary_inputs(reader_of(connection), [row.job_id for row in rows], ALL_TIME))
        summaries = [
            {
                "job_id": row.job_id,
                "version": SUMMARY_VERSION,
                "summary": encode_summary(job_summary(row, inputs[row.job_id])),
            }
            for row in rows
        ]
        connection.execute(insert(stored), summaries)
    return len(rows) == _MAX_PER_TRANSACTION


def delete_summaries(connection: Connection, job_ids: Iterable[str]) -> None:
    """Delete the stored summaries of jobs that have new records."""
    outdated = list(job_ids)
    if outdated:
        connection.execute(delete(schema.job_summaries).where(schema.job_summaries.c.job_id.in_(outdated)))
