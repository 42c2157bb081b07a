"""Description and record of a job, from the registration of its first rank."""

import logging
import re
import secrets
from datetime import datetime

from gpuenergyd.core.job.description import JobDescription
from gpuenergyd.core.policy_api.target import LARGE_SLOWDOWN_RATIO, PerformanceTarget
from gpuenergyd.daemon.registration import checked_length, checked_slowdown, checked_tags
from gpuenergyd.store.records import JobRecord
from gpuenergyd.wire.messages import RankRegistration

log = logging.getLogger(__name__)


def job_description(registration: RankRegistration, policy: str, default_max_slowdown_ratio: float) -> JobDescription:
    """Return the description of a new job with an id of its own.

    Raises:
        ProtocolError: the permitted slowdown or the length of the job is out of range.
    """
    ratio = checked_slowdown(registration)
    job_id = _new_job_id(registration.job_name)
    if ratio is not None and ratio > LARGE_SLOWDOWN_RATIO:
        log.warning("job %s permits a slowdown of %g, i.e. %g %%; 0.05 is 5 %%", job_id, ratio, 100 * ratio)
    return JobDescription(
        job_id=job_id,
        job_name=registration.job_name,
        num_pp_ranks=registration.num_pp_ranks,
        schedule_name=registration.schedule_name,
        num_microbatches=registration.num_microbatches,
        num_chunks=registration.num_chunks,
        policy=policy,
        target=PerformanceTarget(default_max_slowdown_ratio if ratio is None else ratio),
        length=checked_length(registration),
        num_dp_ranks=registration.num_dp_ranks,
        dp_rank=registration.dp_rank,
        num_stage_ranks=registration.num_stage_ranks,
    )


def job_record(
    description: JobDescription, registration: RankRegistration, uid: int, started_at: datetime, *, is_simulated: bool
) -> JobRecord:
    """Return what the history database keeps of a new job."""
    return JobRecord(
        job_id=description.job_id,
        job_name=registration.job_name,
        run_key=registration.run_key,
        dp_rank=registration.dp_rank,
        policy=description.policy,
        schedule_name=registration.schedule_name,
        framework=registration.framework,
        is_simulated=is_simulated,
        num_ranks=description.num_ranks,
        num_microbatches=registration.num_microbatches,
        max_slowdown_ratio=description.target.max_slowdown_ratio,
        uid=uid,
        started_at=started_at,
        tags=checked_tags(registration.tags),
    )


def _new_job_id(job_name: str) -> str:
    readable = re.sub(r"[^a-z0-9]+", "-", job_name.lower()).strip("-")[:40] or "job"
    return f"{readable}-{secrets.token_hex(3)}"
