"""Makes tuned plans: clocks of least energy within the target time, changed seldom, with a margin for errors.

Caution is that margin: the planner assumes that every instruction below its maximum clock takes a little longer than
in its profile, which leaves that much slack, and that waits of a plain loop end earlier by as large a share of the
iteration, so that the clock is high again in time.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPrediction, PlanPurpose, RankClocks, baseline_plan
from gpuenergyd.core.pipeline.power_swing import SwingFigure, swing_of
from gpuenergyd.core.pipeline.profile import InstructionProfile, PipelineProfile, with_waiting_power
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.best_known import TriedPlans
from gpuenergyd_policies.bubble_aware.candidates import Candidate, Candidates, wave_of_clocks
from gpuenergyd_policies.bubble_aware.cheaper_waits import with_cheaper_waits
from gpuenergyd_policies.bubble_aware.figures import Figure
from gpuenergyd_policies.bubble_aware.model import FittedJob, PipelineModel
from gpuenergyd_policies.bubble_aware.outcome import raise_latency_s
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.full_speed import plan_at_full_speed
from gpuenergyd_policies.learning.job_profile import LearnedProfile
from gpuenergyd_policies.learning.risk import MAX_LATE_RATIO, caution_within_risk
from gpuenergyd_policies.learning.seen import NotEnoughDataError
from gpuenergyd_policies.observed_pipeline import contradiction
from gpuenergyd_policies.planning.frontier import min_iteration_time_s, solve
from gpuenergyd_policies.planning.large import TOO_LARGE
from gpuenergyd_policies.planning.problem import Effort
from gpuenergyd_policies.planning.switching.simulation import simulate_switching

_LEAST_SHARE_OF_WAIT = 0.5
"""Of a wait, so much is planned for at least, whatever the caution."""


def tuned_plan(job: FittedJob, *, caution_ratio: float | None, number: int, why: str) -> ClockPlan:
    """Return a plan for the target from the iterations of a job; the baseline plan where they are too few.

    Without a `caution_ratio` the plan is one to learn from: its caution is a share of the noise, all of which a plan
    without slack suffers, and a plan that ran before may be better.
    """
    view = job.view
    try:
        fitted, model = job.fitted, job.model
    except NotEnoughDataError as error:
        return plan_at_full_speed(view, f"cannot plan: {error}")
    if number == 1 and (reason := contradiction(view, model.graph, model.profile)) is not None:
        return _refusal(view, reason)
    tried = TriedPlans(view, model, number) if caution_ratio is None else None
    more_ratio = 0.0 if tried is None else tried.more_time_ratio
    slower = _slower_profile(view, model, fitted, more_ratio)
    plan = plan_from_model(
        view, model, caution_ratio=caution_ratio, number=number, why=why, slower=slower, more_ratio=more_ratio
    )
    plan = replace(plan, learned=fitted.learned, reason=why + fitted.past_jobs_text)
    return plan if tried is None else _predicted_anew(model, tried.best(plan), plan)


def _predicted_anew(model: PipelineModel, best: ClockPlan, plan: ClockPlan) -> ClockPlan:
    """Return the best plan; one that ran before the new `plan` with the energy that the present model predicts."""
    if best.ranks == plan.ranks or best.predicted is None or plan.predicted is None:
        return best
    changes = tuple(best.changes_of(r) for r in range(model.graph.num_ranks))
    baseline_j = plan.predicted.baseline_energy_j
    return replace(
        best, predicted=replace(best.predicted, energy_j=_energy_j(model, changes), baseline_energy_j=baseline_j)
    )


def refusal_in_force(view: JobView) -> ClockPlan | None:
    """Return the newest plan if it is a refusal to plan, until twice as many iterations have run; else None."""
    last = view.issued_plans[-1] if view.issued_plans else None
    decided_after = None if last is None or last.ranks or last.orders else last.figure(Figure.DECIDED_AFTER)
    is_due = decided_after is None or view.observations[-1].iteration_index >= 2 * decided_after
    return None if is_due else last


def _refusal(view: JobView, reason: str) -> ClockPlan:
    index = view.observations[-1].iteration_index
    plan = baseline_plan(view.plan_id(f"refused-after-{index}"), reason=f"cannot plan: {reason}")
    return replace(plan, figures=((Figure.DECIDED_AFTER, index),))


def _slower_profile(view: JobView, model: PipelineModel, fitted: LearnedProfile, more_ratio: float) -> PipelineProfile:
    """Return a profile with as little caution as the belief about times permits: more where a plan has more time."""
    if len(model.graph.instructions) > TOO_LARGE:
        return fitted.curves.profile(caution_sigmas=TUNING.learned_caution_of_large)
    deadline_s = view.target.iteration_time_s(view.baseline.iteration_time_s) - model.bias_s
    caution = caution_within_risk(
        model.graph,
        fitted.curves,
        deadline_s=deadline_s,
        random=np.random.default_rng(view.num_issued()),
        max_late_ratio=MAX_LATE_RATIO - more_ratio,
    )
    return fitted.curves.profile(caution_sigmas=caution.sigmas)


def plan_from_model(
    view: JobView,
    model: PipelineModel,
    *,
    caution_ratio: float | None,
    number: int,
    why: str,
    max_segments: Sequence[int] | None = None,
    slower: PipelineProfile | None = None,
    more_ratio: float = 0.0,
) -> ClockPlan:
    """Return the plan for a known model of the pipeline; for caution see `tuned_plan`.

    With `max_segments`, only plans with so many clock segments per rank and iteration are considered. The profile
    `slower` replaces the model's while clocks are chosen, with so much more time than the target, as a share of it.
    """
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    if caution_ratio is None:
        caution_ratio = TUNING.caution_of_noise * view.baseline.iteration_sigma_s / target_s
    caution_ratio = min(max(caution_ratio, 0.0), TUNING.max_caution_ratio)
    profile = slower or model.profile
    cautious = _with_caution(profile, caution_ratio, waits_end_earlier_s=caution_ratio * target_s)
    waits = [i.instruction_class for i in model.graph.instructions if i.kind.is_wait]
    cut_s = sum(profile[key].at_max_clock.time_s - cautious[key].at_max_clock.time_s for key in waits)
    shortest_s = min_iteration_time_s(model.graph, cautious)
    deadline_s = max((1 + more_ratio) * target_s - model.bias_s, shortest_s + cut_s)
    forced = view.target.fills_time
    solved = solve(model.graph, cautious, deadline_s=deadline_s - cut_s, forced=forced, effort=Effort.PROMPT)
    least_w = model.profile.blocking_power_w if model.waiting_power is None else model.waiting_power.least_w

    @cache
    def lower_bound_j(waiting_w: float) -> float:
        """Return what no plan in the graph falls below if waits draw this power at least."""
        least = replace(model.profile, blocking_power_w=waiting_w)
        return solve(model.graph, least, deadline_s=deadline_s, forced=forced, effort=Effort.QUICK).lower_bound_j

    candidates = Candidates(
        model,
        cautious,
        solved,
        partial(lower_bound_j, model.profile.blocking_power_w),
        is_forced=forced,
        is_flattest=view.is_flattest,
        search_share=TUNING.soon_replaced_share if number < TUNING.num_learning_plans else 1.0,
    )
    chosen = candidates.best(max_segments)
    if not view.is_flattest:
        margin_s = caution_ratio * target_s + view.baseline.iteration_sigma_s
        chosen = with_cheaper_waits(model, cautious, chosen, margin_s=margin_s)
    return ClockPlan(
        plan_id=view.plan_id(f"tuned-{number}"),
        purpose=PlanPurpose.TUNED,
        ranks=tuple(
            RankClocks(pp_rank, tuple(chosen.clock_of[i] for i in order), chosen.changes[pp_rank])
            for pp_rank, order in enumerate(view.schedule.orders)
        ),
        predicted=PlanPrediction(
            iteration_time_s=chosen.simulated.iteration_time_s + chosen.late_s + model.bias_s,
            energy_j=_energy_j(model, chosen.changes),
            lower_bound_j=lower_bound_j(least_w) + least_w * model.graph.num_ranks * model.bias_s,
            baseline_time_s=view.baseline.iteration_time_s,
            baseline_energy_j=model.baseline_energy_j,
        ),
        reason=why,
        figures=(
            (Figure.CAUTION, caution_ratio),
            (Figure.SWITCH_LATENCY, raise_latency_s(view, chosen.changes)),
            (Figure.TARGET, target_s / view.baseline.iteration_time_s),
            (Figure.CALL_STALL, model.calls.stall_s),
            (Figure.CLOCK_DELAY, model.calls.delay_s),
            *_swing_figures(model, chosen),
        ),
    )


def _swing_figures(model: PipelineModel, chosen: Candidate) -> tuple[tuple[str, float], ...]:
    """Return how much the power of the job's GPUs is predicted to swing; nothing for large pipelines."""
    if len(model.graph.instructions) > TUNING.most_shown_waves:
        return ()
    swing = swing_of(wave_of_clocks(model, chosen.clock_of))
    return (
        (SwingFigure.PEAK, swing.peak_w),
        (SwingFigure.TROUGH, swing.trough_w),
        (SwingFigure.RAMP, swing.ramp_w_per_s),
        (SwingFigure.BAND_RMS, swing.band_rms_w),
    )


