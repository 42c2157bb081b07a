"""Slowdown account, energy by hour and present target decision of each running job; saved across restarts."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from gpuenergyd.core.carbon.account import WorkSlot
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.pipeline.plan import TRIALS, PlanPurpose
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.core.policy_api.target import PerformanceTarget
from gpuenergyd.core.policy_api.target_policy import TargetDecision
from gpuenergyd.daemon.account_file import AccountFile, FileContent, SavedAccount, running_processes
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd_carbon.rules.slowdown_account import SlowdownAccount
from gpuenergyd_carbon.rules.training_excess import OtherPlansExcess, PlanExcess

log = logging.getLogger(__name__)

_TARGETS_KEPT = 64
_MAX_UNCHARGED_ITERATIONS = 10_000
"""Most iterations that are kept for charging until the job's baseline is known."""


@dataclass(frozen=True, slots=True)
class SavedSlowdown:
    """The carbon state of a job that survives when the daemon is killed."""

    account: SlowdownAccount
    slots: tuple[WorkSlot, ...]
    frontier: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class JobAccount:
    """Carbon state of one job: its slowdown account, energy by hour, and target decision."""

    account: SlowdownAccount = field(default_factory=SlowdownAccount)
    slots: dict[datetime, WorkSlot] = field(default_factory=dict)
    frontier: tuple[tuple[float, float], ...] = ()
    num_done: int = 0
    """Training iterations as counted by the client, including those under an earlier daemon."""
    num_full_speed_orders: int = 0
    num_tried: int = 0
    is_taken_over: bool = False
    """Whether the account was started by an earlier daemon."""
    decision: TargetDecision | None = None
    decided_at: datetime | None = None
    decided_for: object = None
    failure: str | None = None
    trial_refusal: str | None = None
    is_following: bool = False
    """Whether the host of the training's first replica decides the targets and keeps the account of all replicas."""
    plan_excess: PlanExcess = field(default_factory=PlanExcess)
    _others_excess: OtherPlansExcess = field(default_factory=OtherPlansExcess)
    _targets: deque[tuple[datetime, PerformanceTarget]] = field(default_factory=lambda: deque(maxlen=_TARGETS_KEPT))
    _uncharged: deque[tuple[IterationObservation, PlanPurpose | None, datetime]] = field(
        default_factory=lambda: deque(maxlen=_MAX_UNCHARGED_ITERATIONS)
    )

    def record_target(self, target: PerformanceTarget, at: datetime) -> None:
        """Record the job's target from this time on."""
        self._targets.append((at, target.own))

    def charge(
        self,
        observation: IterationObservation,
        purpose: PlanPurpose | None,
        begun_at: datetime,
        registered: PerformanceTarget,
        baseline: BaselineView | None,
        settling_iterations: int,
    ) -> None:
        """Charge an iteration to the account, or keep it until the baseline is known.

        The target at the iteration's start gives the permitted time; initially that is the registered target.
        """
        self.num_done = max(self.num_done, observation.iteration_index + 1)
        self._uncharged.append((observation, purpose, begun_at))
        if baseline is None:
            return
        full_s = baseline.iteration_time_s
        while self._uncharged:
            iteration, own_purpose, at = self._uncharged.popleft()
            target = next((issued for since, issued in reversed(self._targets) if since <= at), registered)
            permitted_s, before_s = target.iteration_time_s(full_s), self.account.excess_s
            self.account.add(
                iteration.iteration_time_s,
                full_speed_time_s=full_s,
                permitted_time_s=permitted_s,
                is_own=iteration.is_own,
                settling_iterations=settling_iterations,
            )
            excess_s = self.account.excess_s - before_s
            if own_purpose is not PlanPurpose.BASELINE:
                self.plan_excess.add(
                    full_s + excess_s,
                    full_speed_time_s=full_s,
                    permitted_time_s=permitted_s,
                    is_trial=own_purpose in TRIALS,
                    settling_iterations=settling_iterations,
                )
            self.account.excess_s += self._others_excess.iteration(
                charged_excess_s=excess_s, uncharged_s=iteration.iteration_time_s - full_s - excess_s
            )

    def charge_others(self, excess_s: float) -> None:
        """Charge the part not yet charged of the total time that plans of the training's other replicas have cost."""
        self.account.excess_s += self._others_excess.report(excess_s)

    def record_energy(self, observation: IterationObservation, purpose: PlanPurpose | None, hour_at: datetime) -> None:
        """Add time and energy of a tuned iteration to its hour; other iterations do not show a plan's saving."""
        if purpose is PlanPurpose.TUNED and observation.is_own and observation.energy_j is not None:
            slot = self.slots.get(hour_at) or WorkSlot(hour_at, 0, 0.0, 0.0, None)
            self.slots[hour_at] = slot.with_iterations(observation.iteration_time_s, observation.energy_j)

    @property
    def slowdown_text(self) -> str:
        """The job's slowdown so far, as a phrase for messages."""
        ratio = self.account.slowdown_ratio
        return "no slowdown so far" if ratio is None else f"{100 * ratio:.2f} % slower so far"


class JobAccounts:
    """The carbon state of all running jobs by job id, and the account file; owned by the event loop."""

    def __init__(self, path: Path) -> None:
        self._file = AccountFile(path, FileContent[SavedSlowdown], what="slowdown accounts")
        self._jobs: dict[str, JobAccount] = {}

    def get(self, job_id: str) -> JobAccount | None:
        """Return the state of a job, None if it has none yet."""
        return self._jobs.get(job_id)

    def get_or_create(self, runner: RunningJob) -> JobAccount:
        """Return the state of a job; a new one takes over the account saved for its processes."""
        known = self._jobs.get(runner.job_id)
        if known is not None:
            return known
        job = self._jobs[runner.job_id] = JobAccount()
        saved = self._file.take_over(runner.job.description.job_name, runner.pids)
        if saved is not None:
            job.account, job.frontier, job.is_taken_over = saved.account, saved.frontier, True
            job.slots = {slot.begin_at: slot for slot in saved.slots}
            log.info("job %s: took over its slowdown account: %s", runner.job_id, job.slowdown_text)
        return job

    def drop(self, job_id: str) -> None:
        """Drop the state of a job that has ended."""
        self._jobs.pop(job_id, None)

    async def save(self, runners: Iterable[RunningJob]) -> None:
        """Write all accounts to the account file."""
        saved = tuple(
            SavedAccount(
                runner.job.description.job_name,
                running_processes(runner.pids),
                SavedSlowdown(replace(job.account), tuple(job.slots.values()), job.frontier),
            )
            for runner in runners
            if (job := self._jobs.get(runner.job_id)) is not None
        )
        await asyncio.to_thread(self._file.save, saved)
