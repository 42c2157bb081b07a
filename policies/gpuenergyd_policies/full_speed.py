"""The full-speed policy: every GPU keeps its default clocks, as in the baseline."""

import time

from gpuenergyd.core.pipeline.plan import ClockPlan, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView, OfflinePlan, OfflineRequest
from gpuenergyd.errors import TargetError
from gpuenergyd_policies.planning.plan_evaluation import baseline, unproven_plan


class FullSpeed:
    """Never changes a clock."""

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the baseline plan, independent of all measurements."""
        return baseline_plan(reason=f"policy full-speed keeps default clocks on {len(view.gpus)} GPUs")


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
