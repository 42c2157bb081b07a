"""Transitions of plans: the policy's answer is followed or refused, or the job returns to full speed."""

from dataclasses import replace

from gpuenergyd.core.job.control.answer import answer
from gpuenergyd.core.job.messages import (
    ControlLost,
    JobPhase,
    PastJobsFound,
    PlanDecided,
    PolicyFailed,
    RecordNotice,
    ReplicaBlockBegins,
    StoreCurves,
    TrialPermissionChanged,
)
from gpuenergyd.core.job.state import Commands, JobState
from gpuenergyd.core.pipeline.learned_curves import problem_of_curves
from gpuenergyd.core.pipeline.reorder import OrderAdvice

_BEFORE_PLANS = frozenset({JobPhase.JOINING, JobPhase.WARMUP, JobPhase.BASELINE})


def decided(job: JobState, event: PlanDecided) -> Commands:
    """Follow a policy's plan, unless it is outdated or refused; keep the curves and the advice that come with it."""
    learned, plan = event.plan.learned, event.plan
    if learned is not None:
        plan = replace(plan, learned=None)
    found = answer(job.control, plan, job.phase, job.baseline, job.target, policy=job.description.policy)
    if found is None:
        return ()
    job.advice = plan.advice or job.advice
    stored: Commands = ()
    if learned is not None and problem_of_curves(learned) is None:  # others come from a broken sensor or policy
        job.knowledge.learned = learned
        stored = (StoreCurves(learned),)
    if found.falls_back:
        return (*stored, *job.fall_back(found.reason, is_fault=found.is_fault, least_wait=found.least_wait))
    advised = _record_order_advice(job, plan.order_advice) if found.is_followed else ()
    entered = job.enter(found.phase, found.reason) if found.phase is not None else ()
    return (*stored, *advised, *found.commands, *entered, *(job.ask() if found.is_asked_again else ()))


def _record_order_advice(job: JobState, advice: OrderAdvice | None) -> Commands:
    """Keep the policy's advice about the instruction order, and record it as a notice if it is new."""
    before = job.knowledge.reordering.advice
    if advice is None or advice == before:
        return ()
    job.knowledge.reordering.advice = advice
    if before is not None and before.text == advice.text:
        return ()
    job.notice(advice.text)
    return (RecordNotice(advice.text, advice),)


def policy_failed(job: JobState, event: PolicyFailed) -> Commands:
    reason = f"policy {job.description.policy} failed: {event.reason}"
    return job.fall_back(reason, is_fault=True) if job.control.question.accept_answer() else ()


def past_jobs_found(job: JobState, event: PastJobsFound) -> Commands:
    job.knowledge.past_jobs = event.jobs if job.phase in _BEFORE_PLANS else ()
    return ()


def control_lost(job: JobState, event: ControlLost) -> Commands:
    return job.fall_back(event.reason, is_fault=True)


def trial_permission_changed(job: JobState, event: TrialPermissionChanged) -> Commands:
    """End trials that are no longer permitted; a later trial is refused when the policy returns it."""
    job.control.experiments.refusal = refusal = event.refusal
    if refusal is None or job.phase is not JobPhase.TRIAL or job.current_plan.orders:
        return ()
    return job.fall_back(refusal, least_wait=job.rules.refused_trial_iterations)


def replica_block_begins(job: JobState, event: ReplicaBlockBegins) -> Commands:
    if job.phase is not JobPhase.TUNED or job.control.is_checking_full_speed:
        return ()
    return job.control.join_block(event.apply_at_iteration, job.target)
