"""Iteration-time targets of jobs under a target policy, limited by their slowdown accounts.

The target policy proposes a target for each hour. Every proposal is checked against the job's account, so that full
speed for the rest of the window would still keep the budget, whatever a forecast or a plugin returns. Between
decisions, a job about to exceed its budget goes to full speed, and trials that cost too much are refused.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, IntensityBasis
from gpuenergyd.core.job.messages import JobPhase, TargetChanged, TrialPermissionChanged
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import TRIALS, PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetDecision
from gpuenergyd.daemon.ports import HistoryPort, RunningJob
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.processes.target_queries import EncodedSeries, TargetQuery, TargetReply
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.quantities.energy_use import NO_ENERGY, EnergyUse
from gpuenergyd.store.records import TargetRecord
from gpuenergyd_carbon.accounts import JobAccount, JobAccounts
from gpuenergyd_carbon.budget import (
    JobBudget,
    is_overdrawing,
    is_unaffordable,
    job_budget,
    settling_iterations,
    trial_refusal,
)
from gpuenergyd_carbon.feed import CarbonFeed
from gpuenergyd_carbon.job_views import (
    carbon_figures,
    carbon_of,
    host_power_w,
    target_figures,
    target_s,
    target_text,
    target_view,
)
from gpuenergyd_carbon.rules.grid_clock import GridClock
from gpuenergyd_carbon.rules.present_intensity import intensity_now
from gpuenergyd_carbon.rules.slowdown_account import SlowdownAccount

log = logging.getLogger(__name__)

_HISTORY_HOURS = 8 * 24
_MAX_DELAY_RATIO = 0.1
"""Share of an hour by which the next decision and its plan may be late."""
_SAME_RATIO = 1e-9
_MIN_SLOWDOWN_RATIO = 1e-3
"""A smaller slowdown saves too little for a plan of its own."""


class CarbonTargets:
    """Decides and issues the targets of all jobs; owned by the event loop."""

    def __init__(
        self,
        settings: Settings,
        grid: GridClock,
        feed: CarbonFeed,
        next_target: Callable[[str, TargetQuery], Awaitable[TargetReply | PolicyFailure]],
        history: HistoryPort,
        now: Callable[[], datetime],
        use_of: Callable[[str], EnergyUse] = lambda _: NO_ENERGY,
    ) -> None:
        self._settings = settings
        self._grid = grid
        self._feed = feed
        self._next_target = next_target
        self._history = history
        self._now = now
        self._use_of = use_of
        self.accounts = JobAccounts(settings.carbon_accounts_path)

    # --- iterations ---

    def iteration_done(
        self, runner: RunningJob, observation: IterationObservation, purpose: PlanPurpose | None, begun_at: datetime
    ) -> None:
        """Charge an iteration to its job's account, record its energy, and order full speed if the budget needs it."""
        job, baseline, target = self.accounts.get_or_create(runner), runner.job.baseline, runner.job.target
        registered, settling = runner.job.description.target, settling_iterations(runner.job)
        # Slowdown caused by a power budget is not charged to the job's slowdown budget.
        charged = replace(observation, is_regular=False) if target.is_power_limited else observation
        job.charge(charged, purpose, begun_at, registered, baseline, settling)
        if baseline is None:
            return
        job.record_energy(observation, purpose, self._grid.hour_of(begun_at))
        budget = self._budget(runner, job, baseline)
        if runner.job.phase is not JobPhase.TUNED:
            self._check_trial_cost(runner, job, budget, baseline, observation if purpose in TRIALS else None)
        if job.decision is None or job.is_following:
            return
        if is_overdrawing(job.account, budget, target, baseline.iteration_time_s):
            self._order_full_speed(runner, job, job.decision)

    def _check_trial_cost(
        self,
        runner: RunningJob,
        job: JobAccount,
        budget: JobBudget,
        baseline: BaselineView,
        tried: IterationObservation | None,
    ) -> None:
        """Refuse or permit trials, which must not cost more time than the job's budget has left.

        Before the first iteration of a trial, the usual cost of trials decides, so that a job too short for them
        loses no time. After that, each measured iteration decides.
        """
        full_s, refusal = baseline.iteration_time_s, None
        job.num_tried += tried is not None
        if not job.num_tried and not job.is_taken_over:
            refusal = trial_refusal(job.account, budget, full_s)
        elif (
            tried is not None
            and runner.job.phase is JobPhase.TRIAL
            and is_unaffordable(job.account, budget, tried.iteration_time_s, full_s)
        ):
            refusal = f"trials paused: {job.slowdown_text}, and continuing would exceed the budget"
        if refusal != job.trial_refusal:
            job.trial_refusal = refusal
            job.num_full_speed_orders += refusal is not None and tried is not None
            runner.handle(TrialPermissionChanged(refusal))

    def target_posted(self, runner: RunningJob, *, num_members: int) -> None:
        """Record the target that a member of a pipeline got from the leader on another host, which keeps the account.

        `num_members` members share the power assumed for this host.
        """
        posted = _constant(0.0, "target of the whole pipeline").decision
        host_w = self._settings.carbon_host_power_w / max(1, num_members)
        self._record(runner, replace(posted, target=runner.job.target), self._now(), None, host_w)

    def job_ended(self, job_id: str) -> None:
        """Drop the state of a job that has ended."""
        self.accounts.drop(job_id)

    # --- replicas of one training ---

    def follow(self, runner: RunningJob, target: PerformanceTarget | None, reason: str = "") -> None:
        job = self.accounts.get_or_create(runner)
        job.is_following = target is not None
        if target is None:
            job.decided_for = None
            return
        self._issue(runner, job, TargetDecision(target, reason, IntensityBasis.NEUTRAL, None), job.frontier)

    def charge_others(self, runner: RunningJob, excess_s: float) -> None:
        self.accounts.get_or_create(runner).charge_others(excess_s)

    def plan_excess_s(self, runner: RunningJob) -> float:
        return self.accounts.get_or_create(runner).plan_excess.total_s

    # --- decisions ---

    async def decide(self, runners: Iterable[RunningJob], forecast: CarbonForecast | None) -> None:
        """Decide the target of every tuned job, once per hour and again when forecast or budget changes."""
        for runner in list(runners):
            baseline = runner.job.baseline
            if baseline is None or runner.job.phase is not JobPhase.TUNED:
                continue
            job = self.accounts.get_or_create(runner)
            budget = self._budget(runner, job, baseline)
            issued_at = forecast.issued_at if forecast is not None else None
            foreign = self._foreign_zones(runner)
            permitted_ratio = runner.job.description.target.max_slowdown_ratio  # operators may change it
            kind = (budget.is_late, budget.is_overtime, self._num_windows(job.account), foreign, permitted_ratio)
            occasion = (self._grid.hour_of(self._now()), issued_at, kind, bool(job.frontier))
            if occasion == job.decided_for:
                continue
            if not budget.is_planned or foreign:
                reason = budget.basis
                if budget.is_planned:  # an hour that is clean in one zone may be dirty in another
                    zones = ", ".join((self._feed.zone, *foreign))
                    reason = f"constant slowdown: its hosts are in several carbon zones ({zones})"
                job.decided_for = occasion
                self._apply(runner, job, baseline, _constant(0.0 if budget.is_late else permitted_ratio, reason))
                continue
            now_at = self._now()
            view = target_view(self._settings, self._grid, runner, baseline, job.account, budget, forecast, now_at)
            series = self._feed.signal.series()
            here = intensity_now(view.now_at, series, forecast)
            query = TargetQuery(
                self._settings.target,
                view,
                EncodedSeries.of(series, _HISTORY_HOURS) if series is not None else None,
                self._grid.speed,
                here.basis,
                here.carbon_intensity_g_per_kwh,
            )
            reply = await self._next_target(runner.job_id, query)
            if not runner.job.is_ended:
                job.decided_for = (
                    *occasion[:3],
                    bool(job.frontier or (isinstance(reply, TargetReply) and reply.frontier)),
                )
                self._apply(runner, job, baseline, reply)

    def _foreign_zones(self, runner: RunningJob) -> tuple[str, ...]:
        """Return the zones of a job's other hosts that are not this host's."""
        return tuple(sorted(runner.carbon_zones - {self._feed.zone}))

    def _apply(
        self, runner: RunningJob, job: JobAccount, baseline: BaselineView, reply: TargetReply | PolicyFailure
    ) -> None:
        failure = reply.reason if isinstance(reply, PolicyFailure) else None
        if failure not in {None, job.failure}:
            log.warning("job %s: target policy %r failed: %s", runner.job_id, self._settings.target, failure)
        job.failure = failure
        if isinstance(reply, PolicyFailure):
            ratio = runner.job.description.target.max_slowdown_ratio
            reply = _constant(ratio, f"constant slowdown: {reply.reason}")
        if job.is_following and job.decision is not None:
            decision = job.decision  # only the frontier of the policy's reply is used
        else:
            decision = self._within_budget(runner, job, baseline, reply.decision)
        self._issue(runner, job, decision, reply.frontier or job.frontier)

    def _issue(
        self, runner: RunningJob, job: JobAccount, decision: TargetDecision, frontier: tuple[tuple[float, float], ...]
    ) -> None:
        """Send a target to the job, and record the decision with its reason in the database."""
        has_new_frontier = frontier != job.frontier
        job.frontier, job.decision, job.decided_at = frontier, decision, self._now()
        # The pace of a straggler or of the power budget is not the policy's decision, and may have changed.
        before = runner.job.target
        target = replace(decision.target, straggler_time_s=before.straggler_time_s, power_time_s=before.power_time_s)
        if target != before:
            log.info("job %s: %s", runner.job_id, target_text(target, decision.reason))
            job.record_target(target, job.decided_at)
            runner.handle(TargetChanged(target))
        elif not has_new_frontier:
            return
        issued, host_w = replace(decision, target=target), host_power_w(self._settings, runner)
        so_far_ratio = job.account.slowdown_ratio
        self._record(runner, issued, job.decided_at, so_far_ratio, host_w, frontier if has_new_frontier else None)

    def _record(
        self,
        runner: RunningJob,
        issued: TargetDecision,
        decided_at: datetime,
        slowdown_so_far_ratio: float | None,
        host_w: float,
        frontier: tuple[tuple[float, float], ...] | None = None,
    ) -> None:
        self._history.write(
            TargetRecord(
                job_id=runner.job_id,
                decided_at=decided_at,
                policy=self._settings.target,
                permitted_time_s=target_s(issued.target, runner.job.baseline),
                reason=issued.reason,
                basis=issued.basis,
                intensity=issued.intensity,
                unit=self._feed.signal.unit,
                slowdown_so_far_ratio=slowdown_so_far_ratio,
                budget_ratio=runner.job.description.target.max_slowdown_ratio,
                host_power_w=host_w,
                frontier=frontier,
            )
        )

    def _order_full_speed(self, runner: RunningJob, job: JobAccount, decision: TargetDecision) -> None:
        """Set the target to full speed at once, because iterations were slower, or slowed for longer, than planned."""
        job.num_full_speed_orders += 1
        reason = f"full speed: {job.slowdown_text}, and the change to full speed needs the rest of the budget"
        self._issue(runner, job, replace(decision, target=PerformanceTarget(0.0), reason=reason), job.frontier)

    def _budget(self, runner: RunningJob, job: JobAccount, baseline: BaselineView) -> JobBudget:
        return job_budget(
            self._settings, self._grid, runner.job, baseline, job.account, num_done=job.num_done, now_at=self._now()
        )

    def _within_budget(
        self, runner: RunningJob, job: JobAccount, baseline: BaselineView, decision: TargetDecision
    ) -> TargetDecision:
        """Return the decision, with a faster target if the proposed one could exceed the budget."""
        full_s, budget = baseline.iteration_time_s, self._budget(runner, job, baseline)
        proposed_s = replace(decision.target, straggler_time_s=None).iteration_time_s(full_s)
        settling_s = budget.settling_iterations * full_s
        rest_s = max((1.0 + _MAX_DELAY_RATIO) * self._rest_of_hour_s(), settling_s)
        if budget.allowance.work_s is not None:
            rest_s = min(rest_s, budget.allowance.work_s + settling_s)
        longest_s = job.account.longest_time_s(
            full_s, allowance=budget.allowance, slot_s=rest_s, reserve_s=budget.reserve_s
        )
        if proposed_s <= longest_s * (1.0 + _SAME_RATIO):
            return decision
        target = PerformanceTarget(0.0)
        if longest_s > full_s * (1.0 + _MIN_SLOWDOWN_RATIO):
            target = PerformanceTarget(runner.job.description.target.max_slowdown_ratio, permitted_time_s=longest_s)
        return replace(decision, target=target, reason=f"{decision.reason}; limited by the budget")

    def _rest_of_hour_s(self) -> float:
        now_at = self._now()
        return max(0.0, (self._grid.to_host(self._grid.hour_of(now_at) + HOUR) - now_at).total_seconds())

    def _num_windows(self, account: SlowdownAccount) -> int:
        return int(account.active_s // (self._settings.carbon_window_h * self._grid.hour_s))

    # --- status ---

    def status(self, runner: RunningJob) -> dict[str, Any]:
        use = self._use_of(runner.job_id)
        job, baseline = self.accounts.get(runner.job_id) or JobAccount(), runner.job.baseline
        budget = self._budget(runner, job, baseline) if baseline is not None else None
        num_windows = self._num_windows(job.account)
        is_priced = not self._foreign_zones(runner)
        carbon = carbon_of(self._settings, self._feed, runner, job, use) if is_priced else None
        return {
            "target": target_figures(self._settings, runner, job, budget, num_windows, self._now()),
            "carbon": carbon_figures(use, carbon, self._settings.pue),
        }


def _constant(ratio: float, reason: str) -> TargetReply:
    """Return a slowdown that does not depend on the hour."""
    return TargetReply(TargetDecision(PerformanceTarget(ratio), reason, IntensityBasis.NEUTRAL, None), ())
