"""Decides what follows a plan: the next one to learn from, a corrected one if it is late or early, or itself.

`CORRECTIONS` is an ordered table of conditions and actions; the first condition that holds decides.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.count_text import count_text
from gpuenergyd_policies.bubble_aware.model import FittedJob
from gpuenergyd_policies.bubble_aware.order_choice import SplitShares, plan_in_order
from gpuenergyd_policies.bubble_aware.planning import Figure, raise_latency_s, tuned_plan
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.learning.seen import NotEnoughDataError

_MEDIAN_PER_MEAN_ERROR = 1.2533
"""Standard error of a median over that of a mean, for a normal distribution."""


@dataclass(frozen=True, slots=True)
class PlanOutcome:
    """A tuned plan and its measured iterations."""

    view: JobView
    plan: ClockPlan
    """The newest tuned plan; not in force while the job is back at full speed."""
    target_s: float
    measured_s: tuple[float, ...]
    """Times of its undisturbed iterations without the first, in which clocks were still changing."""

    @classmethod
    def of(cls, view: JobView, plan: ClockPlan) -> "PlanOutcome":
        """Return the outcome of a plan in the iterations of a view."""
        times_s = [o.own_time_s for o in view.observations if o.is_regular and o.plan_id == plan.plan_id]
        return cls(view, plan, view.target.iteration_time_s(view.baseline.iteration_time_s), tuple(times_s[1:]))

    @property
    def number(self) -> int:
        """The number of the next tuned plan, counted from 1."""
        return self.view.num_issued(PlanPurpose.TUNED) + 1

    @property
    def is_in_force(self) -> bool:
        """Whether the plan is the newest of all issued plans."""
        return self.view.issued_plans[-1].plan_id == self.plan.plan_id

    @property
    def caution_ratio(self) -> float:
        """The caution that the plan was made with."""
        return self.plan.figure(Figure.CAUTION) or 0.0

    @property
    def has_new_target(self) -> bool:
        """Whether the target has moved since the plan was made: its times then do not show whether caution is right."""
        planned_ratio = self.plan.figure(Figure.TARGET)
        ratio = self.target_s / self.view.baseline.iteration_time_s
        return planned_ratio is not None and abs(ratio - planned_ratio) > TUNING.target_moved_ratio

    @property
    def is_too_new(self) -> bool:
        """Whether the plan has run for too few iterations to be evaluated."""
        return self.is_in_force and len(self.measured_s) < TUNING.min_iterations_to_tighten

    @property
    def is_unmeasured(self) -> bool:
        """Whether no iteration of the plan was measured."""
        return not self.measured_s

    @property
    def is_learning(self) -> bool:
        """Whether the next plan is still one to learn from."""
        return self.number <= TUNING.num_learning_plans

    @property
    def is_too_new_to_learn(self) -> bool:
        """Whether more iterations of a plan that is learned from are worth waiting for."""
        return len(self.measured_s) < TUNING.min_iterations_to_learn and not self.is_far_late

    @property
    def late_s(self) -> float:
        """Median measured time minus the target."""
        return median(self.measured_s) - self.target_s

    @property
    def is_slow(self) -> bool:
        """Whether the plan is later than its target, beyond noise: clearly at first, or by little for long."""
        at_first_s = self._patience * TUNING.tighten_above_ratio * self.target_s + self._noise_s
        if len(self.measured_s) < TUNING.min_iterations_to_keep_budget or not self._may_caution_help:
            return self.late_s > at_first_s
        chance_s = TUNING.certainty_of_budget_sigma * self._error_s
        after_long_s = TUNING.late_after_long_ratio * self.target_s + self._late_by_calls_s + chance_s
        return self.late_s > min(at_first_s, after_long_s)

    @property
    def _late_by_calls_s(self) -> float:
        """Lateness that the plan was made with, as far as it was given time for calls that stop GPUs."""
        predicted = self.plan.predicted
        if predicted is None or predicted.baseline_time_s is None or not self.plan.figure(Figure.CALL_STALL):
            return 0.0
        target_ratio = self.target_s / self.view.baseline.iteration_time_s
        late_ratio = predicted.iteration_time_s / predicted.baseline_time_s - target_ratio
        late_ratio = min(max(late_ratio, 0.0), TUNING.far_late_of_calls_ratio)
        return late_ratio * self.view.baseline.iteration_time_s

    @property
    def _may_caution_help(self) -> bool:
        """Whether the plan is clearly faster than the one before it that had less caution, or is the first to have any.

        Calls that stop GPUs and GPUs that have become warm make iterations longer whatever the caution, and each try
        costs energy.
        """
        before_s = next(filter(None, map(self._settled_s, reversed(self.view.issued_plans))), None)
        if before_s is None:
            return True
        return median(before_s) - median(self.measured_s) > TUNING.certainty_of_budget_sigma * self._error_s

    def _settled_s(self, plan: ClockPlan) -> tuple[float, ...]:
        """Return the times of a tuned plan for this target with less caution; empty if it ran only shortly.

        One made before clock changes became slower or faster says nothing.
        """
        other = PlanOutcome.of(self.view, plan)
        is_bolder = plan.purpose is PlanPurpose.TUNED and other.caution_ratio < self.caution_ratio
        has_settled = len(other.measured_s) >= TUNING.min_iterations_to_keep_budget
        is_alike = not other.has_new_target and not _differs(other.assumed_latency_s, self.assumed_latency_s)
        return other.measured_s if is_bolder and has_settled and is_alike else ()

    @property
    def is_far_late(self) -> bool:
        """Whether the plan is so late that waiting for more of its iterations would cost more than it tells."""
        if not self.measured_s:
            return False
        return self.late_s > TUNING.far_late_ratio * self.target_s + 2 * self._noise_s

    @property
    def is_fast(self) -> bool:
        """Whether the plan leaves slack unused, beyond noise."""
        is_early = self.late_s < -self._patience * TUNING.loosen_below_ratio * self.target_s - self._noise_s
        return is_early and len(self.measured_s) >= TUNING.min_iterations_to_loosen

    @property
    def raise_latency_s(self) -> float:
        """The longest latency of the plan's changes to faster clocks, as known now."""
        ranks = range(self.view.schedule.num_ranks)
        return raise_latency_s(self.view, [self.plan.changes_of(r) for r in ranks])

    @property
    def has_new_latency(self) -> bool:
        """Whether clock changes take clearly more or less time than the plan assumed; soon only where it is late.

        The first estimates at clocks that no plan had used before move by more than that.
        """
        is_young = len(self.measured_s) < TUNING.min_iterations_to_keep_budget
        if is_young and self.is_in_force and not self.is_slow:
            return False
        return _differs(self.raise_latency_s, self.assumed_latency_s)

    @property
    def assumed_latency_s(self) -> float:
        """The longest latency of changes to faster clocks that the plan was made with."""
        return self.plan.figure(Figure.SWITCH_LATENCY) or 0.0

    @property
    def is_as_planned(self) -> bool:
        """Whether the plan is in force and needs no change."""
        return self.is_in_force and not (self.is_slow or self.is_fast or self.has_new_latency)

    @property
    def must_change(self) -> bool:
        """Whether another plan is needed whatever it saves."""
        return self.is_slow or not self.is_in_force

    @property
    def deviation(self) -> str:
        """The deviation from the target as text."""
        return f"{abs(1000 * self.late_s):.3g} ms {'over' if self.late_s >= 0 else 'under'} the target"

    @property
    def _patience(self) -> int:
        return 1 if self.number == 2 else TUNING.settled_patience

    @property
    def _error_s(self) -> float:
        """Standard error of the lateness: of the median of the plan's iterations, and of the baseline's."""
        num_baseline = max(1, self.view.baseline.num_iterations)
        share = 1 / len(self.measured_s) + 1 / num_baseline
        return _MEDIAN_PER_MEAN_ERROR * self.view.baseline.iteration_sigma_s * math.sqrt(share)

    @property
    def _noise_s(self) -> float:
        return self.view.baseline.iteration_sigma_s / math.sqrt(len(self.measured_s))


