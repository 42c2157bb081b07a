"""How a job handles an iteration: complete it from the ranks' reports, record it with its energy, act by phase.

Handling an iteration of a tuned job returns here from other files of `core/job` five times, which a test checks: with
the whole iteration, its record, the account, the review of the current plan, and the policy's answer (`plans`).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from gpuenergyd.core.job.control.recovery import recover
from gpuenergyd.core.job.control.review import review
from gpuenergyd.core.job.issued_plans import ITERATIONS_AHEAD
from gpuenergyd.core.job.measurements.rank_reports import WholeIteration
from gpuenergyd.core.job.measurements.savings import baseline_view
from gpuenergyd.core.job.messages import (
    IterationObserved,
    JobPhase,
    MergedIterationObserved,
    ObserveIteration,
    OrdersRefused,
    RankReported,
    RecordIteration,
    RecordNotice,
    RecordPhase,
    StoreOrderRefusal,
)
from gpuenergyd.core.job.state import Commands, JobState
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.count_text import count_text

_PAUSED = "paused by an operator"


def reported(job: JobState, event: RankReported) -> Commands:
    """Add a rank's report; the last one completes the iteration, whose energy is then observed."""
    report = event.report
    if job.ranks.schedule is None:
        return ()
    refused = orders_refused(job, OrdersRefused(report.reorder_refusal)) if report.reorder_refusal else ()
    whole = job.reports.assemble(report, job.ranks, job.knowledge, job.account, counts_from=job.control.mixed_before)
    if whole is None:
        return refused
    observe = ObserveIteration(whole.ranks, whole.plan_id, whole.is_regular)
    return (*refused, observe, *_disturbed(job, whole))


def orders_refused(job: JobState, event: OrdersRefused) -> Commands:
    """Forbid other orders of instructions, for this run and later runs of the job."""
    if not job.knowledge.reordering.bar(event.reason) or event.is_remembered:
        return ()
    job.notice(event.reason)
    return (RecordNotice(event.reason), StoreOrderRefusal(event.reason))


def _disturbed(job: JobState, whole: WholeIteration) -> Commands:
    """Record why an iteration is excluded; fall back if the ranks run another order than the planned one."""
    if whole.is_in_order and whole.pause_s is None:
        return ()
    is_planned_for = job.phase in {JobPhase.TRIAL, JobPhase.TUNED} and job.current_plan.ranks
    num_foreign = job.reports.num_foreign_orders
    if not whole.is_in_order and is_planned_for and num_foreign >= job.rules.foreign_orders:
        what = f"{count_text(num_foreign, 'iteration')} in a row"
        return job.fall_back(f"{what} ran other instructions, or in another order, than were registered")
    kind, reason = whole.disturbance
    is_new = job.notices.add_rarely(kind, reason, job.num_iterations, every=job.rules.notice_every)
    return (RecordNotice(reason),) if is_new else ()


def merged_observed(job: JobState, event: MergedIterationObserved) -> Commands:
    """Observe an iteration of a pipeline across hosts, whose ranks report to their own daemons."""
    if job.ranks.schedule is None:
        return ()
    observation, epoch = event.observation, event.plan_epoch
    delay = job.knowledge.plans.pop_delay(epoch, observation.iteration_index)
    if delay is not None:
        job.reports.record_run_ahead(delay - ITERATIONS_AHEAD)
    is_warm, plan_id = job.reports.count(observation.iteration_index), job.knowledge.plans.id_of(epoch)
    is_counted = plan_id is not None and is_warm and observation.iteration_index >= job.control.mixed_before
    is_regular = observation.is_regular and is_counted
    observation = replace(observation, plan_id=plan_id, is_regular=is_regular)
    return observed(job, IterationObserved(observation, least_other_overhead_s=event.least_other_overhead_s))


def observed(job: JobState, event: IterationObserved) -> Commands:
    """Record an iteration, charge it to the account, and continue according to the phase."""
    record = recorded(job, event)
    ended = job.control.observed(record, job.baseline, job.target)
    after = _AFTER_ITERATION.get(job.phase)
    return (record, *ended, *(after(job, record) if after is not None else ()))


def recorded(job: JobState, event: IterationObserved) -> RecordIteration:
    """Add an iteration to the measurements; return the command that records it."""
    return job.knowledge.record(event, job.ranks, job.target, job.baseline)


def _after_warmup_iteration(job: JobState, record: RecordIteration) -> Commands:
    return job.enter(JobPhase.BASELINE, "warm") if record.observation.is_regular else ()


def _after_baseline_iteration(job: JobState, _record: RecordIteration) -> Commands:
    full_speed = job.knowledge.full_speed()
    if len(full_speed) < job.rules.baseline_iterations or job.ranks.changed_ranks:
        return ()
    job.baseline = baseline_view(full_speed)
    return job.enter(JobPhase.PAUSED, _PAUSED) if job.is_paused else job.ask()


def _after_trial_iteration(job: JobState, record: RecordIteration) -> Commands:
    if job.control.experiments.is_waiting(job.target):
        _measure_baseline(job, record)
    return job.ask()


def _after_tuned_iteration(job: JobState, record: RecordIteration) -> Commands:
    _measure_baseline(job, record)
    found = review(job.control, record, job.baseline, job.target, job.faults)
    if found.falls_back:
        return job.fall_back(found.reason, is_fault=found.is_fault)
    if not found.reason:
        return found.commands
    job.notice(found.reason)
    return (*found.commands, RecordNotice(found.reason))


def _after_fallback_iteration(job: JobState, record: RecordIteration) -> Commands:
    is_waiting = job.control.experiments.is_waiting(job.target)
    if is_waiting or not job.faults.is_retry_due(record.observation.iteration_index):
        return ()
    if job.baseline is None:
        return _after_baseline_iteration(job, record)
    target = job.control.evaluated_for(job.target)
    recovery = recover(job.knowledge, job.faults, job.rules, job.baseline, target)
    if recovery is None:
        return ()
    job.baseline = recovery.baseline
    if recovery.reason is None:
        return job.ask()
    job.control.has_changed()
    job.phase_reason = recovery.reason
    job.notice(recovery.reason)
    return (RecordPhase(job.phase, recovery.reason), *job.ask())


def _measure_baseline(job: JobState, record: RecordIteration) -> None:
    """Update the baseline after an iteration at full speed."""
    if record.purpose is PlanPurpose.BASELINE and (full_speed := job.knowledge.full_speed()):
        job.baseline = baseline_view(full_speed)


_AFTER_ITERATION: Mapping[JobPhase, Callable[[JobState, RecordIteration], Commands]] = {
    JobPhase.WARMUP: _after_warmup_iteration,
    JobPhase.BASELINE: _after_baseline_iteration,
    JobPhase.TRIAL: _after_trial_iteration,
    JobPhase.TUNED: _after_tuned_iteration,
    JobPhase.FALLBACK: _after_fallback_iteration,
}
"""Handler of an iteration for each phase; other phases need none."""
