"""Follows the grid: slower in dirty hours, faster in clean ones, never beyond the job's slowdown budget or deadline."""

from gpuenergyd.core.policy_api.policy import TargetDecision, TargetView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd_policies.carbon.target import decide


class CarbonTarget:
    """Minimises grams, or the cost of any hourly signal, over the rest of the job; it remembers nothing."""

    def next_target(self, view: TargetView) -> PerformanceTarget:
        """Return the target until the next call."""
        return decide(view).target

    def explain(self, view: TargetView) -> TargetDecision:
        """Return the same decision with what it rests on."""
        return decide(view)
