"""What jobs that follow the grid are told: their targets, full speed where the budget needs it, no profiling too dear.

The target policy proposes; what a job may take is checked here against its account, so that whatever a forecast or a
plugin says, full speed for the rest of the window still keeps the budget.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from typing import Any

from gpuenergyd.core.carbon.account import JobCarbon
from gpuenergyd.core.carbon.grid_clock import GridClock
from gpuenergyd.core.carbon.intensity import HOUR, CarbonForecast, IntensityBasis
from gpuenergyd.core.carbon.slowdown_account import SETTLING_ITERATIONS, SlowdownAccount
from gpuenergyd.core.job.messages import JobPhase, ProfilingJudged, TargetChanged
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView, TargetDecision
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.carbon.account_file import AccountFile
from gpuenergyd.daemon.carbon.accounts import JobAccount, JobAccounts
from gpuenergyd.daemon.carbon.budget import JobBudget, is_overdrawing, is_unaffordable, job_budget, profiling_refusal
from gpuenergyd.daemon.carbon.feed import CarbonFeed
from gpuenergyd.daemon.carbon.status import carbon_figures, carbon_of, target_figures
from gpuenergyd.daemon.carbon.target_view import target_view
from gpuenergyd.daemon.ports import HistoryPort, RunningJob, TargetPort
from gpuenergyd.daemon.processes.carbon_queries import EncodedSeries, TargetQuery, TargetReply
from gpuenergyd.daemon.processes.policy_client import PolicyFailure
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.store.records import TargetRecord

log = logging.getLogger(__name__)

_HISTORY_HOURS = 8 * 24
_LATE_RATIO = 0.1
"""Of an hour: how late the next decision and its plan may come."""
_SAME_RATIO = 1e-9
_LEAST_WORTH_RATIO = 1e-3
"""A slowdown that is not worth a plan of its own."""


class CarbonTargets:
    """All jobs that follow the grid, owned by the event loop."""

    def __init__(
        self,
        settings: Settings,
        grid: GridClock,
        feed: CarbonFeed,
        policy: TargetPort,
        history: HistoryPort,
        now: Callable[[], datetime],
    ) -> None:
        self._settings = settings
        self._grid = grid
        self._feed = feed
        self._policy = policy
        self._history = history
        self._now = now
        self._jobs = JobAccounts(AccountFile(settings.carbon_accounts_path))

    # --- what jobs do ---

    def iteration_done(
        self, runner: RunningJob, observation: IterationObservation, purpose: PlanPurpose | None, begun_at: datetime
    ) -> None:
        """Charge an iteration to its job's account, note what it used and when, and brake where that is needed."""
        job, baseline, target = self._jobs.of(runner), runner.job.baseline, runner.job.target
        job.charge(observation, begun_at, runner.job.description.target, baseline)
        if baseline is None:
            return
        job.note_use(observation, purpose, self._grid.hour_of(begun_at))
        budget = self._budget(runner, job, baseline)
        if runner.job.phase is not JobPhase.TUNED:
            self._judge_profiling(
                runner, job, budget, baseline, observation if purpose is PlanPurpose.PROFILE else None
            )
        if job.decision is not None and is_overdrawing(job.account, budget, target, baseline.iteration_time_s):
            self._brake(runner, job, job.decision)

    def _judge_profiling(
        self,
        runner: RunningJob,
        job: JobAccount,
        budget: JobBudget,
        baseline: BaselineView,
        profiled: IterationObservation | None,
    ) -> None:
        """Tell the job whether it may be profiled: not where that costs more time than its budget has left.

        Before anything was tried the usual cost decides, so that a job too short for it loses nothing; later each
        iteration does, as it was measured.
        """
        full_s, refusal = baseline.iteration_time_s, None
        job.num_profiled += profiled is not None
        if not job.num_profiled and not job.is_recalled and runner.job.previous_run is None:
            refusal = profiling_refusal(job.account, budget, full_s)
        elif (
            profiled is not None
            and runner.job.phase is JobPhase.PROFILING
            and is_unaffordable(job.account, budget, profiled.iteration_time_s, full_s)
        ):
            refusal = f"profiling has to wait: {job.spent_text}, and going on would overdraw the budget"
        if refusal != job.profiling_refusal:
            job.profiling_refusal = refusal
            job.num_full_speed_orders += refusal is not None and profiled is not None
            runner.take(ProfilingJudged(refusal))

    def job_ended(self, job_id: str) -> None:
        """Forget a job."""
        self._jobs.forget(job_id)

    async def keep(self, runners: Iterable[RunningJob]) -> None:
        """Write down every account, for a daemon that comes after this one."""
        await self._jobs.keep(runners)

    # --- what jobs are told ---

    async def decide(self, runners: Iterable[RunningJob], forecast: CarbonForecast | None) -> None:
        """Give every tuned job its target for this hour, once per hour and once more on news."""
        for runner in list(runners):
            baseline = runner.job.baseline
            if baseline is None or runner.job.phase is not JobPhase.TUNED:
                continue
            job = self._jobs.of(runner)
            budget = self._budget(runner, job, baseline)
            issued_at = forecast.issued_at if forecast is not None else None
            kind = (budget.is_late, budget.is_overtime, self._num_windows(job.account))
            occasion = (self._grid.hour_of(self._now()), issued_at, kind, bool(job.frontier))
            if occasion == job.decided_for:
                continue
            if not budget.is_planned:
                job.decided_for = occasion
                self._take(runner, job, baseline, self._unplanned(runner, budget))
                continue
            view = target_view(self._settings, self._grid, runner, baseline, job.account, budget, forecast, self._now())
            series = self._feed.signal.series()
            question = TargetQuery(
                self._settings.target,
                view,
                EncodedSeries.of(series, _HISTORY_HOURS) if series is not None else None,
                self._grid.speed,
            )
            answer = await self._policy.next_target(runner.job_id, question)
            if not runner.job.is_ended:
                job.decided_for = (*occasion[:3], bool(job.frontier or _frontier_of(answer)))
                self._take(runner, job, baseline, answer)

    def _unplanned(self, runner: RunningJob, budget: JobBudget) -> TargetReply:
        """Return the target of a job for which there is nothing to distribute over hours any more."""
        ratio = 0.0 if budget.is_late else runner.job.description.target.max_slowdown_ratio
        target = PerformanceTarget(ratio, straggler_time_s=runner.job.target.straggler_time_s)
        return TargetReply(TargetDecision(target, budget.rests_on, IntensityBasis.NEUTRAL, None), ())

    def _take(
        self, runner: RunningJob, job: JobAccount, baseline: BaselineView, answer: TargetReply | PolicyFailure
    ) -> None:
        ratio = runner.job.description.target.max_slowdown_ratio
        straggler_s = runner.job.target.straggler_time_s
        if isinstance(answer, PolicyFailure):
            if answer.reason != job.failure:
                log.warning("job %s: no target from %r: %s", runner.job_id, self._settings.target, answer.reason)
            job.failure = answer.reason
            steady = PerformanceTarget(ratio, straggler_time_s=straggler_s)
            decision = TargetDecision(steady, f"granted evenly: {answer.reason}", IntensityBasis.NEUTRAL, None)
            frontier = job.frontier
        else:
            job.failure, decision, frontier = None, answer.decision, answer.frontier or job.frontier
        self._order(runner, job, self._within_budget(runner, job, baseline, decision), frontier)

    def _order(
        self, runner: RunningJob, job: JobAccount, decision: TargetDecision, frontier: tuple[tuple[float, float], ...]
    ) -> None:
        """Tell the job, and write down what was decided and why."""
        has_new_frontier = frontier != job.frontier
        job.frontier, job.decision, job.decided_at = frontier, decision, self._now()
        # What a straggler imposes is not the policy's to say, and may have changed while it thought.
        target = replace(decision.target, straggler_time_s=runner.job.target.straggler_time_s)
        if target != runner.job.target:
            log.info("job %s: %s", runner.job_id, _said(target, decision.reason))
            job.ordered(target, job.decided_at)
            runner.take(TargetChanged(target))
        elif not has_new_frontier:
            return
        self._history.write(
            TargetRecord(
                job_id=runner.job_id,
                decided_at=job.decided_at,
                policy=self._settings.target,
                permitted_time_s=_target_s(target, runner.job.baseline),
                reason=decision.reason,
                basis=decision.basis,
                intensity=decision.intensity,
                unit=self._feed.signal.unit,
                slowdown_so_far_ratio=job.account.slowdown_ratio,
                budget_ratio=runner.job.description.target.max_slowdown_ratio,
                host_power_w=self._settings.carbon_host_power_w,
                frontier=frontier if has_new_frontier else None,
            )
        )

    def _brake(self, runner: RunningJob, job: JobAccount, decision: TargetDecision) -> None:
        """Order full speed at once: what was planned turned out slower, or later followed, than it was meant."""
        job.num_full_speed_orders += 1
        target = PerformanceTarget(0.0, straggler_time_s=runner.job.target.straggler_time_s)
        reason = f"full speed: {job.spent_text}, and the rest of the budget is needed to get there"
        self._order(runner, job, replace(decision, target=target, reason=reason), job.frontier)

    def _budget(self, runner: RunningJob, job: JobAccount, baseline: BaselineView) -> JobBudget:
        return job_budget(
            self._settings,
            self._grid,
            runner.job,
            baseline,
            job.account,
            num_done=job.num_done,
            now_at=self._now(),
        )

    def _within_budget(
        self, runner: RunningJob, job: JobAccount, baseline: BaselineView, decision: TargetDecision
    ) -> TargetDecision:
        """Return the decision, or a faster one where the account could not be balanced any more after it."""
        full_s, budget = baseline.iteration_time_s, self._budget(runner, job, baseline)
        own = replace(decision.target, straggler_time_s=None)
        wanted_s = own.iteration_time_s(full_s)
        settling_s = SETTLING_ITERATIONS * full_s
        rest_s = max((1.0 + _LATE_RATIO) * self._rest_of_hour_s(), settling_s)
        if budget.allowance.work_s is not None:
            rest_s = min(rest_s, budget.allowance.work_s + settling_s)
        longest_s = job.account.longest_time_s(
            full_s, allowance=budget.allowance, slot_s=rest_s, reserve_s=budget.reserve_s
        )
        if wanted_s <= longest_s * (1.0 + _SAME_RATIO):
            return decision
        target = PerformanceTarget(0.0, straggler_time_s=decision.target.straggler_time_s)
        if longest_s > full_s * (1.0 + _LEAST_WORTH_RATIO):
            ratio = runner.job.description.target.max_slowdown_ratio
            target = replace(target, max_slowdown_ratio=ratio, permitted_time_s=longest_s)
        return replace(decision, target=target, reason=f"{decision.reason}; shortened: the budget allows no more")

    def _rest_of_hour_s(self) -> float:
        now_at = self._now()
        return max(0.0, (self._grid.to_host(self._grid.hour_of(now_at) + HOUR) - now_at).total_seconds())

    def _num_windows(self, account: SlowdownAccount) -> int:
        return int(account.active_s // (self._settings.carbon_window_h * self._grid.hour_s))

    # --- what is shown ---

    def carbon_of(self, runner: RunningJob) -> JobCarbon | None:
        """Return the grams of a job's tuned iterations so far, priced with what is known now."""
        job = self._jobs.get(runner.job_id)
        return None if job is None else carbon_of(self._settings, self._feed, runner, job)

    def status(self, runner: RunningJob) -> dict[str, Any]:
        """Return a job's target and grams, as status shows them."""
        job, baseline = self._jobs.get(runner.job_id) or JobAccount(), runner.job.baseline
        budget = self._budget(runner, job, baseline) if baseline is not None else None
        num_windows = self._num_windows(job.account)
        return {
            "target": target_figures(self._settings, runner, job, budget, num_windows, self._now()),
            "carbon": carbon_figures(self.carbon_of(runner)),
        }


def _frontier_of(answer: TargetReply | PolicyFailure) -> tuple[tuple[float, float], ...]:
    return () if isinstance(answer, PolicyFailure) else answer.frontier


def _target_s(target: PerformanceTarget, baseline: BaselineView | None) -> float | None:
    """Return the iteration time that the job itself may take, None for full speed."""
    if baseline is None or (target.permitted_time_s is None and not target.max_slowdown_ratio):
        return None
    return replace(target, straggler_time_s=None).iteration_time_s(baseline.iteration_time_s)


def _said(target: PerformanceTarget, reason: str) -> str:
    if target.permitted_time_s is None:
        return f"target: full speed ({reason})" if not target.max_slowdown_ratio else f"target: even ({reason})"
    return f"target: {target.permitted_time_s:.4g} s an iteration ({reason})"
