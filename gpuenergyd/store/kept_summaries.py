"""Figures of ended jobs, worked out once: a report over a month must not read a million iterations.

A job's figures are kept when it has ended, by the writer's tidying, before its iterations become blocks; a job that
goes on after all, or gets another iteration, loses them. Figures of another version are worked out anew when read.
"""

import json
from collections.abc import Iterable
from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from gpuenergyd.store import schema
from gpuenergyd.store.blobs import decode_tags
from gpuenergyd.store.summaries import JobSummary, job_summary

_VERSION = 1
"""Raised when a figure gets another meaning; figures with other names are noticed by their names."""
_SETTLED = timedelta(minutes=1)
"""How long after a job's end its last records may still come."""
_AT_ONCE = 16
_OF_JOB = frozenset(
    {
        *("job_id", "job_name", "policy", "schedule_name", "is_simulated", "started_at", "ended_at", "end_reason"),
        *("num_ranks", "num_microbatches", "max_slowdown_ratio", "uid", "tags"),
    }
)
"""What stands in the job's own row and is read from there."""
_NAMES = [field.name for field in fields(JobSummary) if field.name not in _OF_JOB]
_TUPLES = ("gpu_uuids", "saving_interval", "slowdown_interval")


def keep_summaries(connection: Connection, now: datetime) -> bool:
    """Work out the figures of jobs that have ended, in the transaction that is open; return whether there are more."""
    jobs, kept = schema.jobs, schema.job_figures
    query = (
        select(jobs)
        .join(kept, kept.c.job_id == jobs.c.job_id, isouter=True)
        .where(jobs.c.ended_at < now - _SETTLED, kept.c.job_id.is_(None))
        .order_by(jobs.c.started_at)
        .limit(_AT_ONCE)
    )
    rows = connection.execute(query).all()
    if rows:
        figures = [{"job_id": row.job_id, "version": _VERSION, "figures": _encoded(connection, row)} for row in rows]
        connection.execute(insert(kept), figures)
    return len(rows) == _AT_ONCE


def forget_summaries(connection: Connection, job_ids: Iterable[str]) -> None:
    """Forget the figures of jobs of which there is something new."""
    wanted = list(job_ids)
    if wanted:
        connection.execute(delete(schema.job_figures).where(schema.job_figures.c.job_id.in_(wanted)))


def summary_of(connection: Connection, job: Row[Any]) -> JobSummary:
    """Return one job's figures, as kept or else worked out; `job` is its row with `kept_version` and `kept_figures`."""
    if job.kept_version == _VERSION and job.ended_at is not None:
        figures = json.loads(job.kept_figures)
        if set(figures) == set(_NAMES):
            for name in _TUPLES:
                figures[name] = None if figures[name] is None else tuple(figures[name])
            own = {name: getattr(job, name) for name in _OF_JOB}
            return JobSummary(**{**own, "tags": decode_tags(job.tags)}, **figures)
    return job_summary(connection, job)


def _encoded(connection: Connection, job: Row[Any]) -> str:
    summary = job_summary(connection, job)
    return json.dumps({name: getattr(summary, name) for name in _NAMES}, separators=(",", ":"))
