"""The bubble-aware policy without profiling: every plan is an experiment, from the first iteration after the baseline.

The first plan comes from a prior over time and power curves, cautious by its own uncertainty; each plan's iterations
update the belief, and the next plan is made from it (see `profiling.prior`). After a few plans learning is over, and
plans are corrected as those of the policy that profiles.
"""

from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.correction import PlanOutcome, corrected_plan
from gpuenergyd_policies.bubble_aware.model import was_profiled
from gpuenergyd_policies.bubble_aware.noise import trusted_plan
from gpuenergyd_policies.bubble_aware.planning import tuned_plan
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.profiling.previous_run import with_previous_run


class BubbleAwareFromPlans(BubbleAware):
    """Learns time and power curves from the iterations of its own plans, and plans on the exact frontier."""

    def _first_plan(self, view: JobView) -> ClockPlan:
        plan = tuned_plan(view, caution_ratio=None, number=1, why="first plan, from the prior and the baseline")
        return trusted_plan(view, plan)

    def _next_after(self, view: JobView, plan: ClockPlan) -> ClockPlan:
        outcome = PlanOutcome.of(view, plan)
        is_learning = outcome.number <= TUNING.num_learning_plans and not was_profiled(with_previous_run(view))
        if not is_learning or outcome.has_new_target or not outcome.is_in_force:
            return corrected_plan(view, plan)
        if len(outcome.measured_s) < TUNING.min_iterations_to_learn:
            return plan
        why = f"learned from {outcome.number - 1} plans; the last was {outcome.deviation}"
        return tuned_plan(view, caution_ratio=None, number=outcome.number, why=why)
