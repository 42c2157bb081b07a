"""The same slowdown at every hour: the default target, and the yardstick for any that follows a signal."""

from gpuenergyd.core.policy_api.policy import TargetView
from gpuenergyd.core.policy_api.target import PerformanceTarget


class ConstantSlowdown:
    """Grants the whole slowdown budget evenly, and whatever a straggler forces."""

    def next_target(self, view: TargetView) -> PerformanceTarget:
        """Return the budget as a constant slowdown."""
        return PerformanceTarget(view.max_slowdown_ratio, straggler_time_s=view.straggler_time_s)
