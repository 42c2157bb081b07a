"""Stored summaries of ended jobs: read if current, otherwise computed.

A stored summary is ignored if it has another version or other field names, or if its job was resumed.
"""

import json
from collections.abc import Sequence
from dataclasses import fields

from gpuenergyd.store.reader import Reader, Row
from gpuenergyd.store.reading.summaries import JOB_VALUES, JobSummary, job_summary, job_values
from gpuenergyd.store.reading.summary_inputs import summary_inputs
from gpuenergyd.store.reading.time_range import ALL_TIME, TimeRange

SUMMARY_VERSION = 2
"""Increase when a field changes its meaning; changed names are detected automatically."""
_STORED_NAMES = [field.name for field in fields(JobSummary) if field.name not in JOB_VALUES]
_TUPLES = ("gpu_uuids", "saving_interval", "slowdown_interval")


def read_summaries(reader: Reader, jobs: Sequence[Row], time_range: TimeRange = ALL_TIME) -> tuple[JobSummary, ...]:
    """Return the summaries of jobs; each row has the columns `summary_version` and `stored_summary`."""
    summaries: dict[str, JobSummary] = {}
    to_compute: dict[str, tuple[Row, TimeRange]] = {}
    for job in jobs:
        covered = ALL_TIME if time_range.contains_job(job.started_at, job.ended_at) else time_range
        stored = _stored_summary(job) if covered is ALL_TIME else None
        if stored is not None:
            summaries[job.job_id] = stored
        else:
            to_compute[job.job_id] = (job, covered)
    for job_id, inputs in summary_inputs(reader, list(to_compute), time_range, may_aggregate=True):
        job, covered = to_compute[job_id]
        summaries[job_id] = job_summary(job, inputs, covered)
    return tuple(summaries[job.job_id] for job in jobs)


def encode_summary(summary: JobSummary) -> str:
    """Return, as JSON, the part of a summary that is not in the job's row."""
    return json.dumps({name: getattr(summary, name) for name in _STORED_NAMES}, separators=(",", ":"))


def _stored_summary(job: Row) -> JobSummary | None:
    if job.summary_version != SUMMARY_VERSION or job.ended_at is None:
        return None
    values = json.loads(job.stored_summary)
    if set(values) != set(_STORED_NAMES):
        return None
    for name in _TUPLES:
        values[name] = None if values[name] is None else tuple(values[name])
    return JobSummary(**job_values(job), **values)
