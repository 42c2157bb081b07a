"""Another order than 1F1B for a running job: advice, a trial of split backwards, the order itself, and the way back.

Each step is decided from the view alone. Once the plan in 1F1B has settled, the policy computes what another order
would save. Without permission that advice is all there is. With it, a few iterations at full speed with backwards
split in place measure what splitting costs; then order and clocks are chosen together under the measured memory. The
job goes back to its plan in 1F1B as soon as split backwards take longer, memory becomes tight, or a rank refuses.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.pipeline.reorder import OrderAdvice, is_plain_1f1b, split_in_place
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.correction import corrected_plan
from gpuenergyd_policies.bubble_aware.model import fit_model
from gpuenergyd_policies.bubble_aware.order_choice import (
    ChosenOrder,
    SplitShares,
    choose_order,
    measured_shares,
    memory_refusal,
    no_better_order,
)
from gpuenergyd_policies.bubble_aware.planning import Figure
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.seen import NotEnoughDataError

_TRIAL = "split-trial"
HELD_UP = "not used, since another rank or replica of the training stays in 1F1B"
NOT_ALLOWED = "not used, since the program does not allow it: attach(..., allow_reorder=True) or --allow-reorder"


def next_tuned_plan(view: JobView) -> ClockPlan:
    """Return the plan that follows tuned plans: corrected, in another order, or the same one."""
    last = view.issued_plans[-1]
    tuned = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED]
    plain = [plan for plan in tuned if not plan.orders]
    if not plain:
        return corrected_plan(view, tuned[-1])
    if last.orders and last.purpose is PlanPurpose.PROFILE:
        return _after_trial(view, last, plain[-1])
    if last.orders:
        return _under_order(view, last, plain[-1])
    following = corrected_plan(view, plain[-1])
    return _improved(view, following) if following is last else following


def _improved(view: JobView, plain: ClockPlan) -> ClockPlan:
    """Return a settled plan in 1F1B with advice about another order, or the trial of one."""
    measured = [o for o in view.observations if o.is_regular and o.plan_id == plain.plan_id]
    is_settled = len(measured) >= TUNING.settled_iterations and not view.target.fills_time
    if view.reorder.refusal or not is_settled or not is_plain_1f1b(view.schedule):
        return plain
    known = view.reorder.advice
    if known is None:
        chosen = _chosen(view, plain, ())
        advice = no_better_order(view, plain) if chosen is None else chosen.advice
        return replace(plain, order_advice=replace(advice, refusal=_refusal(view, advice)))
    if not _is_trial_due(view):
        return plain
    refusal = _refusal(view, known)
    if refusal:
        return plain if refusal == known.refusal else replace(plain, order_advice=replace(known, refusal=refusal))
    return _trial(view, number=_num_trials(view) + 1)


def _refusal(view: JobView, advice: OrderAdvice) -> str:
    """Return why an order that would save energy is not tried; empty if it is."""
    if advice.saving_ratio < advice.plain_saving_ratio + TUNING.least_gain_of_order:
        return "not used, since it would save hardly more"
    if not view.reorder.is_allowed:
        return NOT_ALLOWED
    return memory_refusal(view.reorder.memory, view.schedule.num_ranks)


def _chosen(view: JobView, plain: ClockPlan, trial: Sequence[IterationObservation]) -> ChosenOrder | None:
    """Return the best order with its plan; None if no order meets the target, or too little was measured.

    `trial` are iterations with backwards split; without any, the cost of splitting is assumed.
    """
    num_ranks = view.schedule.num_ranks
    try:
        model = fit_model(view)
    except NotEnoughDataError:
        return None
    shares = measured_shares(trial, model.profile, num_ranks) if trial else SplitShares.assumed(num_ranks)
    return None if shares is None else choose_order(view, model, plain, shares)


# --- trial ---


def _num_trials(view: JobView) -> int:
    return sum(plan.purpose is PlanPurpose.PROFILE and bool(plan.orders) for plan in view.issued_plans)


def _is_trial_due(view: JobView) -> bool:
    """Return whether another order may be tried: once at first, then after longer and longer times in 1F1B."""
    number = _num_trials(view)
    if number == 0:
        return True
    reordered = {plan.plan_id: plan.figure(Figure.DECIDED_AFTER) for plan in view.issued_plans if plan.orders}
    ran = [o.iteration_index for o in view.observations if o.plan_id in reordered]
    last = max([*ran, *(decided for decided in reordered.values() if decided is not None)], default=0)
    since = view.observations[-1].iteration_index - last
    return number < TUNING.max_order_trials and since >= TUNING.order_retry_iterations * 4 ** (number - 1)


def _trial(view: JobView, *, number: int) -> ClockPlan:
    """Return a plan at full speed with backwards split in place."""
    schedule = split_in_place(view.schedule)
    ranks = []
    for r, order in enumerate(schedule.orders):
        top = max(view.gpus[r].supported_sm_clocks_mhz)
        ranks.append(RankClocks(r, (top,) * len(order), constant_clock_changes(order, top)))
    return ClockPlan(
        view.plan_id(f"{_TRIAL}-{number}"),
        PlanPurpose.PROFILE,
        tuple(ranks),
        reason="measuring input and weight gradients apart, at full speed",
        figures=((Figure.DECIDED_AFTER, view.observations[-1].iteration_index),),
        orders=schedule.orders,
    )


def _after_trial(view: JobView, trial: ClockPlan, plain: ClockPlan) -> ClockPlan:
    """Return the order that follows a trial; the trial while it is too short, or the plan in 1F1B."""
    stopped = _stopped(view, trial)
    if stopped:
        return _back(view, plain, stopped)
    under = [o for o in view.observations if o.plan_id == trial.plan_id]
    regular = [o for o in under if o.is_regular][1:]  # in the first one clocks were still changing
    if len(regular) < TUNING.trial_iterations:
        if len(under) < TUNING.longest_trial:
            return trial
        return _back(view, plain, "not used, since its trial was disturbed")
    chosen = _chosen(view, plain, regular)
    if chosen is None:
        return _back(view, plain, "not used, since split backwards take too long")
    if chosen.advice.saving_ratio < chosen.advice.plain_saving_ratio + TUNING.least_gain_of_order:
        refusal = "not used, since split backwards take too long to save clearly more"
        return replace(plain, order_advice=replace(chosen.advice, refusal=refusal))
    return chosen.plan


# --- in the order ---


def _under_order(view: JobView, plan: ClockPlan, plain: ClockPlan) -> ClockPlan:
    """Return the plan that follows one with an order of its own: corrected, or the plan in 1F1B."""
    stopped = _stopped(view, plan)
    if stopped:
        return _back(view, plain, stopped)
    if _has_become_slow(view, plan):
        return _back(view, plain, "not used, since split backwards have become slower")
    return corrected_plan(view, plan)


def _stopped(view: JobView, plan: ClockPlan) -> str:
    """Return why a plan with an order must end; empty if it may go on."""
    refusal = view.reorder.refusal or memory_refusal(view.reorder.memory, view.schedule.num_ranks)
    return refusal or (HELD_UP if _is_held_up(view, plan) else "")


def _is_held_up(view: JobView, plan: ClockPlan) -> bool:
    """Return whether the ranks have not run a plan's order for long, or not any more: some rank has no plan with one.

    Replicas of a training decide by themselves, and in an iteration all ranks run their orders or none does.
    """
    ran = [o.iteration_index for o in view.observations if o.plan_id == plan.plan_id]
    since = max(ran) if ran else plan.figure(Figure.DECIDED_AFTER)
    return since is not None and view.observations[-1].iteration_index - since > TUNING.longest_without_order


def _has_become_slow(view: JobView, plan: ClockPlan) -> bool:
    """Return whether the newest iteration was late because a split backward took longer than before."""
    regular = [o for o in view.observations if o.is_regular and o.plan_id == plan.plan_id]
    if len(regular) < TUNING.fewest_compared or view.target.fills_time:
        return False
    newest, before = regular[-1], regular[1:-1] or regular[:-1]
    target_s = view.target.iteration_time_s(view.baseline.iteration_time_s)
    late_s = newest.own_time_s - max(target_s, median(o.own_time_s for o in before))
    if late_s <= TUNING.slow_order_ratio * target_s + view.baseline.iteration_sigma_s:
        return False
    return any(
        _split_time_s(newest, r) > (1 + TUNING.slow_split_ratio) * median(_split_time_s(o, r) for o in before)
        for r in range(view.schedule.num_ranks)
    )


def _split_time_s(observation: IterationObservation, pp_rank: int) -> float:
    """Return the time that a rank spent in input and weight gradients."""
    return sum(
        sample.count * sample.time_s
        for sample in observation.instruction_samples
        if sample.pp_rank == pp_rank and sample.kind in {InstructionKind.I, InstructionKind.W}
    )


def _back(view: JobView, plain: ClockPlan, refusal: str) -> ClockPlan:
    """Return the plan in 1F1B, with the reason for going back to it."""
    known = view.reorder.advice
    return plain if known is None else replace(plain, order_advice=replace(known, refusal=refusal))
