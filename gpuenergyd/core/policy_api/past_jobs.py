"""Past jobs: the curves that jobs leave behind, from which a similar later job of the same user starts.

A policy summarizes what a job has shown (`LearnedCurves` of a plan); the daemon stores one summary per job and gives
later jobs those of their user and GPU model. Summaries are made from a job's own measurements only, so that an error
in one of them does not spread.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime

from gpuenergyd.core.pipeline.learned_curves import MAX_NAME_CHARS, LearnedCurves, problem_of_curves

MAX_GPUS = 64
"""GPUs that a past job names; of more, the first ones."""


@dataclass(frozen=True, slots=True)
class PastJob:
    """The curves of an earlier job."""

    job_id: str
    job_name: str
    learned_at: datetime
    learned: LearnedCurves
    is_imported: bool = False
    """Whether an administrator imported it, so that it holds for every user of the host."""
    gpu_uuids: tuple[str, ...] = ()
    """The GPUs that this history's daemon measured it on; empty if unknown, as for an imported one."""

    def was_measured_on_one_of(self, gpu_uuids: Collection[str]) -> bool:
        """Return whether the daemon measured it, for this user, on one of these GPUs.

        Then its GPU model is theirs, whatever it is called, its energies come from their sensors, and its times from
        a program of the same user: nobody else can have made them up.
        """
        return not self.is_imported and not set(self.gpu_uuids).isdisjoint(gpu_uuids)


def problem_of(job: PastJob) -> str | None:
    """Return why a past job cannot be one, in a phrase with the bad value; None if it can.

    Only what no GPU does is refused: a job whose curves are possible but wrong loses its weight by measurements.
    """
    for name, text in (("job_id", job.job_id), ("job_name", job.job_name)):
        if not 0 < len(text) <= MAX_NAME_CHARS or not text.isprintable():
            return f"{name} {text[:40]!r}: 1 to {MAX_NAME_CHARS} printable characters are valid"
    if len(job.gpu_uuids) > MAX_GPUS or not all(0 < len(own) <= MAX_NAME_CHARS for own in job.gpu_uuids):
        return f"{len(job.gpu_uuids)} gpu_uuids: at most {MAX_GPUS} of 1 to {MAX_NAME_CHARS} characters are valid"
    if job.learned_at.tzinfo is None:
        return f"learned_at {job.learned_at.isoformat()}: a time zone is missing"
    return problem_of_curves(job.learned)
