"""Review of the current tuned plan after each iteration: by the guard, by the time account, against full speed.

If the plan passes, a block at full speed follows when it is time for one, otherwise the policy is asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuenergyd.core.job.control.faults import Faults
from gpuenergyd.core.job.control.plan_control import PlanControl
from gpuenergyd.core.job.guard import Finding, evaluate, passed_ratios, what_changed
from gpuenergyd.core.job.messages import Command, RecordIteration
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget

_FASTER_CHECK_DISTANCE = 16
"""Minimum iterations between two checks of (or returns to) full speed when a job is faster than expected; doubles
with each further one."""
_MAX_DOUBLINGS = 6


@dataclass(frozen=True, slots=True)
class Review:
    """Result of a review: commands, or a return to full speed; `reason` is empty if there is nothing to report."""

    commands: tuple[Command, ...] = ()
    reason: str = ""
    falls_back: bool = False
    is_fault: bool = False


def review(
    control: PlanControl,
    record: RecordIteration,
    baseline: BaselineView | None,
    target: PerformanceTarget,
    faults: Faults,
) -> Review:
    """Review the current plan after an iteration; clear the faults once it has lasted long enough."""
    control.blocks.num_tuned_iterations += record.purpose is PlanPurpose.TUNED
    if change := _change_of_full_speed(control):
        return Review(reason=change, falls_back=True)
    finding = None if baseline is None else _finding(control, baseline, target, faults)
    if finding is not None and (found := _after_finding(control, *finding, target, faults)) is not None:
        return found
    if baseline is not None and (reason := _unpaid_reason(control, baseline, target)):
        return Review(reason=reason, falls_back=True)
    if control.is_checking_full_speed:  # a new plan now would spoil the measurement of the block
        return Review()
    return Review(control.prove(target) or control.ask(target, baseline))


def _after_finding(
    control: PlanControl, finding: Finding, reason: str, target: PerformanceTarget, faults: Faults
) -> Review | None:
    if finding is Finding.JOB_IS_FASTER and control.rules.proof_iterations:
        block = _check_full_speed(control, reason, target)
        return Review(block, reason) if block else None
    is_slow = finding in {Finding.TOO_SLOW, Finding.FULL_SPEED_IS_FASTER}
    if not is_slow and not _may_return_to_full_speed(control):
        return None
    is_fault = finding is Finding.TOO_SLOW
    if is_fault:
        faults.find_slow(control.current.plan_id)
    return Review(reason=reason, falls_back=True, is_fault=is_fault)


def _unpaid_reason(control: PlanControl, baseline: BaselineView, target: PerformanceTarget) -> str:
    """Return why the account can no longer pay for the current plan; empty if it can, or if power limits the target."""
    experiments, plan = control.experiments, control.current
    is_in_force = control.has_lease and experiments.ends_at is None and not target.is_power_limited
    evaluated_for, since = control.evaluated_for(target), control.guard.since
    unpaid_s = experiments.unpaid_s(plan, baseline, evaluated_for, since) if is_in_force else None
    if unpaid_s is None:
        return ""
    account = experiments.account
    spent = f"{account.cost_s:.2g} of {account.income_s:.2g} s are spent, and the plan could cost {unpaid_s:.2g} s more"
    experiments.wait_to_resume(plan, baseline, target)
    return f"at full speed until the time account has recovered: {spent}"


def _check_full_speed(control: PlanControl, reason: str, target: PerformanceTarget) -> tuple[Command, ...]:
    """Run a full-speed block and then the current plan again, because the job is faster than expected.

    The block keeps the baseline current. Under one plan, each further block waits twice as long. A block that is
    about to begin anyway is used instead.
    """
    guard, plans, last = control.guard, control.knowledge.plans, control.reports.last_index
    is_soon = last < control.block_at
    if last < guard.next_faster_check_at or target.fills_time or not control.has_lease:
        return ()
    if not is_soon and last < plans.last_apply_at:
        return ()
    control.question.outdate()  # the answer would rely on the full speed that is being checked
    sent = () if is_soon else control.proof_block(reason)
    guard.checked_from = control.block_at
    guard.since = plans.last_apply_at
    guard.next_faster_check_at = guard.since + _FASTER_CHECK_DISTANCE * 2**guard.num_faster_checks
    guard.num_faster_checks += 1
    if sent:
        control.blocks.begin_proof()
    return sent


def _may_return_to_full_speed(control: PlanControl) -> bool:
    """Return whether a job that is faster than expected may go back to full speed now, and count the return.

    Such a return is not a fault. On a noisy host it may be due to chance, so each further return waits twice as
    long until the job changes.
    """
    guard, last = control.guard, control.reports.last_index
    if last < guard.next_faster_return_at:
        return False
    guard.next_faster_return_at = last + _FASTER_CHECK_DISTANCE * 2 ** min(guard.num_faster_returns, _MAX_DOUBLINGS)
    guard.num_faster_returns += 1
    return True


def _change_of_full_speed(control: PlanControl) -> str | None:
    """Return how full speed has changed, once the block that checks it has ended; None before that, or if unchanged.

    Across hosts a block may begin later than the first possible iteration.
    """
    since = control.guard.checked_from
    if since is None or control.reports.last_index < control.guard.since:
        return None
    full_speed = control.knowledge.full_speed()
    before = [o for o in full_speed if o.iteration_index < since]
    now = [o for o in full_speed if o.iteration_index >= since]
    if not now or control.knowledge.iterations.kept[-1] is now[-1]:
        return None
    control.guard.checked_from = None
    return what_changed(before, now, at_least_ratio=control.rules.job_changed_ratio)


def _finding(
    control: PlanControl, baseline: BaselineView, target: PerformanceTarget, faults: Faults
) -> tuple[Finding, str] | None:
    """Return the guard's finding about the current tuned plan, if any; clear the faults once the plan has lasted.

    Rules without a guard produce no finding.
    """
    if control.current.purpose is not PlanPurpose.TUNED:
        return None
    kept, targets_s = control.knowledge.iterations, control.knowledge.plans.target_when_made_s
    recent = kept.regular_under(control.current.plan_id, since=control.guard.since)
    finding = None
    if control.rules.is_guarding:
        finding = evaluate(
            recent,
            replace(control.current, predicted=None) if control.guard.num_faster_checks else control.current,
            baseline,
            control.evaluated_for(target),
            control.rules.guard,
            before=_under_plans_before(control),
            passed=passed_ratios(kept.kept, targets_s, control.rules.guard),
            at_full_speed=control.knowledge.full_speed(),
        )
    if finding is None and len(recent) >= control.rules.redeeming_iterations:
        faults.redeem()
    if finding is not None and finding[0] is Finding.TOO_SLOW:
        made_for_s = targets_s.get(control.current.plan_id)
        is_same_target = control.guard.target == control.guard.plan_target
        if made_for_s is not None and is_same_target and _meets(control, made_for_s, recent, baseline):
            full_speed = f"{baseline.iteration_time_s:.4g} s per iteration"
            why = f"full speed is faster, {full_speed}, than when plan {control.current.plan_id!r} was made"
            return Finding.FULL_SPEED_IS_FASTER, why
    return finding


def _under_plans_before(control: PlanControl) -> list[IterationObservation]:
    """Return the newest regular iterations under tuned plans made for the same target just before the current plan."""
    plans, purposes = control.knowledge.plans, control.knowledge.plans.purposes()
    found: list[IterationObservation] = []
    target_s = plans.target_when_made_s.get(control.current.plan_id)
    for observation in reversed(control.knowledge.iterations.kept):
        plan_id = observation.plan_id
        if plan_id == control.current.plan_id and not found:
            continue
        is_alike = plan_id is not None and plans.target_when_made_s.get(plan_id) == target_s
        is_tuned = purposes.get(plan_id) is PlanPurpose.TUNED
        if not is_tuned or not is_alike or len(found) == max(control.rules.guard.windows):
            break
        if observation.is_regular:
            found.append(observation)
    return found[::-1]


def _meets(
    control: PlanControl, target_s: float, recent: Sequence[IterationObservation], baseline: BaselineView
) -> bool:
    target = PerformanceTarget(permitted_time_s=target_s)
    finding = evaluate(recent, control.current, baseline, target, control.rules.guard)
    return finding is None or finding[0] is not Finding.TOO_SLOW
