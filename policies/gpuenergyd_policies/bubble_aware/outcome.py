"""What the measured iterations of a plan show: whether it is too new to be evaluated, late, or early."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from gpuenergyd.core.measurement.robust import MEDIAN_PER_MEAN_ERROR
from gpuenergyd.core.pipeline.plan import ClockChange, ClockPlan, PlanPurpose
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd_policies.bubble_aware.figures import Figure
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.planning.switching.requests import longest_lead_s
from gpuenergyd_policies.setting_search import WORTHWHILE_RATIO


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
        return self.plan.figure(Figure.CAUTION) or 0.0

    @property
    def has_new_target(self) -> bool:
        """Whether the target has moved since the plan was made: its times then do not show whether caution is right."""
        planned_ratio = self.plan.figure(Figure.TARGET)
        ratio = self.target_s / self.view.baseline.iteration_time_s
        return planned_ratio is not None and abs(ratio - planned_ratio) > WORTHWHILE_RATIO

    @property
    def is_too_new(self) -> bool:
        """Whether the plan has run for too few iterations to be evaluated."""
        return self.is_in_force and len(self.measured_s) < TUNING.min_iterations_to_evaluate

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
        """Whether the plan is so late that waiting for more of its iterations would cost more than they can show."""
        if not self.measured_s:
            return False
        return self.late_s > TUNING.far_late_ratio * self.target_s + 2 * self._noise_s

    @property
    def is_fast(self) -> bool:
        """Whether the plan leaves slack unused, beyond noise."""
        is_early = self.late_s < -self._patience * TUNING.loosen_below_ratio * self.target_s - self._noise_s
        return is_early and len(self.measured_s) >= TUNING.settled_iterations

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
        return MEDIAN_PER_MEAN_ERROR * self.view.baseline.iteration_sigma_s * math.sqrt(share)

    @property
    def _noise_s(self) -> float:
        return self.view.baseline.iteration_sigma_s / math.sqrt(len(self.measured_s))


def _differs(latency_s: float, assumed_s: float) -> bool:
    return abs(latency_s - assumed_s) > TUNING.new_latency_ratio * assumed_s


def raise_latency_s(view: JobView, changes: Sequence[Sequence[ClockChange]]) -> float:
    """Return the longest latency of a change to a faster clock that a plan makes; `changes[r]` are those of rank r."""
    return max(
        longest_lead_s(gpu.switch_latency, {change.sm_clock_mhz for change in own})
        for gpu, own in zip(view.gpus, changes, strict=True)
    )
