"""Messages of `gpuenergyd policies --show-prior` and its like: past jobs are listed, imported and forgotten.

HTTP/1.1 with JSON bodies on the daemon's Unix socket:

    GET  /v1/past-jobs          -> PastJobList      own and imported ones
    GET  /v1/past-jobs/all      -> PastJobList      of all users (administrators)
    POST /v1/past-jobs/import   PastJobFile    -> PastJobsChanged   (administrators)
    POST /v1/past-jobs/forget   PastJobsForget -> PastJobsChanged
"""

from dataclasses import dataclass

from gpuenergyd.core.policy_api.past_jobs import PastJob

MAX_IMPORTED = 256
FILE_FORMAT = "gpuenergyd past jobs 1"


@dataclass(frozen=True, slots=True)
class OwnedPastJob:
    """A past job with the uid of its user; None for an imported one."""

    uid: int | None
    job: PastJob


@dataclass(frozen=True, slots=True)
class PastJobList:
    """Past jobs, newest first."""

    past_jobs: tuple[OwnedPastJob, ...]


@dataclass(frozen=True, slots=True)
class PastJobFile:
    """Past jobs to import, and what a file of exported ones contains: no user is named."""

    format: str
    past_jobs: tuple[PastJob, ...]


@dataclass(frozen=True, slots=True)
class PastJobsForget:
    """Request to forget the past jobs of the caller, or those of all users and the imported ones (administrators)."""

    is_for_all_users: bool = False


@dataclass(frozen=True, slots=True)
class PastJobsChanged:
    """Reply: how many past jobs were imported or forgotten."""

    num_past_jobs: int
