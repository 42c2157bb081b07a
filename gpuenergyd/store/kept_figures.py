"""A job's figures as they are kept: as text beside its row, and back.

Figures of another version, or of a job that goes on after all, are worked out anew when they are read.
"""

import json
from dataclasses import fields

from gpuenergyd.store.blobs import decode_tags
from gpuenergyd.store.reading import Reader, Row
from gpuenergyd.store.summaries import WHOLE, Counted, JobSummary, job_summary

FIGURES_VERSION = 1
"""Raised when a figure gets another meaning; figures with other names are noticed by their names."""
_OF_JOB = frozenset(
    {
        *("job_id", "job_name", "policy", "schedule_name", "is_simulated", "started_at", "ended_at", "end_reason"),
        *("num_ranks", "num_microbatches", "max_slowdown_ratio", "uid", "tags"),
    }
)
"""What stands in the job's own row and is read from there."""
_NAMES = [field.name for field in fields(JobSummary) if field.name not in _OF_JOB]
_TUPLES = ("gpu_uuids", "saving_interval", "slowdown_interval")


def summary_of(reader: Reader, job: Row, counted: Counted = WHOLE) -> JobSummary:
    """Return one job's figures, as kept or else worked out; `job` is its row with `kept_version` and `kept_figures`."""
    if counted.holds_all(job.started_at, job.ended_at):
        counted = WHOLE
    if job.kept_version == FIGURES_VERSION and job.ended_at is not None and counted is WHOLE:
        figures = json.loads(job.kept_figures)
        if set(figures) == set(_NAMES):
            for name in _TUPLES:
                figures[name] = None if figures[name] is None else tuple(figures[name])
            own = {name: getattr(job, name) for name in _OF_JOB}
            return JobSummary(**{**own, "tags": decode_tags(job.tags)}, **figures)
    return job_summary(reader, job, counted)


def encoded_figures(summary: JobSummary) -> str:
    """Return what is kept of a job's figures."""
    return json.dumps({name: getattr(summary, name) for name in _NAMES}, separators=(",", ":"))
