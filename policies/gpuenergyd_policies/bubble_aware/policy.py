"""The bubble-aware policy: the plan after each iteration of a job.

Every plan is a measurement, from the first iteration after the baseline. The first plan comes from a prior over time
and power curves and a past job of the same model, cautious by its own uncertainty; each plan's iterations update the
belief, and the next plan is made from it (see `learning`). Plans are solved on the exact frontier at the target,
rounded to supported clocks, with changes to faster clocks requested ahead of need. After a few plans learning is over,
and a plan that measures slow is followed by one with more caution (see `decisions`). What a job has learned goes to
later jobs with each new plan, and once more when its last plan has run for a while.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from gpuenergyd.core.pipeline.fitted import FittedPipeline, fitted_rows
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.past_jobs import PastJob
from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView
from gpuenergyd.core.policy_api.prior_policy import PriorView
from gpuenergyd_policies.bubble_aware.decisions import decide
from gpuenergyd_policies.bubble_aware.figures import Figure
from gpuenergyd_policies.bubble_aware.flat_plans import flat_planner
from gpuenergyd_policies.bubble_aware.model import FittedJob
from gpuenergyd_policies.bubble_aware.outcome import PlanOutcome
from gpuenergyd_policies.bubble_aware.slowdown_advice import with_slowdown_advice
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.flags import flags_of
from gpuenergyd_policies.learning.past_jobs import prior_view
from gpuenergyd_policies.learning.seen import NotEnoughDataError
from gpuenergyd_policies.planning.kernel_cache import prepare_kernels


class BubbleAware:
    """Learns curves from its own plans, plans on the exact frontier, and corrects the plan from measured iterations.

    With `bubble-aware:flattest=true`, of the plans of nearly the least energy the one whose power swings least is run.
    With `bubble-aware:trials=false`, no loop runs iterations slower than permitted to learn what they would save.
    """

    def __init__(self, **options: str) -> None:
        """Take the options that follow the policy's name.

        Raises:
            UsageError: an option is unknown, its value invalid, or its plugin not installed.
        """
        flags = flags_of("bubble-aware", options, {"flattest": False, "trials": True})
        self._is_flattest, self._may_try = flags["flattest"], flags["trials"]
        if self._is_flattest:
            flat_planner()
        self._summarized: set[str] = set()
        """Plans under whose iterations the curves were summarized; a new policy host does it once more."""
        self._frontiers: dict[bool, tuple[tuple[int, str], tuple[FrontierPoint, ...]]] = {}

    @staticmethod
    def prior(gpu_model_name: str, past_jobs: Sequence[PastJob]) -> PriorView:
        """Return what is believed of a GPU model's curves, given past jobs of one user."""
        return prior_view(gpu_model_name, past_jobs)

    @staticmethod
    def prepare(announce: Callable[[str], None]) -> str | None:
        """Compile the planner, or load it from its cache."""
        return prepare_kernels(announce)

    def frontier(self, view: JobView) -> tuple[FrontierPoint, ...]:
        """Return the fitted time-energy frontier, time outside the graph included; empty before the first plan."""
        return self._frontier(view, until_slowest=False)

    def power_frontier(self, view: JobView) -> tuple[FrontierPoint, ...]:
        """Return the frontier until no plan needs less power, beyond the time of least energy."""
        return self._frontier(view, until_slowest=True)

    def _frontier(self, view: JobView, *, until_slowest: bool) -> tuple[FrontierPoint, ...]:
        if all(plan.purpose is not PlanPurpose.TUNED for plan in view.issued_plans):
            return ()
        num_learned = min(view.num_issued(PlanPurpose.TUNED), TUNING.num_learning_plans)
        key = (num_learned, f"{view.baseline.iteration_time_s:.3g}")
        known = self._frontiers.get(until_slowest)
        if known is None or known[0] != key:
            try:
                found = FittedJob(view).model.frontier(until_slowest=until_slowest)
                known = self._frontiers[until_slowest] = key, found
            except NotEnoughDataError:
                return ()
        return known[1]

    def fitted(self, view: JobView) -> FittedPipeline | None:
        """Return the fitted profile with the job's latencies; None before the first plan."""
        try:
            model = FittedJob(view).model
        except NotEnoughDataError:
            return None
        last_of = {instruction.pp_rank: node for node, instruction in enumerate(model.graph.instructions)}
        return FittedPipeline(
            schedule=view.schedule,
            rows=fitted_rows(model.profile),
            blocking_power_w=model.profile.blocking_power_w,
            communication_latency_s=view.communication_latency_s,
            launch_gap_s=view.launch_gap_s,
            epilogues_s=tuple(model.graph.epilogues_s[last_of[r]] for r in range(model.graph.num_ranks)),
            bias_s=model.bias_s,
            target_time_s=view.target.iteration_time_s(view.baseline.iteration_time_s),
        )

    def next_plan(self, view: JobView) -> ClockPlan:
        """Return the first plan, the next one, or the one in force, for loops with advice on the slowdown."""
        view = replace(view, is_flattest=self._is_flattest, may_try=self._may_try)
        return with_slowdown_advice(view, self._with_curves(view, decide(view)))

    def _with_curves(self, view: JobView, plan: ClockPlan) -> ClockPlan:
        """Return the plan; where it stays in force, with the curves until now once it has run for a while."""
        is_planned = plan.figure(Figure.CAUTION) is not None
        is_kept = is_planned and bool(view.issued_plans) and plan.plan_id == view.issued_plans[-1].plan_id
        if not is_kept or plan.plan_id in self._summarized:
            return plan
        if len(PlanOutcome.of(view, plan).measured_s) < TUNING.settled_iterations:
            return plan
        self._summarized.add(plan.plan_id)
        try:
            return replace(plan, learned=FittedJob(view).fitted.learned)
        except NotEnoughDataError:
            return plan
