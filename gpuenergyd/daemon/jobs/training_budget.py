"""One slowdown budget for all replicas of a training: the host of the first replica decides, and the others follow.

Replicas end each iteration together. If each had its own hourly target, the training would be slow whenever any one of
them is, and only that one would save. So the first replica's target applies to all, and its account is charged with the
time that plans of the others cost. While the first replica does not report, the others run at full speed, because they
cannot know what is left of the budget. If its host decides no targets, all replicas keep the registered slowdown.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpuenergyd.core.distributed.stragglers import StragglerRules
from gpuenergyd.core.job.messages import JobPhase, TargetChanged
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.ports import IterationWatcher, RunningJob
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.messages import BudgetShare, TrainingBudget

_MAX_RATIO = 100.0
_MAX_S = 1e9
_MAX_REPLICAS = 2**20
_SAME_RATIO = 1e-6
_SAME_BASELINE_RATIO = 0.005
"""A smaller change of the baseline does not change the permitted time."""
_SAME_SLOWDOWN_RATIO = 5e-4
"""A smaller change of the slowdown is ignored, as the other baseline may cause it; a change to full speed is not."""
_NO_ACCOUNT = "constant slowdown: the host of the training's first replica decides no targets"
_SILENT = "full speed: the training's first replica, which decides for all, is silent"


@dataclass(slots=True)
class TrainingTarget:
    """The part of one replica's target that depends on the others; owned by the event loop of its daemon."""

    runner: RunningJob
    watcher: IterationWatcher | None
    """The carbon service; None if this host decides no targets."""
    is_exchanged: bool = False
    """Whether the replicas exchange budgets through the job's store."""
    _report: TrainingBudget | None = None
    _reported_at_mono_s: float = 0.0
    _followed: tuple[float | None, float | None] | None = None
    """Slowdown ratio followed now, None for the registered one, and the baseline that it refers to."""

    def handle(self, report: TrainingBudget | None) -> BudgetShare:
        """Follow the first replica, or charge its account, and return what to publish to the others.

        Raises:
            ProtocolError: a value is out of range.
        """
        if report is not None:
            _check(report)
            self.is_exchanged = True
            if report.num_replicas > 1:
                baseline = self.runner.job.baseline
                full_s = baseline.iteration_time_s if baseline is not None else 0.0
                is_heard = report.others_age_s <= StragglerRules().counts_for_s(full_s)
                account = self.runner.job.control.experiments.account
                account.hear(report.num_replicas, report.others_spent_s if is_heard else None)
            if report.is_first:
                self.charge_others(report.excess_s)
            else:
                self.follow(report)
        return self.share()

    def lead(self) -> None:
        """Stop following another replica, since this is now the first one."""
        if self._report is not None:
            self._report = self._followed = None
            if self.watcher is not None:
                self.watcher.follow(self.runner, None)

    def charge_others(self, excess_s: float) -> None:
        """Charge the first replica's account with the total time that the others' plans have cost."""
        if self.watcher is not None:
            self.watcher.charge_others(self.runner, excess_s)

    def follow(self, report: TrainingBudget) -> None:
        """Follow the slowdown that the first replica permits."""
        self._report, self._reported_at_mono_s = report, time.monotonic()
        self.check_time_limit()

    def check_time_limit(self) -> None:
        """Follow the last report, or go to full speed if the first replica no longer reports."""
        report, runner, watcher = self._report, self.runner, self.watcher
        if report is None or report.permitted_slowdown_ratio is None or runner.job.is_ended:
            return
        registered = runner.job.description.target
        baseline_s = runner.job.baseline.iteration_time_s if runner.job.baseline is not None else None
        ratio: float | None
        if not report.is_decided:
            if watcher is None:
                return
            ratio, target, reason = None, registered, _NO_ACCOUNT
        elif self._is_silent(report, baseline_s):
            ratio, target, reason = 0.0, PerformanceTarget(0.0), _SILENT
        else:
            ratio = report.permitted_slowdown_ratio
            target = _target(registered, ratio, baseline_s)
            reason = f"target of the training, decided by its first replica's host: {100 * ratio:.3g} % slower"
        if self._is_followed(ratio, baseline_s):
            return
        self._followed = ratio, baseline_s
        if watcher is not None:
            watcher.follow(runner, target, reason)
        elif target != runner.job.target.own:
            runner.handle(TargetChanged(target))

    def _is_silent(self, report: TrainingBudget, baseline_s: float | None) -> bool:
        age_s = report.age_s + time.monotonic() - self._reported_at_mono_s
        return age_s > StragglerRules().counts_for_s(baseline_s or 0.0)

    def _is_followed(self, ratio: float | None, baseline_s: float | None) -> bool:
        if self._followed is None:
            return False
        before, before_s = self._followed
        if not ratio or not before:
            return ratio == before
        if abs(ratio - before) > _SAME_SLOWDOWN_RATIO:
            return False
        if baseline_s is None:
            return True
        return before_s is not None and abs(baseline_s / before_s - 1) <= _SAME_BASELINE_RATIO

    def share(self) -> BudgetShare:
        """Return what the other replicas need to know about this one."""
        job = self.runner.job
        spent_s = round(job.control.experiments.account.spent_or_committed_s, 6)
        if self.watcher is None:
            return BudgetShare(job.description.target.max_slowdown_ratio, spent_s=spent_s)
        ratio = 0.0  # the baseline must not contain the effect of another replica's plan
        if job.baseline is not None:
            is_decided = job.phase is JobPhase.TUNED
            target = job.target.own if is_decided else job.description.target
            full_s = job.baseline.iteration_time_s
            ratio = max(0.0, target.iteration_time_s(full_s) / full_s - 1.0)
        excess_s = round(self.watcher.plan_excess_s(self.runner), 6)
        return BudgetShare(round(ratio, 6), is_decided=True, excess_s=excess_s, spent_s=spent_s)