def _differs(latency_s: float, assumed_s: float) -> bool:
    return abs(latency_s - assumed_s) > TUNING.new_latency_ratio * assumed_s


def corrected_plan(view: JobView, plan: ClockPlan) -> ClockPlan:
    """Return the plan that follows a tuned plan; the same plan while it needs no correction."""
    outcome = PlanOutcome.of(view, plan)
    return next(act(outcome) for condition, act in CORRECTIONS if condition(outcome))


def _keep(outcome: PlanOutcome) -> ClockPlan:
    return outcome.plan


def _replan(outcome: PlanOutcome, why: str, *, caution_ratio: float | None = None) -> ClockPlan:
    view, plan = outcome.view, outcome.plan
    caution_ratio = outcome.caution_ratio if caution_ratio is None else caution_ratio
    job = FittedJob(view)
    if not plan.orders:
        return tuned_plan(job, caution_ratio=caution_ratio, number=outcome.number, why=why)
    try:
        model = job.model
    except NotEnoughDataError:
        return plan
    shares = SplitShares.of(plan, view.schedule.num_ranks)
    chosen = plan_in_order(
        view, model, plan.orders, shares, caution_ratio=caution_ratio, number=outcome.number, why=why, plain=None
    )
    return replace(chosen.plan, order_advice=None)


