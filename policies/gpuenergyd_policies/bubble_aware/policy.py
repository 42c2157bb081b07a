"""The bubble-aware policy: the plan after each iteration of a job.

Three steps, each decided from the view alone, so that a restarted policy host continues where the last one stopped:
profile (one design point per iteration), plan (exact frontier at the target, rounded to supported clocks, with changes
to faster clocks requested ahead of need), correct (a plan that measures slow is followed by one with more caution).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from gpuenergyd.core.pipeline.fitted import FittedPipeline, fitted_rows
from gpuenergyd.core.pipeline.graph import Instruction
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan, full_speed_plan
from gpuenergyd.core.policy_api.policy import FrontierPoint, JobView
from gpuenergyd_policies.advice_trials import plan_without_slowdown
from gpuenergyd_policies.bubble_aware.model import FittedJob, fit_model, fit_quality, was_profiled
from gpuenergyd_policies.bubble_aware.noise import last_noisy_plan, plan_while_noisy, since_noise, trusted_plan
from gpuenergyd_policies.bubble_aware.planning import Figure, tuned_plan
from gpuenergyd_policies.bubble_aware.reordering import next_tuned_plan
from gpuenergyd_policies.bubble_aware.slowdown_advice import with_slowdown_advice
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.flags import flags_of
from gpuenergyd_policies.full_speed import reason_for_full_speed
from gpuenergyd_policies.planning.kernel_cache import prepare_kernels
from gpuenergyd_policies.predicted_savings import cheapest_clocks, predicted_plan
from gpuenergyd_policies.profiling.affordable import affordable_plan
from gpuenergyd_policies.profiling.design import DesignPoint, clock_levels, profile_plan
from gpuenergyd_policies.profiling.fit import NotEnoughDataError
from gpuenergyd_policies.profiling.previous_run import with_previous_run
from gpuenergyd_policies.profiling.procedure import Design, NoProfilingStep, held_ranks
from gpuenergyd_policies.profiling.rescaling import change_of


class BubbleAware:
    """Profiles every stage online, plans on the exact frontier, and corrects the plan from measured iterations.

    With `bubble-aware:flattest=true`, of the plans of nearly the least energy the one whose power swings least is run.
    With `bubble-aware:trials=false`, a plain loop that permits no slowdown never runs a slower iteration.
    """

    def __init__(self, **options: str) -> None:
        """Take the options that follow the policy's name.

        Raises:
            UsageError: an option is unknown or its value invalid.
        """
        flags = flags_of("bubble-aware", options, {"flattest": False, "trials": True})
        self._is_flattest, self._may_try = flags["flattest"], flags["trials"]
        self._frontiers: dict[bool, tuple[tuple[int, str], tuple[FrontierPoint, ...]]] = {}

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
        view = with_previous_run(since_noise(view))
        if all(plan.purpose is not PlanPurpose.TUNED for plan in view.issued_plans):
            return ()
        num_learned = view.num_issued(PlanPurpose.PROFILE if was_profiled(view) else PlanPurpose.TUNED)
        key = (num_learned, f"{view.baseline.iteration_time_s:.3g}")
        known = self._frontiers.get(until_slowest)
        if known is None or known[0] != key:
            try:
                known = self._frontiers[until_slowest] = key, fit_model(view).frontier(until_slowest=until_slowest)
            except NotEnoughDataError:
                return ()
        return known[1]

    def fitted(self, view: JobView) -> FittedPipeline | None:
        """Return the fitted profile with the job's latencies; None before the first plan."""
        view = with_previous_run(since_noise(view))
        try:
            model = fit_model(view)
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
        """Return the next profiling plan, the tuned plan, or its correction, for loops with advice on the slowdown."""
        view = replace(view, is_flattest=self._is_flattest, may_try=self._may_try)
        return with_slowdown_advice(view, self._next_plan(view))

    def _next_plan(self, view: JobView) -> ClockPlan:
        levels_mhz = tuple(clock_levels(gpu.supported_sm_clocks_mhz) for gpu in view.gpus)
        if min(len(own) for own in levels_mhz) < 2:
            last = view.issued_plans[-1] if view.issued_plans else None
            return last or baseline_plan(reason="a GPU of this job has a single clock")
        if not view.can_set_clocks:
            return predicted_plan(view, cheapest_clocks)
        if (reason := reason_for_full_speed(view)) is not None:
            return plan_without_slowdown(view, reason)
        if (noisy := plan_while_noisy(view)) is not None:
            return noisy
        view = since_noise(view)
        tuned = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED]
        if tuned:
            return self._next_after(view, tuned[-1])
        return _plan_from_previous_run(view) or self._first_plan(view)

    def _next_after(self, view: JobView, plan: ClockPlan) -> ClockPlan:  # noqa: ARG002  another policy needs the plan
        return next_tuned_plan(view)

    def _first_plan(self, view: JobView) -> ClockPlan:
        return _next_profiling_plan(view, [clock_levels(gpu.supported_sm_clocks_mhz) for gpu in view.gpus])


