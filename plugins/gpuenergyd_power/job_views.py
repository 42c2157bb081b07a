"""This host's jobs as seen by power target policies."""

from collections.abc import Iterable, Mapping

from gpuenergyd.core.job.messages import JobPhase
from gpuenergyd.core.policy_api.policy import Lever
from gpuenergyd.core.policy_api.power import HIGHEST_PRIORITY, LOWEST_PRIORITY, USUAL_PRIORITY, PowerJobView
from gpuenergyd.daemon.gpus.inventory import Gpus
from gpuenergyd.daemon.jobs.registry import Jobs
from gpuenergyd.daemon.jobs.runner import JobRunner

PRIORITY_TAG = "priority"


def job_views(jobs: Jobs, gpus: Gpus, *, can_limit: bool) -> tuple[PowerJobView, ...]:
    """Return the view of each job with a GPU; `can_limit` says whether power limits may be set."""
    return tuple(_view(runner, jobs, gpus, can_limit=can_limit) for runner in jobs if runner.job.ranks.gpu_uuids)


def _view(runner: JobRunner, jobs: Jobs, gpus: Gpus, *, can_limit: bool) -> PowerJobView:
    job, registration = runner.job, jobs.registration(runner.job_id)
    baseline = job.baseline
    power_w = None
    if baseline is not None and baseline.energy_j is not None:
        power_w = baseline.energy_j / baseline.iteration_time_s
    return PowerJobView(
        job_id=runner.job_id,
        num_gpus=len(job.ranks.gpu_uuids),
        training_id=f"{runner.owner.uid}/{registration.job_name}/{registration.run_key}",
        priority=priority_of(dict(registration.tags)),
        can_follow=_can_follow(runner),
        full_speed_time_s=None if baseline is None else baseline.iteration_time_s,
        full_speed_power_w=power_w,
        power_limit_range_w=_limit_range_w(job.ranks.gpu_uuids, gpus) if can_limit else None,
    )


def _can_follow(runner: JobRunner) -> bool:
    """Return whether targets change the job's power: it runs, or is about to run, a tuned plan that this host sets."""
    is_decided_here = not runner.is_member and not runner.is_observing and runner.forbidden_lever is None
    # Some policies measure slower clocks first when a target permits them.
    is_on_the_way = runner.job.phase is JobPhase.TRIAL and runner.job.target.is_power_limited
    is_tuned = runner.job.phase is JobPhase.TUNED or is_on_the_way
    return is_decided_here and Lever.CLOCKS in runner.services.levers and is_tuned


def priority_of(tags: Mapping[str, str]) -> int:
    """Return the priority in a job's tags; the default if there is none, or it is invalid."""
    text = tags.get(PRIORITY_TAG, "")
    if len(text) == 1 and text.isdecimal() and text.isascii():
        return min(LOWEST_PRIORITY, max(HIGHEST_PRIORITY, int(text)))
    return USUAL_PRIORITY


def _limit_range_w(gpu_uuids: Iterable[str], gpus: Gpus) -> tuple[float, float] | None:
    """Return the power limits that all these GPUs accept; None if one of them accepts none."""
    ranges = [found.view().power_limit_range_w for uuid in gpu_uuids if (found := gpus.get(uuid)) is not None]
    known = [limits_w for limits_w in ranges if limits_w is not None]
    if not known or len(known) < len(ranges):
        return None
    low_w, default_w = max(low for low, _ in known), min(high for _, high in known)
    return (low_w, default_w) if low_w < default_w else None