def _energy_j(model: PipelineModel, changes: Sequence[Sequence[ClockChange]]) -> float:
    """Return the energy of an iteration whose waits draw what the clocks in force make them draw."""
    power = model.waiting_power
    profile = model.profile if power is None else with_waiting_power(model.profile, power)
    simulated = simulate_switching(model.graph, profile, changes, latency=model.latencies)
    return simulated.energy_j + model.bias_energy_j


def _with_caution(profile: PipelineProfile, caution_ratio: float, *, waits_end_earlier_s: float) -> PipelineProfile:
    """Return a profile with longer times below the maximum clock, where times at full speed are well known.

    What ends earlier than assumed is a wait: whatever follows it then runs at the wait's clock.
    """
    classes = {}
    for key, own in profile.classes.items():
        top = own.at_max_clock
        if key.kind.is_wait and own.options[-1].time_s == top.time_s:
            share = max(1 - waits_end_earlier_s / top.time_s, _LEAST_SHARE_OF_WAIT)
            options = [replace(o, time_s=o.time_s * share, energy_j=o.energy_j * share) for o in own.options]
        else:
            options = [top, *(replace(o, time_s=o.time_s * (1 + caution_ratio)) for o in own.options[1:])]
        classes[key] = InstructionProfile(tuple(options))
    return PipelineProfile(classes, profile.blocking_power_w)
