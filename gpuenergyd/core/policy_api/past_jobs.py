"""Past jobs: curves measured in earlier jobs, from which a similar later job of the same user starts.

A policy summarizes a job's curves (`LearnedCurves` of a plan). The daemon stores one summary per job and gives later
jobs those of the same user and GPU model. A summary uses only its own job's measurements, so that an error in one
summary does not spread to others.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from gpuenergyd.core.pipeline.learned_curves import MAX_NAME_CHARS, LearnedCurves, problem_of_curves

MAX_GPUS = 64
"""Maximum number of GPUs listed for a past job; further ones are left out."""


@dataclass(frozen=True, slots=True)
class PastJob:
    """The curves of an earlier job."""

    job_id: str
    job_name: str
    learned_at: datetime
    learned: LearnedCurves
    is_imported: bool = False
    """Whether an administrator imported it, so that it applies to every user of the host."""
    gpu_uuids: tuple[str, ...] = ()
    """GPUs on which this host's daemon measured the job; empty if unknown or imported."""

    def was_measured_on_one_of(self, gpu_uuids: Collection[str]) -> bool:
        """Return whether the daemon measured this job, for the same user, on one of these GPUs.

        Its GPU model is then the same under any name, its energies come from the same sensors, and its times from a
        program of the same user, so nobody else can have fabricated them.
        """
        return not self.is_imported and not set(self.gpu_uuids).isdisjoint(gpu_uuids)


def problem_of(job: PastJob) -> str | None:
    """Return why a past job is invalid, as a phrase with the bad value; None if it is valid.

    Only physically impossible values are rejected. Possible but wrong curves lose their weight once a job measures.
    """
    for name, text in (("job_id", job.job_id), ("job_name", job.job_name)):
        if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable():
            return f"{name} {text[:40]!r}: 1 to {MAX_NAME_CHARS} printable characters are valid"
    if len(job.gpu_uuids) > MAX_GPUS or not all(0 < len(uuid) <= MAX_NAME_CHARS for uuid in job.gpu_uuids):
        return f"{len(job.gpu_uuids)} gpu_uuids: at most {MAX_GPUS} of 1 to {MAX_NAME_CHARS} characters are valid"
    if job.learned_at.tzinfo is None:
        return f"learned_at {job.learned_at.isoformat()}: a time zone is missing"
    return problem_of_curves(job.learned)