def handle_budget(targets: Sequence[TrainingTarget], report: TrainingBudget | None) -> BudgetShare:
    """Let the replicas that a report covers follow the training's first one; return what to publish about them.

    If the first of them is the training's first replica, it decides for the others.

    Raises:
        ProtocolError: a value is out of range.
    """
    first, *others = targets
    if report is None or not others:
        return first.handle(report)
    excess_s = max((target.share().excess_s for target in others), default=0.0)
    if report.is_first:
        # All replicas end an iteration together, so only the slowest plan costs time.
        share = first.handle(replace(report, excess_s=report.excess_s + excess_s))
        report = TrainingBudget(False, share.permitted_slowdown_ratio, share.is_decided)
    else:
        share = first.handle(report)
        share = replace(share, excess_s=max(share.excess_s, excess_s))
    for target in others:
        target.handle(report)
    return share


def share_budget(targets: Sequence[TrainingTarget]) -> None:
    """Give all of a training's replicas on this daemon the first one's budget, unless they share it through a store.

    Call it after each iteration.
    """
    if not targets or any(target.is_exchanged for target in targets):
        return
    first, *others = targets
    first.lead()
    shares = [target.share() for target in others]
    first.charge_others(sum(share.excess_s for share in shares))
    share = first.share()
    for target in others:
        target.follow(TrainingBudget(False, share.permitted_slowdown_ratio, share.is_decided))


def _target(registered: PerformanceTarget, ratio: float, baseline_s: float | None) -> PerformanceTarget:
    """Return the target for a slowdown, as an iteration time if the baseline is known."""
    if ratio <= _SAME_RATIO:
        return PerformanceTarget(0.0)
    if abs(ratio - registered.max_slowdown_ratio) <= _SAME_RATIO:
        return registered
    if baseline_s is None:
        return PerformanceTarget(ratio)
    return replace(registered, permitted_time_s=baseline_s * (1.0 + ratio))


def _check(report: TrainingBudget) -> None:
    """Check a report, or raise ProtocolError."""
    limits = {
        "permitted_slowdown_ratio": _MAX_RATIO,
        "age_s": _MAX_S,
        "excess_s": _MAX_S,
        "num_replicas": _MAX_REPLICAS,
        "others_spent_s": _MAX_S,
        "others_age_s": _MAX_S,
    }
    for name, limit in limits.items():
        value = getattr(report, name)
        if value is not None and not (math.isfinite(value) and 0 <= value <= limit):
            raise ProtocolError(f"budget.{name} {value} must be in [0, {limit:g}]")