def _replan_for_target(outcome: PlanOutcome) -> ClockPlan:
    return _replan(outcome, f"replanned: the target is {outcome.target_s:.4g} s now")


def _resume(outcome: PlanOutcome) -> ClockPlan:
    return _replan(outcome, "replanned after full speed")


def _learn(outcome: PlanOutcome) -> ClockPlan:
    """Return the next plan to learn from, whatever order ran before."""
    why = f"learned from {count_text(outcome.number - 1, 'plan')}; the last was {outcome.deviation}"
    return tuned_plan(FittedJob(outcome.view), caution_ratio=None, number=outcome.number, why=why)


def _replan_for_latency(outcome: PlanOutcome) -> ClockPlan:
    """Return a plan with new lead times and the same caution: late iterations may come from late clock changes."""
    assumed_s = outcome.assumed_latency_s
    latency = f"switch latency {1000 * outcome.raise_latency_s:.3g} ms (assumed {1000 * assumed_s:.3g})"
    return _replan(outcome, f"replanned: {outcome.deviation}; {latency}")


def _adjust_caution(outcome: PlanOutcome) -> ClockPlan:
    late_ratio = outcome.late_s / outcome.target_s
    is_outlier = outcome.late_s >= TUNING.outlier_ratio * outcome.target_s
    extra_ratio = TUNING.outlier_caution_ratio if is_outlier else TUNING.caution_gain * late_ratio
    return _replan(outcome, f"replanned: {outcome.deviation}", caution_ratio=outcome.caution_ratio + extra_ratio)


_not_worth_loosening: dict[tuple[object, ...], None] = {}
"""Plans whose looser successor saves hardly more, with what that was computed from: nothing is computed again at each
iteration. Only for speed: another process finds the same."""
_MAX_NOT_WORTH = 64
_SAME_LATENESS_DIGITS = 3


def _loosen_if_beneficial(outcome: PlanOutcome) -> ClockPlan:
    plan, view = outcome.plan, outcome.view
    key = (plan, view.baseline, view.target, round(outcome.late_s / outcome.target_s, _SAME_LATENESS_DIGITS))
    if key in _not_worth_loosening:
        return plan
    candidate = _adjust_caution(outcome)
    assert plan.predicted is not None
    max_energy_j = (1 - TUNING.min_loosening_gain_ratio) * plan.predicted.energy_j
    if candidate.predicted is not None and candidate.predicted.energy_j < max_energy_j:
        return candidate
    _not_worth_loosening[key] = None
    if len(_not_worth_loosening) > _MAX_NOT_WORTH:
        del _not_worth_loosening[next(iter(_not_worth_loosening))]
    return plan


CORRECTIONS: tuple[tuple[Callable[[PlanOutcome], bool], Callable[[PlanOutcome], ClockPlan]], ...] = (
    (lambda outcome: outcome.has_new_target, _replan_for_target),
    (lambda outcome: outcome.is_learning and outcome.is_in_force and outcome.is_too_new_to_learn, _keep),
    (lambda outcome: outcome.is_learning and outcome.is_in_force, _learn),
    (lambda outcome: outcome.is_too_new, _keep),
    (lambda outcome: outcome.is_unmeasured, _resume),
    (lambda outcome: outcome.is_as_planned, _keep),
    (lambda outcome: outcome.has_new_latency, _replan_for_latency),
    (lambda outcome: outcome.must_change, _adjust_caution),
    (lambda outcome: outcome.is_fast, _loosen_if_beneficial),
)
"""Conditions and actions, in order of precedence. One always holds: a plan in force without any of the causes for
change is as planned."""
