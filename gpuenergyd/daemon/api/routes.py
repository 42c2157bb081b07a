"""The routes of the HTTP API other than those of plugins; the server and the OpenAPI description are made from them."""

from dataclasses import dataclass

from gpuenergyd.wire.messages import (
    IterationReply,
    IterationReport,
    PaceReply,
    PaceReport,
    RankRegistered,
    RankRegistration,
    RankRelease,
    ReleaseReply,
)
from gpuenergyd.wire.operator_messages import (
    CounterQuery,
    CounterReadings,
    GpuRelease,
    GpuReopen,
    GpusReleased,
    JobFit,
    JobPatch,
    JobPatched,
    PastJobFile,
    PastJobList,
    PastJobsChanged,
    PastJobsForget,
)

JSON_TYPE = "application/json"


@dataclass(frozen=True, slots=True)
class Route:
    """A route with its messages: POST, PUT or PATCH with a request message, otherwise GET."""

    path: str
    summary: str
    request: type | None = None
    reply: type | None = None
    """None: an object without a message type."""
    is_put: bool = False
    """Whether the request replaces what GET of the same path returns."""
    content_type: str = JSON_TYPE
    is_patch: bool = False
    takes_several: bool = False
    """Whether the request may be an array of messages."""

    @property
    def method(self) -> str:
        if self.request is None:
            return "GET"
        return "PUT" if self.is_put else "PATCH" if self.is_patch else "POST"


RANKS = Route("/v1/ranks", "Register a training process as a rank of a job.", RankRegistration, RankRegistered)
ITERATIONS = Route(
    "/v1/iterations",
    "Report an iteration of a rank, or an array of them; the reply may contain a plan.",
    IterationReport,
    IterationReply,
    takes_several=True,
)
PACE = Route("/v1/pace", "Report the pace of replicas on other hosts.", PaceReport, PaceReply)
RELEASE = Route(
    "/v1/release", "Release a rank that ends normally; the reply says what its job saved.", RankRelease, ReleaseReply
)
GPU_RELEASE = Route(
    "/v1/gpus/release",
    "Let go of a GPU's driver handles for a reset, a MIG change or a driver upgrade (administrators).",
    GpuRelease,
    GpusReleased,
)
GPU_REOPEN = Route("/v1/gpus/reopen", "Open a released GPU again (administrators).", GpuReopen, GpusReleased)
ENERGY = Route("/v1/energy", "Read the energy counters of GPUs now.", CounterQuery, CounterReadings)
PAST_JOBS = Route(
    "/v1/past-jobs", "The caller's past jobs and imported ones; new jobs start from their curves.", reply=PastJobList
)
ALL_PAST_JOBS = Route("/v1/past-jobs/all", "Past jobs of all users (administrators).", reply=PastJobList)
PAST_JOB_IMPORT = Route(
    "/v1/past-jobs/import",
    "Import past jobs of another site for all users of this host (administrators).",
    PastJobFile,
    PastJobsChanged,
)
PAST_JOB_FORGET = Route(
    "/v1/past-jobs/forget",
    "Forget the caller's past jobs; with is_for_all_users, all users' and imported ones (administrators).",
    PastJobsForget,
    PastJobsChanged,
)
STATUS = Route("/v1/status", "State of the daemon: health, GPUs, jobs. Missing values are null, never 0.")
JOB = Route("/v1/jobs/{job_id}", "One running job: plan, predictions, last measured timeline.")
JOB_PATCH = Route(
    "/v1/jobs/{job_id}",
    "Change policy, permitted slowdown or priority of a running job, pause it, or undo that (its user).",
    JobPatch,
    JobPatched,
    is_patch=True,
)
JOB_FIT = Route(
    "/v1/jobs/{job_id}/fit",
    "What the policy has fitted to a running job: profile, latencies, target; and the plan in force.",
    reply=JobFit,
)
OPENAPI = Route("/v1/openapi.json", "This document.")

ROUTES = (
    *(RANKS, ITERATIONS, PACE, RELEASE, GPU_RELEASE, GPU_REOPEN, ENERGY),
    *(PAST_JOBS, ALL_PAST_JOBS, PAST_JOB_IMPORT, PAST_JOB_FORGET),
    *(STATUS, JOB, JOB_PATCH, JOB_FIT, OPENAPI),
)
