"""The bubble-aware policy without profiling: every plan is an experiment, from the first iteration after the baseline.

The first plan comes from a prior over time and power curves and from past jobs like this one, cautious by its own
uncertainty; each plan's iterations update the belief, and the next plan is made from it (see `profiling.prior`). After
a few plans learning is over, and plans are corrected as those of the policy that profiles. What a job has learned goes
to later jobs with each new plan, and once more when its last plan has run for a while.
"""

from collections.abc import Sequence
from dataclasses import replace

from gpuenergyd.core.pipeline.plan import ClockPlan
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import JobView, PriorView
from gpuenergyd.core.policy_api.previous_run import PROVEN_ITERATIONS
from gpuenergyd.count_text import count_text
from gpuenergyd_policies.bubble_aware.correction import PlanOutcome, corrected_plan
from gpuenergyd_policies.bubble_aware.model import FittedJob, fitted_profile, was_profiled
from gpuenergyd_policies.bubble_aware.noise import trusted_plan
from gpuenergyd_policies.bubble_aware.planning import tuned_plan
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.profiling.fit import NotEnoughDataError
from gpuenergyd_policies.profiling.previous_run import with_previous_run
from gpuenergyd_policies.profiling.prior.of_job import LearnedProfile
from gpuenergyd_policies.profiling.prior.shown import prior_view


class BubbleAwareFromPlans(BubbleAware):
    """Learns time and power curves from the iterations of its own plans, and plans on the exact frontier."""

    def __init__(self, **options: str) -> None:
        super().__init__(**options)
        self._summarized: set[str] = set()
        """Plans under whose iterations the curves were summarized; a new policy host does it once more."""

    @staticmethod
    def prior(gpu_model_name: str, past_jobs: Sequence[PastJob]) -> PriorView:
        """Return what is believed of a GPU model's curves, given past jobs of one user."""
        return prior_view(gpu_model_name, past_jobs)

    def _first_plan(self, view: JobView) -> ClockPlan:
        job = FittedJob(view)
        plan = tuned_plan(job, caution_ratio=None, number=1, why="first plan, from the prior and the baseline")
        return trusted_plan(job, plan, is_experiment=True)

    def _next_after(self, view: JobView, plan: ClockPlan) -> ClockPlan:
        following = _following(view, plan)
        return self._with_curves(view, plan) if following is plan else following

    def _with_curves(self, view: JobView, plan: ClockPlan) -> ClockPlan:
        """Return the plan in force, with the curves until now once it has run for a while."""
        num_measured = len(PlanOutcome.of(view, plan).measured_s)
        if num_measured < PROVEN_ITERATIONS or plan.plan_id in self._summarized:
            return plan
        self._summarized.add(plan.plan_id)
        try:
            fitted = fitted_profile(view)
        except NotEnoughDataError:
            return plan
        return replace(plan, learned=fitted.learned) if isinstance(fitted, LearnedProfile) else plan


def _following(view: JobView, plan: ClockPlan) -> ClockPlan:
    outcome = PlanOutcome.of(view, plan)
    is_learning = outcome.number <= TUNING.num_learning_plans and not was_profiled(with_previous_run(view))
    if not is_learning or outcome.has_new_target or not outcome.is_in_force:
        return corrected_plan(view, plan)
    if len(outcome.measured_s) < TUNING.min_iterations_to_learn and not outcome.is_far_late:
        return plan
    why = f"learned from {count_text(outcome.number - 1, 'plan')}; the last was {outcome.deviation}"
    return tuned_plan(FittedJob(view), caution_ratio=None, number=outcome.number, why=why)
