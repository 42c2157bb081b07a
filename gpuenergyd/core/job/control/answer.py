"""The job's reaction to a plan from the policy: send, keep, refuse, or wait until the time account can pay for it."""

from dataclasses import dataclass
from typing import assert_never

from gpuenergyd.core.job.control.plan_control import PlanControl
from gpuenergyd.core.job.messages import Command, JobPhase
from gpuenergyd.core.pipeline.plan import TRIALS, ClockPlan, PlanPurpose, check_plan
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.errors import GpuEnergyError


@dataclass(frozen=True, slots=True)
class Answer:
    """Reaction to a plan from the policy: commands and a phase, or a return to full speed."""

    reason: str
    commands: tuple[Command, ...] = ()
    phase: JobPhase | None = None
    """The next phase; None keeps the present one."""
    is_followed: bool = False
    is_asked_again: bool = False
    """Whether the straggler's or power budget's pace has changed since the policy was asked."""
    falls_back: bool = False
    is_fault: bool = False
    least_wait: int = 0
    """Minimum number of iterations at full speed before the policy is asked again."""


def answer(
    control: PlanControl,
    plan: ClockPlan,
    phase: JobPhase,
    baseline: BaselineView | None,
    target: PerformanceTarget,
    *,
    policy: str,
) -> Answer | None:
    """Follow a plan from the policy unless it is refused; None if the answer is outdated."""
    if not control.question.accept_answer():
        return None
    assert control.ranks.schedule is not None
    rules, ranks, experiments = control.rules, control.ranks, control.experiments
    is_slow = plan.purpose in TRIALS and not plan.orders  # other orders are tried at full speed
    if is_slow and experiments.refusal is not None:
        return Answer(experiments.refusal, falls_back=True, least_wait=rules.refused_trial_iterations)
    is_kept = plan.plan_id == control.current.plan_id and phase is not JobPhase.FALLBACK
    has_new_pace, next_phase = control.has_new_pace(target), _phase_under(plan, phase)
    if not (is_kept and has_new_pace):  # the answer to the new pace decides what a kept plan is compared with
        control.expect(control.question.target)
    was_relieved = control.blocks.end_relief()
    sent: tuple[Command, ...] = ()
    if not is_kept or was_relieved or not (experiments.ends_at is None or experiments.is_running):
        try:
            check_plan(
                plan,
                control.ranks.schedule,
                ranks.supported_sm_clocks_mhz,
                ranks.power_limit_ranges_w,
                ranks.power_profiles,
            )
        except GpuEnergyError as error:
            reason = f"policy {policy} returned an invalid plan: {error}"
            return Answer(reason, falls_back=True, is_fault=True)
        assert baseline is not None
        terms = experiments.terms(plan, baseline, target)
        if not terms.is_affordable:
            return _waiting(control, terms.cost_s, phase, target)
        sent = control.send_on(plan, terms) if is_kept else control.follow(plan, baseline, terms)
    is_asked_again = has_new_pace and next_phase is JobPhase.TUNED
    return Answer(plan.reason, sent, next_phase, is_followed=True, is_asked_again=is_asked_again)


def _waiting(control: PlanControl, cost_s: float, phase: JobPhase, target: PerformanceTarget) -> Answer:
    """Wait until the account can pay for an experiment: under the current plan if it continues, else at full speed."""
    control.experiments.wait_for(cost_s, target)
    if phase is JobPhase.TUNED and control.experiments.ends_at is None:
        return Answer("")
    reason = f"at full speed until the time account can pay the next experiment: {cost_s:.2g} s at most"
    return Answer(reason, phase=phase if phase is JobPhase.TUNED else JobPhase.TRIAL)


def _phase_under(plan: ClockPlan, phase: JobPhase) -> JobPhase:
    """Return the phase that a job enters with a plan; full-speed iterations between trials belong to the trials."""
    match plan.purpose:
        case PlanPurpose.TRIAL | PlanPurpose.PROFILE:
            return JobPhase.TRIAL
        case PlanPurpose.BASELINE if phase is JobPhase.TRIAL and plan.ranks:
            return JobPhase.TRIAL
        case PlanPurpose.TUNED | PlanPurpose.BASELINE | PlanPurpose.PREDICTED:
            return JobPhase.TUNED
        case _:
            assert_never(plan.purpose)
