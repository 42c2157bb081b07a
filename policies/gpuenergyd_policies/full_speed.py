"""Full speed: the policy that keeps it, and the reasons for which other policies keep it for a job."""

import time

from gpuenergyd.core.pipeline.graph import LOOP_SCHEDULE
from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView, OfflinePlan, OfflineRequest
from gpuenergyd.count_text import count_text
from gpuenergyd.errors import TargetError
from gpuenergyd_policies.advice import with_advice
from gpuenergyd_policies.planning.offline_requests import unproven_plan
from gpuenergyd_policies.planning.plan_evaluation import baseline
from gpuenergyd_policies.setting_curves import Cost


class FullSpeed:
    """Never changes a clock."""

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the baseline plan, independent of all measurements."""
        return baseline_plan(reason=f"policy full-speed keeps default clocks on {count_text(len(view.gpus), 'GPU')}")


def reason_for_full_speed(view: JobView) -> str | None:
    """Return why no setting is worth trying for a job, or it cannot be planned; None for all jobs but some plain loops.

    A loop without a phase that waits computes all the time, so slower clocks make every iteration longer. The one
    instruction of a data-parallel loop without phases also contains the wait for the slowest rank, so that ranks which
    profile at the same time, each for itself, measure each other's clocks.
    """
    is_loop = view.is_plain_loop or view.schedule.name == LOOP_SCHEDULE
    if not is_loop or view.has_waits:
        return None
    if permits_no_slowdown(view):
        what = "one instruction per iteration" if view.is_plain_loop else "no phase that waits"
        return f"nothing to save at the same speed: no slowdown permitted and {what}"
    if view.num_dp_ranks > 1 and view.is_plain_loop:
        return f"at full speed: {count_text(view.num_dp_ranks, 'data-parallel rank')} are not planned together yet"
    return None


def permits_no_slowdown(view: JobView) -> bool:
    """Return whether the target is the time at full speed."""
    return view.target.iteration_time_s(view.baseline.iteration_time_s) <= view.baseline.iteration_time_s


def plan_at_full_speed(view: JobView, reason: str, *, cost: Cost | None = None) -> ClockPlan:
    """Return a plan that leaves all clocks alone; the last plan, with the reason, if that one does already.

    It has advice where there is any, by the `cost` that the policy minimizes.
    """
    last = view.issued_plans[-1] if view.issued_plans else baseline_plan()
    plan_id = view.plan_id(f"full-speed-after-{view.num_issued()}") if last.ranks else last.plan_id
    return with_advice(view, baseline_plan(plan_id, reason=reason), cost=cost)


def plan_offline(request: OfflineRequest) -> OfflinePlan:
    """Return every instruction at its maximum clock.

    Raises:
        TargetError: maximum clocks are too slow for the target.
    """
    started_cpu_s = time.process_time()
    full_speed = baseline(request.graph, request.profile)
    target_s = request.target.iteration_time_s(full_speed.iteration_time_s)
    if full_speed.iteration_time_s > target_s:
        raise TargetError(
            f"target {target_s:.6g} s is too short: policy full-speed takes {full_speed.iteration_time_s:.6g} s"
        )
    return unproven_plan(request, full_speed, solve_cpu_s=time.process_time() - started_cpu_s)
