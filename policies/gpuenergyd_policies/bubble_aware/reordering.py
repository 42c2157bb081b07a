"""Another order than 1F1B for a running job: advice, a trial of split backwards, the order itself, and the way back.

Each step is decided from the view alone. Once the plan in 1F1B has settled, the policy computes what another order
would save. Without permission that advice is all there is. With it, a few iterations at full speed with backwards
split in place measure what splitting costs; then order and clocks are chosen together under the measured memory. The
job goes back to its plan in 1F1B as soon as split backwards take longer, memory becomes tight, or a rank refuses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, RankClocks, constant_clock_changes
from gpuenergyd.core.pipeline.reorder import OrderAdvice, is_plain_1f1b, split_in_place
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.figures import Figure
from gpuenergyd_policies.bubble_aware.model import FittedJob
from gpuenergyd_policies.bubble_aware.order_choice import (
    SplitShares,
    choose_order,
    measured_shares,
    memory_refusal,
    no_better_order,
)
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.seen import NotEnoughDataError

HELD_UP = "not used, since a rank of the pipeline stays in 1F1B"
NOT_ALLOWED = "not used, since the program does not allow it: attach(..., allow_reorder=True) or --allow-reorder"


@dataclass(frozen=True, slots=True)
class OtherOrder:
    """The steps towards another order, and back, of a job with a plan in 1F1B."""

    view: JobView
    plain: ClockPlan
    """The newest plan in 1F1B."""

    # --- in 1F1B ---

    @property
    def _has_settled(self) -> bool:
        """Whether the plan in 1F1B has run for long enough, and another order is possible at all."""
        view = self.view
        measured = [o for o in view.observations if o.is_regular and o.plan_id == self.plain.plan_id]
        is_possible = not view.reorder.refusal and not view.target.fills_time and is_plain_1f1b(view.schedule)
        return is_possible and len(measured) >= TUNING.settled_iterations

    @property
    def is_to_be_considered(self) -> bool:
        """Whether what another order would save is to be computed."""
        return self._has_settled and self.view.reorder.advice is None

    @property
    def is_trial_due(self) -> bool:
        """Whether another order may be tried: once at first, then after longer and longer times in 1F1B."""
        if not self._has_settled:
            return False
        number, view = self._num_trials, self.view
        if number == 0:
            return True
        reordered = {plan.plan_id: plan.figure(Figure.DECIDED_AFTER) for plan in view.issued_plans if plan.orders}
        ran = [o.iteration_index for o in view.observations if o.plan_id in reordered]
        last = max([*ran, *(decided for decided in reordered.values() if decided is not None)], default=0)
        since = view.observations[-1].iteration_index - last
        return since >= TUNING.order_retry_iterations << 2 * (number - 1)  # four times longer after each

    def considered(self) -> ClockPlan:
        """Return the plan in 1F1B with advice about another order."""
        chosen = self._chosen(())
        advice = None if chosen is None else chosen.order_advice
        advice = advice or no_better_order(self.view, self.plain)
        return replace(self.plain, order_advice=replace(advice, refusal=self._refusal(advice)))

    def trial_or_refusal(self) -> ClockPlan:
        """Return the trial of another order; the plan in 1F1B if the order is not tried, with the reason."""
        known = self.view.reorder.advice
        assert known is not None
        if refusal := self._refusal(known):
            is_known = refusal == known.refusal
            return self.plain if is_known else replace(self.plain, order_advice=replace(known, refusal=refusal))
        return self._trial()

    def _refusal(self, advice: OrderAdvice) -> str:
        """Return why an order that would save energy is not tried; empty if it is."""
        if not _saves_clearly_more(advice):
            return "not used, since it would save hardly more"
        if not self.view.reorder.is_allowed:
            return NOT_ALLOWED
        return memory_refusal(self.view.reorder.memory, self.view.schedule.num_ranks)

    def _chosen(self, trial: Sequence[IterationObservation]) -> ClockPlan | None:
        """Return the best order with its plan; None if no order meets the target, or too little was measured.

        `trial` are iterations with backwards split; without any, the cost of splitting is assumed.
        """
        num_ranks = self.view.schedule.num_ranks
        try:
            model = FittedJob(self.view).model
        except NotEnoughDataError:
            return None
        shares = measured_shares(trial, model.profile, num_ranks) if trial else SplitShares.assumed(num_ranks)
        return None if shares is None else choose_order(self.view, model, self.plain, shares)

    # --- trial ---

    @property
    def _num_trials(self) -> int:
        return sum(plan.purpose is PlanPurpose.TRIAL and bool(plan.orders) for plan in self.view.issued_plans)

    def _trial(self) -> ClockPlan:
        """Return a plan at full speed with backwards split in place."""
        view = self.view
        schedule = split_in_place(view.schedule)
        ranks = []
        for r, order in enumerate(schedule.orders):
            top = max(view.gpus[r].supported_sm_clocks_mhz)
            ranks.append(RankClocks(r, (top,) * len(order), constant_clock_changes(order, top)))
        return ClockPlan(
            view.plan_id(f"split-trial-{self._num_trials + 1}"),
            PlanPurpose.TRIAL,
            tuple(ranks),
            reason="measuring input and weight gradients apart, at full speed",
            figures=((Figure.DECIDED_AFTER, view.observations[-1].iteration_index),),
            orders=schedule.orders,
        )

    def _measured(self, trial: ClockPlan) -> list[IterationObservation]:
        """Return the undisturbed iterations of a trial without the first, in which clocks were still changing."""
        return [o for o in self.view.observations if o.plan_id == trial.plan_id and o.is_regular][1:]

    def is_trial_short(self, trial: ClockPlan) -> bool:
        """Return whether more iterations of a trial are needed, and worth waiting for."""
        num_ran = sum(o.plan_id == trial.plan_id for o in self.view.observations)
        return len(self._measured(trial)) < TUNING.min_iterations_to_evaluate and num_ran < TUNING.longest_without_order

    def after_trial(self, trial: ClockPlan) -> ClockPlan:
        """Return the plan with the order that a trial has shown to be best, or the plan in 1F1B."""
        regular = self._measured(trial)
        if len(regular) < TUNING.min_iterations_to_evaluate:
            return self._back("not used, since its trial was disturbed")
        chosen = self._chosen(regular)
        if chosen is None or chosen.order_advice is None:
            return self._back("not used, since split backwards take too long")
        if not _saves_clearly_more(chosen.order_advice):
            refusal = "not used, since split backwards take too long to save clearly more"
            return replace(self.plain, order_advice=replace(chosen.order_advice, refusal=refusal))
        return chosen

    # --- in the order ---

    def reason_to_end(self, plan: ClockPlan) -> str:
        """Return why a plan with an order must end; empty if it may go on."""
        view = self.view
        if refusal := view.reorder.refusal or memory_refusal(view.reorder.memory, view.schedule.num_ranks):
            return refusal
        if self._is_held_up(plan):
            return HELD_UP
        is_slow = plan.purpose is PlanPurpose.TUNED and self._has_become_slow(plan)
        return "not used, since split backwards have become slower" if is_slow else ""

    def ended(self, plan: ClockPlan) -> ClockPlan:
        """Return the plan in 1F1B that follows a plan with an order, with the reason."""
        return self._back(self.reason_to_end(plan))

    def _is_held_up(self, plan: ClockPlan) -> bool:
        """Return whether not all ranks have run a plan's order for long: some rank refuses it or has no plan."""
        ran = [o.iteration_index for o in self.view.observations if o.plan_id == plan.plan_id]
        since = max(ran) if ran else plan.figure(Figure.DECIDED_AFTER)
        newest = self.view.observations[-1].iteration_index
        return since is not None and newest - since > TUNING.longest_without_order

    def _has_become_slow(self, plan: ClockPlan) -> bool:
        """Return whether the newest iteration was late because a split backward took longer than before."""
        view = self.view
        regular = [o for o in view.observations if o.is_regular and o.plan_id == plan.plan_id]
        if len(regular) < TUNING.min_iterations_to_evaluate or view.target.fills_time:
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

    def _back(self, refusal: str) -> ClockPlan:
        """Return the plan in 1F1B, with the reason for going back to it."""
        known = self.view.reorder.advice
        return self.plain if known is None else replace(self.plain, order_advice=replace(known, refusal=refusal))


def _saves_clearly_more(advice: OrderAdvice) -> bool:
    """Return whether another order saves enough beyond the plan in 1F1B."""
    return advice.saving_ratio >= advice.plain_saving_ratio + TUNING.least_gain_of_order


def _split_time_s(observation: IterationObservation, pp_rank: int) -> float:
    """Return the time that a rank spent in input and weight gradients."""
    return sum(
        sample.count * sample.time_s
        for sample in observation.instruction_samples
        if sample.pp_rank == pp_rank and sample.kind in {InstructionKind.I, InstructionKind.W}
    )
