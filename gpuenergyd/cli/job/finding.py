"""Finds running jobs by ID or name."""

from collections.abc import Mapping
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import UsageError


def find_jobs(status: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the job with this ID, or all replicas with this name, leaving out members of pipelines led elsewhere.

    Raises:
        UsageError: no such job runs; the message lists those that do.
    """
    jobs: list[dict[str, Any]] = status["jobs"]
    found = [job for job in jobs if job["job_id"] == name]
    if not found:
        named = [job for job in jobs if job["job_name"] == name]
        found = [job for job in named if job["pipeline"] is not None or not job["is_pipeline_member"]] or named
    if not found:
        running = ", ".join(f"{job['job_id']} ({job['job_name']})" for job in jobs) or "none"
        raise UsageError(f"no job {name!r} runs here; running: {running}")
    return found


def find_job(status: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return one running job by its ID, or by its name if no other job has that name.

    Raises:
        UsageError: no such job runs, or several have the name.
    """
    found = find_jobs(status, name)
    if len(found) > 1:
        raise UsageError(
            f"{count_text(len(found), 'job')} are called {name!r}; name one: {', '.join(j['job_id'] for j in found)}"
        )
    return found[0]
