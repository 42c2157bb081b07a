"""Target policies: a constant slowdown, and one that follows the carbon intensity of the grid."""

from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetDecision, TargetView
from gpuenergyd_policies.carbon.target import decide


class ConstantSlowdown:
    """Spends the slowdown budget evenly over time; the default target, and the reference for other policies."""

    def next_target(self, view: TargetView) -> PerformanceTarget:
        """Return the slowdown budget, or the pace of a straggler."""
        return PerformanceTarget(view.max_slowdown_ratio, straggler_time_s=view.straggler_time_s)


class CarbonTarget:
    """Minimises emissions, or any other hourly cost of energy, within the job's slowdown budget and deadline.

    It keeps no state, because the view contains everything that it needs.
    """

    def next_target(self, view: TargetView) -> PerformanceTarget:
        """Return the target until the next call."""
        return decide(view).target

    def explain(self, view: TargetView) -> TargetDecision:
        """Return the same target with its reason and the intensity behind it."""
        return decide(view)
