"""Recovery after a fall-back: measures the baseline again, and decides whether learned values still hold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuenergyd.core.job.control.faults import Faults
from gpuenergyd.core.job.guard import Finding, evaluate, what_changed
from gpuenergyd.core.job.measurements.knowledge import JobKnowledge
from gpuenergyd.core.job.measurements.savings import baseline_view
from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget


@dataclass(frozen=True, slots=True)
class Recovery:
    """The new baseline, and why the policy starts over; None if the learned values still hold."""

    baseline: BaselineView
    reason: str | None = None


def recover(
    knowledge: JobKnowledge, faults: Faults, rules: JobRules, old_baseline: BaselineView, target: PerformanceTarget
) -> Recovery | None:
    """Return the job's recovery, None while its full speed is not stable; drop measurements that no longer hold.

    If full speed has changed, the job has changed, and only the shape of its curves is kept. If it has not but the
    profile is in doubt, all learned values are dropped. A slow plan is not a fault if full speed is as slow by now,
    because on a busy host iterations may take longer for a while at any clock.
    """
    since = faults.fell_back_at
    full_speed = knowledge.full_speed(since=since)
    if not full_speed:
        return None
    before = [o for o in knowledge.full_speed() if o.iteration_index < since]
    change = what_changed(before, full_speed, at_least_ratio=rules.job_changed_ratio)
    if change is None:
        if _was_host_slow(knowledge, faults, full_speed, rules, target):
            faults.excuse()
        faults.slow_plan_id = None
        return _drop_what_is_in_doubt(knowledge, faults, old_baseline)
    if not is_settled(full_speed, rules):
        return None
    faults.num_faults = 0
    _keep_estimate(knowledge, old_baseline, until=since)
    knowledge.changed_at = since
    knowledge.keep_curves()
    _begin_anew(knowledge, faults, lambda o: o.iteration_index >= since)
    return Recovery(baseline_view(full_speed), f"the job changed: {change}")


def _was_host_slow(
    knowledge: JobKnowledge,
    faults: Faults,
    full_speed: Sequence[IterationObservation],
    rules: JobRules,
    target: PerformanceTarget,
) -> bool:
    """Return whether the plan found too slow is acceptable when compared with full speed right after it."""
    plan = knowledge.plans.by_id(faults.slow_plan_id)
    if plan is None or len(full_speed) < rules.guard.windows[0]:
        return False
    recent = knowledge.iterations.regular_under(plan.plan_id)[-max(rules.guard.windows) :]
    finding = evaluate(recent, plan, baseline_view(full_speed), target, rules.guard)
    return finding is None or finding[0] is not Finding.TOO_SLOW


def is_settled(full_speed: Sequence[IterationObservation], rules: JobRules) -> bool:
    """Return whether a changed job is stable at full speed again, or has used up its iterations for settling.

    A plan made while a GPU is still heating up would soon be too slow.
    """
    recent = full_speed[-rules.fallback_iterations :]
    if len(full_speed) > rules.settling_iterations or len(recent) < rules.fallback_iterations:
        return len(recent) >= rules.fallback_iterations
    half = len(recent) // 2
    return what_changed(recent[:half], recent[-half:], at_least_ratio=rules.settled_ratio) is None


def _drop_what_is_in_doubt(knowledge: JobKnowledge, faults: Faults, old_baseline: BaselineView) -> Recovery:
    baseline = baseline_view(knowledge.full_speed())
    if not faults.is_profile_in_doubt:
        return Recovery(baseline)
    reason = faults.relearning_reason()
    purposes = knowledge.plans.purposes()
    knowledge.past_jobs, knowledge.curves_before = (), None
    _keep_estimate(knowledge, old_baseline, until=faults.fell_back_at)
    _begin_anew(knowledge, faults, lambda o: purposes.get(o.plan_id) is PlanPurpose.BASELINE)
    return Recovery(baseline, reason)


def _keep_estimate(knowledge: JobKnowledge, old_baseline: BaselineView, *, until: int) -> None:
    """Keep the saving estimate from before the fall-back until the saving is measured again."""
    before = knowledge.estimate(old_baseline, until=until)
    if before.saving is not None:
        knowledge.estimate_before = before


def _begin_anew(knowledge: JobKnowledge, faults: Faults, is_kept: Callable[[IterationObservation], bool]) -> None:
    knowledge.begin_anew(is_kept)
    faults.begin_anew()
