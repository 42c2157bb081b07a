"""The power-limit policy: one given power limit on all GPUs of a job, as administrators set it; nothing is planned.

The reference for policies that plan: `power-limit:watts=300`. The limit is withdrawn if iterations measured under it
exceed the permitted time.
"""

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView, Lever
from gpuenergyd_policies.flags import number_of
from gpuenergyd_policies.full_speed import plan_at_full_speed, reason_for_full_speed
from gpuenergyd_policies.setting_measurements import setting_measurements
from gpuenergyd_policies.uniform_settings import Setting, setting_plan

_MAX_W = 5000


class EqualPowerLimit:
    """Limits the power of each GPU of a job to one value, and leaves clocks at full speed."""

    def __init__(self, **options: str) -> None:
        """Take the limit that follows the policy's name, in watts.

        Raises:
            UsageError: there is none, it is no whole number of watts, or there is another option.
        """
        self._limit_w = number_of("power-limit", options, "watts", 1, _MAX_W, example=300)

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return a plan with the limit on all GPUs; full speed where it cannot be set or is too slow."""
        limit_w = self._limit_w
        ranges_w = [gpu.power_limit_range_w for gpu in view.gpus]
        if not view.can_set_power_limits or None in ranges_w:
            return baseline_plan(reason="the power of this job's GPUs cannot be limited")
        for low_w, high_w in filter(None, ranges_w):
            if not low_w <= limit_w <= high_w:
                return baseline_plan(reason=f"{limit_w} W is out of range ({low_w:g}-{high_w:g} W)")
        if (reason := reason_for_full_speed(view)) is not None:
            return plan_at_full_speed(view, reason)
        target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
        setting = Setting(Lever.POWER_LIMITS, limit_w)
        measured = setting_measurements(view).get(setting)
        if measured is not None and measured.time_s > target_s:
            too_slow = f"a limit of {limit_w} W takes {measured.time_s:.6g} s; target {target_s:.6g} s"
            return plan_at_full_speed(view, too_slow)
        reason = f"a limit of {limit_w} W on each GPU, as given"
        return setting_plan(view, setting, PlanPurpose.TUNED, policy="power-limit", reason=reason)
