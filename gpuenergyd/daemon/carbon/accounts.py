"""Jobs that follow the grid: what each has spent of its budget, used by the hour, and was told; kept over restarts."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from gpuenergyd.core.carbon.account import WorkSlot
from gpuenergyd.core.carbon.slowdown_account import SlowdownAccount
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView, TargetDecision
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.daemon.carbon.account_file import AccountFile, SavedAccount, identified
from gpuenergyd.daemon.ports import RunningJob

log = logging.getLogger(__name__)

_TARGETS_KEPT = 64
_EARLY_ITERATIONS = 10_000
"""Before a job's full speed is known, so many are kept at most to be charged once it is."""


@dataclass(slots=True)
class JobAccount:
    """One job and the grid."""

    account: SlowdownAccount = field(default_factory=SlowdownAccount)
    slots: dict[datetime, WorkSlot] = field(default_factory=dict)
    frontier: tuple[tuple[float, float], ...] = ()
    num_done: int = 0
    """Training iterations, by the client's count: those that an earlier daemon saw are among them."""
    num_full_speed_orders: int = 0
    num_profiled: int = 0
    is_recalled: bool = False
    """The account was begun by an earlier daemon."""
    decision: TargetDecision | None = None
    decided_at: datetime | None = None
    decided_for: object = None
    failure: str | None = None
    profiling_refusal: str | None = None
    _ordered: deque[tuple[datetime, PerformanceTarget]] = field(default_factory=lambda: deque(maxlen=_TARGETS_KEPT))
    _early: deque[tuple[IterationObservation, datetime]] = field(
        default_factory=lambda: deque(maxlen=_EARLY_ITERATIONS)
    )

    def ordered(self, target: PerformanceTarget, at: datetime) -> None:
        """Note what the job owes from now on."""
        self._ordered.append((at, replace(target, straggler_time_s=None)))

    def charge(
        self,
        observation: IterationObservation,
        begun_at: datetime,
        registered: PerformanceTarget,
        baseline: BaselineView | None,
    ) -> None:
        """Charge an iteration to the account, or keep it until full speed is known to charge it against.

        What was permitted is what had been ordered when it began, before any order what the job was registered with.
        """
        self.num_done = max(self.num_done, observation.iteration_index + 1)
        self._early.append((observation, begun_at))
        if baseline is None:
            return
        full_s = baseline.iteration_time_s
        while self._early:
            own, at = self._early.popleft()
            owed = next((target for since, target in reversed(self._ordered) if since <= at), registered)
            self.account.add(
                own.iteration_time_s,
                full_speed_time_s=full_s,
                permitted_time_s=owed.iteration_time_s(full_s),
                is_own=own.is_own,
            )

    def note_use(self, observation: IterationObservation, purpose: PlanPurpose | None, hour_at: datetime) -> None:
        """Note what a tuned iteration took and used, and in which hour; others say nothing of what plans save."""
        if purpose is PlanPurpose.TUNED and observation.is_own and observation.energy_j is not None:
            slot = self.slots.get(hour_at) or WorkSlot(hour_at, 0, 0.0, 0.0, None)
            self.slots[hour_at] = slot.joined(observation.iteration_time_s, observation.energy_j)

    @property
    def spent_text(self) -> str:
        """How slow the job has been so far, for a sentence."""
        ratio = self.account.slowdown_ratio
        return "nothing is spent" if ratio is None else f"{100 * ratio:.2f} % slower so far"


class JobAccounts:
    """All of them by job id, owned by the event loop, and the file that outlives the daemon."""

    def __init__(self, memory: AccountFile) -> None:
        self._memory = memory
        self._jobs: dict[str, JobAccount] = {}

    def get(self, job_id: str) -> JobAccount | None:
        """Return what is known of a job."""
        return self._jobs.get(job_id)

    def of(self, runner: RunningJob) -> JobAccount:
        """Return what is known of a job; one that an earlier daemon knew goes on with its account."""
        known = self._jobs.get(runner.job_id)
        if known is not None:
            return known
        job = self._jobs[runner.job_id] = JobAccount()
        kept = self._memory.recall(runner.job.description.job_name, runner.pids)
        if kept is not None:
            job.account, job.frontier, job.is_recalled = kept.account, kept.frontier, True
            job.slots = {slot.begin_at: slot for slot in kept.slots}
            log.info("job %s: goes on with its slowdown account: %s", runner.job_id, job.spent_text)
        return job

    def forget(self, job_id: str) -> None:
        """Forget a job that has ended."""
        self._jobs.pop(job_id, None)

    async def keep(self, runners: Iterable[RunningJob]) -> None:
        """Write down every account."""
        kept = tuple(
            SavedAccount(
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
