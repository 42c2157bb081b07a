"""A job's figures as they are kept: as text beside its row, and back.

Figures of another version, or of a job that goes on after all, are worked out anew when they are read.
"""

import json
from collections.abc import Sequence
from dataclasses import fields

from gpuenergyd.store.encoding.compressed_json import decode_tags
from gpuenergyd.store.readers.sqlite import Reader, Row
from gpuenergyd.store.reading.summaries import WHOLE, Counted, JobSummary, job_summary
from gpuenergyd.store.reading.summary_inputs import parts_of_jobs

FIGURES_VERSION = 1
"""Raised when a figure gets another meaning; figures with other names are noticed by their names."""
_OF_JOB = frozenset(
    {
        *("job_id", "job_name", "policy", "schedule_name", "is_simulated", "started_at", "ended_at", "end_reason"),
        *("num_ranks", "num_microbatches", "max_slowdown_ratio", "uid", "tags", "host"),
    }
)
"""What stands in the job's own row and is read from there."""
_NAMES = [field.name for field in fields(JobSummary) if field.name not in _OF_JOB]
_TUPLES = ("gpu_uuids", "saving_interval", "slowdown_interval")


def summaries_of(reader: Reader, jobs: Sequence[Row], counted: Counted = WHOLE) -> tuple[JobSummary, ...]:
    """Return jobs' figures, as kept or else worked out; `jobs` are rows with `kept_version` and `kept_figures`."""
    own = [WHOLE if counted.holds_all(job.started_at, job.ended_at) else counted for job in jobs]
    found = {job.job_id: _kept(job) if part is WHOLE else None for job, part in zip(jobs, own, strict=True)}
    missing = [(job, part) for job, part in zip(jobs, own, strict=True) if found[job.job_id] is None]
    by_id = {job.job_id: (job, part) for job, part in missing}
    for job_id, parts in parts_of_jobs(reader, list(by_id), since=counted.since, until=counted.until, may_add_up=True):
        job, part = by_id[job_id]
        found[job_id] = job_summary(job, parts, part)
    return tuple(summary for job in jobs if (summary := found[job.job_id]) is not None)


def _kept(job: Row) -> JobSummary | None:
    if job.kept_version != FIGURES_VERSION or job.ended_at is None:
        return None
    figures = json.loads(job.kept_figures)
    if set(figures) != set(_NAMES):
        return None
    for name in _TUPLES:
        figures[name] = None if figures[name] is None else tuple(figures[name])
    own = {name: getattr(job, name) for name in _OF_JOB}
    return JobSummary(**{**own, "tags": decode_tags(job.tags)}, **figures)


def encoded_figures(summary: JobSummary) -> str:
    """Return what is kept of a job's figures."""
    return json.dumps({name: getattr(summary, name) for name in _NAMES}, separators=(",", ":"))
