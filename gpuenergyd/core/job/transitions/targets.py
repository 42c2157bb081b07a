"""Transitions of targets: of the job itself, a straggler, the host's power budget, and operators."""

from dataclasses import replace

from gpuenergyd.core.job.messages import (
    JobPhase,
    OperatorOrdered,
    PowerCutChanged,
    PowerTargetChanged,
    StragglerChanged,
    TargetChanged,
)
from gpuenergyd.core.job.state import Commands, JobState
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.target import PerformanceTarget


def changed(job: JobState, event: TargetChanged) -> Commands:
    """Replace the job's own target; the guard uses the current plan's target until the policy answers."""
    job.target = replace(
        event.target, straggler_time_s=job.target.straggler_time_s, power_time_s=job.target.power_time_s
    )
    return ()


def straggler_changed(job: JobState, event: StragglerChanged) -> Commands:
    """Follow the pace of the slowest replica: ask for a plan at once, and meet a shorter target until it arrives."""
    job.notice(event.reason)
    return _replace_target(job, replace(job.target, straggler_time_s=event.straggler_time_s))


def _replace_target(job: JobState, target: PerformanceTarget) -> Commands:
    """Ask for a plan for another target at once, and meet a shorter target until it arrives."""
    before, job.target = job.target, target
    if job.phase is not JobPhase.TUNED or job.baseline is None:
        return ()
    target_s = target.iteration_time_s(job.baseline.iteration_time_s)
    is_shorter = target_s < before.iteration_time_s(job.baseline.iteration_time_s)
    return (*(job.control.speed_up(target, target_s) if is_shorter else ()), *job.ask())


def power_target_changed(job: JobState, event: PowerTargetChanged) -> Commands:
    """Follow the host's power budget: ask for a plan at once; until it arrives, the backstop limits the power."""
    if (event.power_time_s is None) != (job.target.power_time_s is None):
        job.notice(event.reason)
    job.target = replace(job.target, power_time_s=event.power_time_s)
    return job.ask() if job.phase is JobPhase.TUNED and not job.control.is_checking_full_speed else ()


def power_cut_changed(job: JobState, event: PowerCutChanged) -> Commands:
    job.reports.cut.change(is_cut=event.is_cut, last_reported=job.reports.last_index)
    return ()


def operator_ordered(job: JobState, event: OperatorOrdered) -> Commands:
    """Follow an operator at once; what an operator does not order is as registered."""
    was_paused, before = job.is_paused, job.description
    job.orders = event.orders
    job.description = job.ranks.description = event.orders.applied_to(before, job.as_registered)
    job.notice(event.reason)
    is_planned_anew = job.description.policy != before.policy
    registered, target = job.description.target, job.target
    if registered != before.target:
        target = replace(registered, straggler_time_s=target.straggler_time_s, power_time_s=target.power_time_s)
    if job.baseline is None and job.phase is not JobPhase.PAUSED:
        job.target = target
        return ()
    begun = _begin_with_policy(job, event.reason) if is_planned_anew else ()
    if not (job.is_paused or was_paused or is_planned_anew):
        return _replace_target(job, target) if target != job.target else ()
    job.target = target
    if job.is_paused:
        return (*begun, *(job.fall_back(event.reason) if job.phase is not JobPhase.PAUSED else ()))
    if job.phase is JobPhase.PAUSED:
        return (*begun, *_resume(job, event.reason))
    return (*begun, *job.enter(JobPhase.TRIAL, event.reason), *job.ask()) if is_planned_anew else ()


def _begin_with_policy(job: JobState, reason: str) -> Commands:
    """Return to full speed and drop the previous policy's measurements; the new policy starts from the baseline."""
    stop = job.control.fall_back(reason, job.faults)
    if (before := job.estimate()) is not None and before.saving is not None:
        job.knowledge.estimate_before = before
    purposes = job.knowledge.plans.purposes()
    job.knowledge.begin_anew(lambda o: purposes.get(o.plan_id) is PlanPurpose.BASELINE)
    job.knowledge.past_jobs, job.knowledge.curves_before, job.advice = (), None, ()
    job.faults.redeem()
    job.faults.begin_anew()
    job.control.has_changed()
    return stop


def _resume(job: JobState, reason: str) -> Commands:
    """Measure full speed again and plan; what was measured before the pause is kept if full speed is unchanged."""
    job.faults.allow_retry(job.reports.last_index + 1)
    return job.enter(JobPhase.FALLBACK, reason)