def _plan_from_previous_run(view: JobView) -> ClockPlan | None:
    """Return a first plan from the profile of a previous run; None without one, or if it no longer holds."""
    known = with_previous_run(view)
    if view.previous_run is None or known is view:
        return None
    why = f"planned from job {view.previous_run.job_id}, whose times at full speed still hold"
    change, unverified_ratio = change_of(view), 0.0
    if change is not None:
        why = "planned from the iterations before the job changed, rescaled to its present times at full speed"
        unverified_ratio = max(TUNING.caution_of_change * change.largest_ratio, TUNING.min_change_caution_ratio)
        unverified_ratio = min(unverified_ratio, TUNING.max_change_caution_ratio)
    caution_ratio = view.previous_run.figure(Figure.CAUTION)
    job = FittedJob(known)
    return tuned_plan(job, caution_ratio=caution_ratio, number=1, why=why, unverified_ratio=unverified_ratio)


def _next_profiling_plan(view: JobView, levels_mhz: Sequence[Sequence[int]]) -> ClockPlan:
    """Return the next design point, the first tuned plan once enough is known, or a plan to wait with."""
    noisy = last_noisy_plan(view)
    design = Design(view, levels_mhz, after="" if noisy is None else noisy.plan_id.partition("@")[0])
    job = FittedJob(view)
    step = design.next_step(lambda: fit_quality(job))
    match step:
        case NoProfilingStep.DONE:
            known = with_previous_run(view)
            planned = job if known is view else FittedJob(known)
            plan = tuned_plan(planned, caution_ratio=None, number=1, why="first plan from the profile")
            return trusted_plan(job, plan)
        case NoProfilingStep.WAIT:
            return _waiting_plan(view)
        case _:
            held = held_ranks(view)

            def plan_of(point: DesignPoint, fast: Collection[Instruction]) -> ClockPlan:
                return profile_plan(
                    design.plan_id(step),
                    point,
                    view.schedule,
                    levels_mhz,
                    reason=design.reason(step),
                    held_ranks=held,
                    wait_levels_mhz=design.wait_levels_mhz,
                    fast=fast,
                )

            point = design.points[step.number]
            return affordable_plan(view, point, plan_of, first_turn=step.number, held_ranks=held)


def _waiting_plan(view: JobView) -> ClockPlan:
    """Return a plan at full speed, for the time until the last design points are measured."""
    last = view.issued_plans[-1] if view.issued_plans else baseline_plan()
    reason = "waiting for the last profiling points"
    if last.purpose is PlanPurpose.PROFILE:
        clocks_mhz = [gpu.supported_sm_clocks_mhz for gpu in view.gpus]
        plan_id = view.plan_id(f"planning-{view.num_issued()}")
        return full_speed_plan(plan_id, view.schedule, clocks_mhz, reason=reason)
    if last.ranks:
        return last
    return baseline_plan(view.plan_id("waiting"), reason=reason)
