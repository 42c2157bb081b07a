"""Decides what follows each iteration of a job: an ordered table of conditions and actions, the first that holds.

All is decided from the view alone, so that a restarted policy host continues where the last one stopped.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPurpose, baseline_plan
from gpuenergyd.core.policy_api.policy import JobView
from gpuenergyd.count_text import count_text
from gpuenergyd_policies.bubble_aware.model import FittedJob
from gpuenergyd_policies.bubble_aware.order_choice import SplitShares, plan_in_order
from gpuenergyd_policies.bubble_aware.outcome import PlanOutcome
from gpuenergyd_policies.bubble_aware.planning import refusal_in_force, tuned_plan
from gpuenergyd_policies.bubble_aware.reordering import OtherOrder
from gpuenergyd_policies.bubble_aware.slowdown_advice import may_measure_slower, slower_plan
from gpuenergyd_policies.bubble_aware.tuning import TUNING
from gpuenergyd_policies.full_speed import reason_for_full_speed
from gpuenergyd_policies.learning.seen import NotEnoughDataError
from gpuenergyd_policies.predicted_savings import cheapest_clocks, predicted_plan
from gpuenergyd_policies.setting_plans import plan_without_slowdown
from gpuenergyd_policies.setting_search import WORTHWHILE_RATIO


class Situation:
    """A job after an iteration, as conditions and actions see it; each part is computed once, when it is asked for."""

    def __init__(self, view: JobView) -> None:
        self.view = view
        self.tuned = [plan for plan in view.issued_plans if plan.purpose is PlanPurpose.TUNED]

    @property
    def last(self) -> ClockPlan:
        """The newest plan; before any, full speed for GPUs without a choice of clocks."""
        none = baseline_plan(reason="a GPU of this job has a single clock")
        return self.view.issued_plans[-1] if self.view.issued_plans else none

    @cached_property
    def refusal(self) -> ClockPlan | None:
        """The newest plan, if it refuses to plan and it is too early to try again."""
        return refusal_in_force(self.view)

    @cached_property
    def reason_for_full_speed(self) -> str | None:
        """Why this job is not worth planning, or cannot be."""
        return reason_for_full_speed(self.view)

    @cached_property
    def plain(self) -> ClockPlan:
        """The newest tuned plan in the schedule's own order, if there is any."""
        return next((plan for plan in reversed(self.tuned) if not plan.orders), self.tuned[-1])

    @cached_property
    def outcome(self) -> PlanOutcome:
        """The plan that may be corrected, with its iterations: the newest one, in whatever order."""
        has_order = self.last.orders and self.last.purpose is PlanPurpose.TUNED
        return PlanOutcome.of(self.view, self.last if has_order else self.plain)

    @cached_property
    def order(self) -> OtherOrder:
        """The steps towards another order of instructions than the schedule's own, and back."""
        return OtherOrder(self.view, self.plain)

    @property
    def has_order(self) -> bool:
        """Whether the newest plan has an order of its own: a trial, or a tuned plan."""
        return bool(self.last.orders)

    @property
    def is_trial(self) -> bool:
        """Whether the newest plan is the trial of another order."""
        return self.has_order and self.last.purpose is PlanPurpose.TRIAL

    @cached_property
    def slower(self) -> ClockPlan | None:
        """A plan to measure what more slowdown would save, where that is wanted and can be paid."""
        return slower_plan(self.outcome) if may_measure_slower(self.view) else None

    @property
    def is_slower_trial(self) -> bool:
        """Whether the newest plan measures what more slowdown would save."""
        return self.last.purpose is PlanPurpose.TRIAL and not self.has_order

    @property
    def is_slower_trial_short(self) -> bool:
        """Whether it has run for few iterations."""
        ran = sum(o.plan_id == self.last.plan_id for o in self.view.observations)
        return self.is_slower_trial and ran < TUNING.min_iterations_to_learn

    @cached_property
    def looser(self) -> ClockPlan | None:
        """A plan with less caution, where the newest one is early and the looser one saves clearly more."""
        return _looser(self.outcome) if self.outcome.is_fast else None


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of the table: if the condition holds, the action gives the plan."""

    when: str
    """The condition as the documents state it, in terms of the newest plan unless it says otherwise."""
    holds: Callable[[Situation], bool]
    then: str
    """The action as the documents state it."""
    plan: Callable[[Situation], ClockPlan]


def decide(view: JobView) -> ClockPlan:
    """Return the plan that follows the newest iteration; the plan in force where nothing changes."""
    now = Situation(view)
    return next(decision.plan(now) for decision in DECISIONS if decision.holds(now))


def _learn(now: Situation) -> ClockPlan:
    outcome = now.outcome
    why = f"learned from {count_text(outcome.number - 1, 'plan')}; the last was {outcome.deviation}"
    return _learned_plan(now, outcome.number, why)


def _learned_plan(now: Situation, number: int, why: str) -> ClockPlan:
    """Return a plan to learn from, whatever order ran before."""
    return tuned_plan(FittedJob(now.view), caution_ratio=None, number=number, why=why)


def _replan_for_latency(now: Situation) -> ClockPlan:
    """Return a plan with new lead times and the same caution: late iterations may come from late clock changes."""
    outcome = now.outcome
    latency = f"switch latency {1000 * outcome.raise_latency_s:.3g} ms (assumed {1000 * outcome.assumed_latency_s:.3g})"
    return _replan(outcome, f"replanned: {outcome.deviation}; {latency}")


DECISIONS: tuple[Decision, ...] = (
    Decision(
        "a GPU of the job has a single clock",
        lambda now: min(len(gpu.supported_sm_clocks_mhz) for gpu in now.view.gpus) < 2,
        "keep the last plan, at first full speed",
        lambda now: now.last,
    ),
    Decision(
        "the daemon only observes",
        lambda now: not now.view.can_set_clocks,
        "predict what clocks would save",
        lambda now: predicted_plan(now.view, cheapest_clocks),
    ),
    Decision(
        "the job is a loop that computes all the time, and no slowdown is permitted",
        lambda now: now.reason_for_full_speed is not None,
        "full speed, or a common clock that costs no time",
        lambda now: plan_without_slowdown(now.view, now.reason_for_full_speed or ""),
    ),
    Decision(
        "planning was refused, and the job has not run twice as long since",
        lambda now: now.refusal is not None,
        "full speed",
        lambda now: now.last,
    ),
    Decision(
        "there was no plan yet",
        lambda now: not now.tuned,
        "plan from the prior and the baseline",
        lambda now: _learned_plan(now, 1, "first plan, from the prior and the baseline"),
    ),
    Decision(
        "it measures what more slowdown would save, for fewer than"
        f" {count_text(TUNING.min_iterations_to_learn, 'iteration')}",
        lambda now: now.is_slower_trial_short,
        "keep it",
        lambda now: now.last,
    ),
    Decision(
        "it has measured what more slowdown would save",
        lambda now: now.is_slower_trial,
        "return to the plan before",
        lambda now: now.plain,
    ),
    Decision(
        "it has another order, and a rank refuses or does not run it, memory is tight, or split backwards are slow",
        lambda now: now.has_order and bool(now.order.reason_to_end(now.last)),
        "return to the plan in 1F1B",
        lambda now: now.order.ended(now.last),
    ),
    Decision(
        "it is a trial of split backwards, with fewer than"
        f" {count_text(TUNING.min_iterations_to_evaluate, 'measured iteration')}",
        lambda now: now.is_trial and now.order.is_trial_short(now.last),
        "keep it",
        lambda now: now.last,
    ),
    Decision(
        "it is a trial of split backwards",
        lambda now: now.is_trial,
        f"plan order and clocks together, if that saves {100 * TUNING.least_gain_of_order:g} % more than 1F1B",
        lambda now: now.order.after_trial(now.last),
    ),
    Decision(
        "the target has moved: another permitted slowdown, a straggler, a power budget",
        lambda now: now.outcome.has_new_target,
        "plan for the new target",
        lambda now: _replan(now.outcome, f"replanned: the target is {now.outcome.target_s:.4g} s now"),
    ),
    Decision(
        f"it is in force as one of the first {TUNING.num_learning_plans - 1}, with fewer than"
        f" {count_text(TUNING.min_iterations_to_learn, 'measured iteration')}, unless it is"
        f" {100 * TUNING.far_late_ratio:g} % late",
        lambda now: now.outcome.is_learning and now.outcome.is_in_force and now.outcome.is_too_new_to_learn,
        "keep it",
        lambda now: now.outcome.plan,
    ),
    Decision(
        "it is in force in a loop that permits less slowdown than is advised, and no slower plan was measured",
        lambda now: now.outcome.is_in_force and now.slower is not None,
        "measure a plan for the largest slowdown that is advised, if the time account can pay its worst case",
        lambda now: now.slower or now.outcome.plan,
    ),
    Decision(
        f"it is in force as one of the first {TUNING.num_learning_plans - 1}",
        lambda now: now.outcome.is_learning and now.outcome.is_in_force,
        "plan from the belief that its iterations have updated",
        _learn,
    ),
    Decision(
        f"it is in force, with fewer than {count_text(TUNING.min_iterations_to_evaluate, 'measured iteration')}",
        lambda now: now.outcome.is_too_new,
        "keep it",
        lambda now: now.outcome.plan,
    ),
    Decision(
        "the job is back at full speed, and no iteration of the plan was measured",
        lambda now: now.outcome.is_unmeasured,
        "plan again with the same caution",
        lambda now: _replan(now.outcome, "replanned after full speed"),
    ),
    Decision(
        "clocks change clearly faster or slower than planned",
        lambda now: now.outcome.has_new_latency,
        "plan again with new lead times and the same caution",
        _replan_for_latency,
    ),
    Decision(
        "it is late, or the job is back at full speed",
        lambda now: now.outcome.is_slow or not now.outcome.is_in_force,
        f"plan with more caution, in proportion; beyond {100 * TUNING.outlier_ratio:g} %, a passing disturbance,"
        " with hardly more",
        lambda now: _with_adjusted_caution(now.outcome),
    ),
    Decision(
        f"it is early, and less caution saves at least {100 * WORTHWHILE_RATIO:g} % more",
        lambda now: now.looser is not None,
        "plan with less caution",
        lambda now: now.looser or now.outcome.plan,
    ),
    Decision(
        "it is in 1F1B and has settled, and another order has not been considered",
        lambda now: not now.has_order and now.order.is_to_be_considered,
        "keep it, and compute what another order would save",
        lambda now: now.order.considered(),
    ),
    Decision(
        "it is in 1F1B and has settled, and another order may be tried",
        lambda now: not now.has_order and now.order.is_trial_due,
        "measure split backwards at full speed, if they are permitted and there is memory",
        lambda now: now.order.trial_or_refusal(),
    ),
    Decision("otherwise", lambda _: True, "keep it", lambda now: now.outcome.plan),
)


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
    return replace(chosen, order_advice=None)


def _with_adjusted_caution(outcome: PlanOutcome) -> ClockPlan:
    late_ratio = outcome.late_s / outcome.target_s
    is_outlier = outcome.late_s >= TUNING.outlier_ratio * outcome.target_s
    extra_ratio = TUNING.outlier_caution_ratio if is_outlier else TUNING.caution_gain * late_ratio
    return _replan(outcome, f"replanned: {outcome.deviation}", caution_ratio=outcome.caution_ratio + extra_ratio)


_not_worth_loosening: deque[tuple[object, ...]] = deque(maxlen=64)
"""Plans whose looser successor saves hardly more, with what that was computed from: nothing is computed again at each
iteration while its lateness is the same to a thousandth. Only for speed: another process finds the same."""


def _looser(outcome: PlanOutcome) -> ClockPlan | None:
    """Return a plan with less caution; None if it saves hardly more."""
    plan, view = outcome.plan, outcome.view
    key = (plan, view.baseline, view.target, round(outcome.late_s / outcome.target_s, 3))
    if key in _not_worth_loosening:
        return None
    candidate = _with_adjusted_caution(outcome)
    assert plan.predicted is not None
    max_energy_j = (1 - WORTHWHILE_RATIO) * plan.predicted.energy_j
    if candidate.predicted is not None and candidate.predicted.energy_j < max_energy_j:
        return candidate
    _not_worth_loosening.append(key)
    return None
