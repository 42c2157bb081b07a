"""Power queries to the policy host, which divides a budget among jobs by the frontiers that their policies know."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gpuenergyd.core.policy_api.policy import ClockPolicy, FrontierPoint, JobView
from gpuenergyd.core.policy_api.power import PowerDecision, PowerJobView, PowerTargetPolicy, PowerView
from gpuenergyd.daemon.processes.target_queries import frontier_of


@dataclass(frozen=True, slots=True)
class PowerQuery:
    """A view without frontiers, which the policy host adds."""

    power_target: str
    view: PowerView


def answer_power(
    divider: PowerTargetPolicy, query: PowerQuery, policies: Mapping[str, ClockPolicy], views: Mapping[str, JobView]
) -> PowerDecision:
    """Return the policy's decision with the frontiers of the jobs' clock policies."""
    jobs = tuple(_with_frontier(job, policies.get(job.job_id), views.get(job.job_id)) for job in query.view.jobs)
    return divider.divide(replace(query.view, jobs=jobs))


def _with_frontier(job: PowerJobView, policy: ClockPolicy | None, view: JobView | None) -> PowerJobView:
    """Return a job with its frontier, or without one if its policy raises, so that other jobs are not affected."""
    if not job.can_follow or view is None:
        return job
    known: Callable[[JobView], tuple[FrontierPoint, ...]] | None = getattr(policy, "power_frontier", None)
    try:
        frontier = known(view) if known is not None else frontier_of(policy, view)
    except Exception:  # noqa: BLE001  a plugin may raise anything
        frontier = ()
    return replace(job, frontier=frontier, slows_for_power=known is not None)
