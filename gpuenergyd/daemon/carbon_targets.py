"""Jobs that follow the grid: their slowdown accounts, the targets they are given, and the grams they saved.

The target policy proposes; what a job may take is checked here against its account, so that whatever a forecast or a
plugin says, full speed for the rest of the window still keeps the budget.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from gpuenergyd.core.carbon import HOUR, CarbonForecast, IntensityRung
from gpuenergyd.core.carbon_account import JobCarbon, WorkSlot, job_carbon
from gpuenergyd.core.carbon_clock import GridClock
from gpuenergyd.core.messages import ControlLost, JobPhase, TargetChanged
from gpuenergyd.core.observation import IterationObservation
from gpuenergyd.core.plan import PlanPurpose
from gpuenergyd.core.policy import BaselineView, TargetDecision, TargetView
from gpuenergyd.core.slowdown_account import SETTLING_ITERATIONS, SlowdownAccount
from gpuenergyd.core.target import PerformanceTarget
from gpuenergyd.daemon.carbon_feed import CarbonFeed
from gpuenergyd.daemon.carbon_memory import CarbonMemory, KeptJob, identified
from gpuenergyd.daemon.carbon_questions import SentSeries, TargetQuestion, TargetReply
from gpuenergyd.daemon.job_budget import JobBudget, is_overdrawing, is_unaffordable, job_budget, view_deadline
from gpuenergyd.daemon.policy_link import PolicyFailure
from gpuenergyd.daemon.ports import HistoryPort, RunningJob, TargetPort
from gpuenergyd.daemon.settings import Settings
from gpuenergyd.store.records import TargetRecord

log = logging.getLogger(__name__)

_HISTORY_HOURS = 8 * 24
_LATE_RATIO = 0.1
"""Of an hour: how late the next decision and its plan may come."""
_SAME_RATIO = 1e-9
_LEAST_WORTH_RATIO = 1e-3
"""A slowdown that is not worth a plan of its own."""


@dataclass(slots=True)
class FollowingJob:
    """One job and the grid."""

    account: SlowdownAccount = field(default_factory=SlowdownAccount)
    slots: dict[datetime, WorkSlot] = field(default_factory=dict)
    frontier: tuple[tuple[float, float], ...] = ()
    num_done: int = 0
    """Training iterations, by the client's count: those that an earlier daemon saw are among them."""
    num_brakings: int = 0
    is_recalled: bool = False
    """The account was begun by an earlier daemon."""
    decision: TargetDecision | None = None
    decided_at: datetime | None = None
    decided_for: object = None
    failure: str | None = None


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
        self._jobs: dict[str, FollowingJob] = {}
        self._memory = CarbonMemory(settings.carbon_accounts_path)

    # --- what jobs do ---

    def iteration_done(
        self, runner: RunningJob, observation: IterationObservation, purpose: PlanPurpose | None, begun_at: datetime
    ) -> None:
        """Charge an iteration to its job's account, note what it used and when, and brake where that is needed."""
        baseline = runner.job.baseline
        if baseline is None:
            return
        job = self._job(runner)
        target = runner.job.target
        is_own_time = observation.is_regular and not target.is_forced
        job.num_done = max(job.num_done, observation.iteration_index + 1)
        job.account.add(
            observation.iteration_time_s,
            full_speed_time_s=baseline.iteration_time_s,
            permitted_time_s=replace(target, straggler_time_s=None).iteration_time_s(baseline.iteration_time_s),
            is_regular=is_own_time,
        )
        if purpose is PlanPurpose.TUNED and observation.is_regular and observation.energy_j is not None:
            hour_at = self._grid.hour_of(begun_at)
            slot = job.slots.get(hour_at) or WorkSlot(hour_at, 0, 0.0, 0.0, None)
            job.slots[hour_at] = slot.joined(observation.iteration_time_s, observation.energy_j)
        if job.decision is None:
            return
        budget = self._budget(runner, job, baseline)
        if is_overdrawing(job.account, budget, target, baseline.iteration_time_s):
            self._brake(runner, job, job.decision)
        elif (
            runner.job.phase is JobPhase.PROFILING
            and purpose is PlanPurpose.PROFILE
            and is_unaffordable(job.account, budget, observation.iteration_time_s, baseline.iteration_time_s)
        ):
            job.num_brakings += 1
            runner.take(ControlLost(f"profiling again has to wait: {_spent(job.account)}"))

    def job_ended(self, job_id: str) -> None:
        """Forget a job."""
        self._jobs.pop(job_id, None)

    # --- what outlives this daemon ---

    async def keep(self, runners: Iterable[RunningJob]) -> None:
        """Write down every account."""
        kept = tuple(
            KeptJob(
                runner.job.description.job_name,
                identified(runner.pids),
                replace(job.account),
                tuple(job.slots.values()),
                job.frontier,
            )
            for runner in runners
            if (job := self._jobs.get(runner.job_id)) is not None
        )
        await asyncio.to_thread(self._memory.keep, kept)

    def _job(self, runner: RunningJob) -> FollowingJob:
        known = self._jobs.get(runner.job_id)
        if known is not None:
            return known
        job = self._jobs[runner.job_id] = FollowingJob()
        kept = self._memory.recall(runner.job.description.job_name, runner.pids)
        if kept is not None:
            job.account, job.frontier, job.is_recalled = kept.account, kept.frontier, True
            job.slots = {slot.begin_at: slot for slot in kept.slots}
            log.info("job %s: goes on with its slowdown account: %s", runner.job_id, _spent(job.account))
        return job

    # --- what jobs are told ---

    async def decide(self, runners: Iterable[RunningJob], forecast: CarbonForecast | None) -> None:
        """Give every tuned job its target for this hour, once per hour and once more on news."""
        for runner in list(runners):
            baseline = runner.job.baseline
            if baseline is None or runner.job.phase is not JobPhase.TUNED:
                continue
            job = self._job(runner)
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
            view = self._view(runner, job, baseline, forecast, budget)
            series = self._feed.signal.series()
            question = TargetQuestion(
                self._settings.target,
                view,
                SentSeries.of(series, _HISTORY_HOURS) if series is not None else None,
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
        return TargetReply(TargetDecision(target, budget.rests_on, IntensityRung.NEUTRAL, None), ())

    def _view(
        self,
        runner: RunningJob,
        job: FollowingJob,
        baseline: BaselineView,
        forecast: CarbonForecast | None,
        budget: JobBudget,
    ) -> TargetView:
        speed, account, target = self._grid.speed, job.account, runner.job.target
        end_at = view_deadline(budget, account, self._now())
        left = budget.num_iterations_left
        return TargetView(
            job_id=runner.job_id,
            now_at=self._grid.to_grid(self._now()),
            max_slowdown_ratio=runner.job.description.target.max_slowdown_ratio,
            baseline=BaselineView(
                baseline.iteration_time_s * speed,
                None if baseline.energy_j is None else baseline.energy_j * speed,
                baseline.num_iterations,
                baseline.iteration_sigma_s * speed,
            ),
            num_iterations_done=account.num_iterations,
            active_time_s=account.active_s * speed,
            num_iterations_total=None if left is None else account.num_iterations + left,
            deadline_at=None if end_at is None else self._grid.to_grid(end_at),
            forecast=forecast,
            full_speed_time_s=baseline.iteration_time_s
            * (1.0 + account.drift_ratio(baseline.iteration_time_s))
            * speed,
            straggler_time_s=None if target.straggler_time_s is None else target.straggler_time_s * speed,
            current_target_time_s=None if target.permitted_time_s is None else target.permitted_time_s * speed,
            host_power_w=self._settings.carbon_host_power_w,
            window_s=self._settings.carbon_window_h * HOUR.total_seconds(),
        )

    def _take(
        self, runner: RunningJob, job: FollowingJob, baseline: BaselineView, answer: TargetReply | PolicyFailure
    ) -> None:
        ratio = runner.job.description.target.max_slowdown_ratio
        straggler_s = runner.job.target.straggler_time_s
        if isinstance(answer, PolicyFailure):
            if answer.reason != job.failure:
                log.warning("job %s: no target from %r: %s", runner.job_id, self._settings.target, answer.reason)
            job.failure = answer.reason
            steady = PerformanceTarget(ratio, straggler_time_s=straggler_s)
            decision = TargetDecision(steady, f"granted evenly: {answer.reason}", IntensityRung.NEUTRAL, None)
            frontier = job.frontier
        else:
            job.failure, decision, frontier = None, answer.decision, answer.frontier or job.frontier
        self._order(runner, job, self._within_budget(runner, job, baseline, decision), frontier)

    def _order(
        self, runner: RunningJob, job: FollowingJob, decision: TargetDecision, frontier: tuple[tuple[float, float], ...]
    ) -> None:
        """Tell the job, and write down what was decided and why."""
        has_new_frontier = frontier != job.frontier
        job.frontier, job.decision, job.decided_at = frontier, decision, self._now()
        # What a straggler imposes is not the policy's to say, and may have changed while it thought.
        target = replace(decision.target, straggler_time_s=runner.job.target.straggler_time_s)
        if target != runner.job.target:
            log.info("job %s: %s", runner.job_id, _said(target, decision.reason))
            runner.take(TargetChanged(target))
        elif not has_new_frontier:
            return
        self._history.write(
            TargetRecord(
                job_id=runner.job_id,
                decided_at=job.decided_at,
                policy=self._settings.target,
                permitted_time_s=target.permitted_time_s,
                reason=decision.reason,
                rung=decision.rung,
                intensity=decision.intensity,
                unit=self._feed.signal.unit,
                slowdown_so_far_ratio=job.account.slowdown_ratio,
                budget_ratio=runner.job.description.target.max_slowdown_ratio,
                host_power_w=self._settings.carbon_host_power_w,
                frontier=frontier if has_new_frontier else None,
            )
        )

    def _brake(self, runner: RunningJob, job: FollowingJob, decision: TargetDecision) -> None:
        """Order full speed at once: what was planned turned out slower, or later followed, than it was meant."""
        job.num_brakings += 1
        target = PerformanceTarget(0.0, straggler_time_s=runner.job.target.straggler_time_s)
        reason = f"full speed: {_spent(job.account)}, and the rest of the budget is needed to get there"
        self._order(runner, job, replace(decision, target=target, reason=reason), job.frontier)

    def _budget(self, runner: RunningJob, job: FollowingJob, baseline: BaselineView) -> JobBudget:
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
        self, runner: RunningJob, job: FollowingJob, baseline: BaselineView, decision: TargetDecision
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
        if job is None or not job.slots:
            return None
        baseline = runner.job.baseline
        slots = [
            replace(slot, carbon_intensity_g_per_kwh=self._feed.intensity_of_hour(hour_at))
            for hour_at, slot in sorted(job.slots.items())
        ]
        untuned = None
        if baseline is not None and baseline.energy_j is not None:
            untuned = (baseline.iteration_time_s, baseline.energy_j)
        return job_carbon(slots, job.frontier, host_power_w=self._settings.carbon_host_power_w, untuned=untuned)

    def status(self, runner: RunningJob) -> dict[str, Any]:
        """Return a job's target and grams, as status shows them."""
        job = self._jobs.get(runner.job_id, FollowingJob())
        decision, carbon, baseline = job.decision, self.carbon_of(runner), runner.job.baseline
        budget = self._budget(runner, job, baseline) if baseline is not None else None
        return {
            "target": {
                "policy": self._settings.target,
                "permitted_time_s": runner.job.target.permitted_time_s,
                "reason": decision.reason if decision is not None else "not tuned yet",
                "rung": decision.rung if decision is not None else None,
                "intensity": decision.intensity if decision is not None else None,
                "overrun_s": decision.overrun_s if decision is not None else None,
                "age_s": None if job.decided_at is None else (self._now() - job.decided_at).total_seconds(),
                "budget_ratio": runner.job.description.target.max_slowdown_ratio,
                "slowdown_so_far_ratio": job.account.slowdown_ratio,
                "num_windows": self._num_windows(job.account),
                "num_brakings": job.num_brakings,
                "num_iterations_left": budget.num_iterations_left if budget is not None else None,
                "is_length_reached": budget is not None and not budget.is_planned,
                "deadline_at": budget.deadline_at if budget is not None else None,
                "length_rests_on": budget.rests_on if budget is not None else None,
                "is_recalled": job.is_recalled,
                "num_frontier_points": len(job.frontier),
            },
            "carbon": carbon_figures(carbon),
        }


def carbon_figures(carbon: JobCarbon | None) -> dict[str, Any]:
    """Return grams by name; what is not known is None."""
    savings = carbon.savings if carbon is not None else None
    return {
        "carbon_g": savings.actual_g if savings is not None else None,
        "saved_by_plan_g": carbon.saved_by_plan_g if carbon is not None else None,
        "saved_by_frontier_g": savings.saved_by_frontier_g if savings is not None else None,
        "saved_by_timing_g": savings.saved_by_timing_g if savings is not None else None,
        "priced_j": carbon.priced_j if carbon is not None else None,
        "unpriced_j": carbon.unpriced_j if carbon is not None else None,
        "host_power_w": carbon.host_power_w if carbon is not None else None,
    }


def _frontier_of(answer: TargetReply | PolicyFailure) -> tuple[tuple[float, float], ...]:
    return () if isinstance(answer, PolicyFailure) else answer.frontier


def _spent(account: SlowdownAccount) -> str:
    ratio = account.slowdown_ratio
    return "nothing is spent" if ratio is None else f"{100 * ratio:.2f} % slower so far"


def _said(target: PerformanceTarget, reason: str) -> str:
    if target.permitted_time_s is None:
        return f"target: full speed ({reason})" if not target.max_slowdown_ratio else f"target: even ({reason})"
    return f"target: {target.permitted_time_s:.4g} s an iteration ({reason})"
