"""Data-parallel replicas of one training on this host: follow the slowest, and run full-speed blocks together.

Jobs of one user with the same name and run key are replicas of one training (docs/adr/0005). A replica's pace is its
iteration time without waits for other replicas. The training's own clients report the paces of replicas on other hosts
(`POST /v1/pace`). Loops with phases are compared; plain loops with one instruction per iteration are not, since the
time of that instruction includes the wait for the slowest replica.

The replicas share one time account, kept when their ranks restart. A daemon that stops normally hands jobs over with
their accounts. After a kill, and for pipelines across hosts, whose leader starts over, accounts come from the file.
"""

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpuenergyd.core.distributed.straggler_savings import StragglerSavingEstimator
from gpuenergyd.core.distributed.stragglers import Pace, ReplicaGroup, StragglerChange, StragglerRules
from gpuenergyd.core.job.messages import ReplicaBlockBegins
from gpuenergyd.core.job.time_account import AccountTotals, TimeAccount
from gpuenergyd.daemon.account_file import AccountFile, FileContent, SavedAccount, running_processes
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.jobs.training_budget import TrainingTarget, handle_budget, share_budget
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.messages import PaceReply, PaceReport

log = logging.getLogger(__name__)

MAX_PACE_S = 86_400.0

TrainingKey = tuple[int, str, str]
"""uid, job name, run key."""


def check_paces(**times_s: float | None) -> None:
    """Check the times that a rank reports of replicas on other hosts, by the names of their fields.

    Raises:
        ProtocolError: a time is out of range.
    """
    for name, value in times_s.items():
        if value is not None and not (math.isfinite(value) and 0 <= value <= MAX_PACE_S):
            raise ProtocolError(f"{name} {value} must be in [0, {MAX_PACE_S:g}] s")


@dataclass(slots=True)
class Replicas:
    """The replicas of all trainings, owned by the event loop."""

    rules: StragglerRules = field(default_factory=StragglerRules)
    _groups: dict[TrainingKey, ReplicaGroup] = field(default_factory=dict)
    _key_of: dict[str, TrainingKey] = field(default_factory=dict)
    _runners: dict[str, JobRunner] = field(default_factory=dict)
    _stragglers: dict[str, tuple[StragglerChange, float]] = field(default_factory=dict)
    """The straggler that each job follows, and since when (host monotonic time)."""
    _overhead_elsewhere_s: dict[str, float | None] = field(default_factory=dict)
    """Shortest time per iteration that a replica on another host spends outside its instructions, by job."""
    _with_replicas: set[str] = field(default_factory=set)
    """Jobs whose training has, or had, another replica."""
    _targets: dict[str, TrainingTarget] = field(default_factory=dict)
    """The part of each job's target that depends on the other replicas."""
    _dp_ranks: dict[str, int] = field(default_factory=dict)

    def join(self, key: TrainingKey, runner: JobRunner, *, dp_rank: int = 0) -> None:
        """Add a job; paces are measured once its training has a second replica."""
        if runner.job.ranks.is_plain_loop:
            return
        group = self._groups.setdefault(key, ReplicaGroup(self.rules))
        group.join(runner.job_id)
        self._key_of[runner.job_id], self._runners[runner.job_id] = key, runner
        self._dp_ranks[runner.job_id] = dp_rank
        self._targets[runner.job_id] = TrainingTarget(runner, runner.services.watcher)
        if len(group.job_ids) > 1:
            self._with_replicas.update(group.job_ids)

    def leave(self, job_id: str) -> None:
        """Remove a job that has ended."""
        key = self._key_of.pop(job_id, None)
        if key is None:
            return
        self._runners.pop(job_id)
        self._with_replicas.discard(job_id)
        self._stragglers.pop(job_id, None)
        self._overhead_elsewhere_s.pop(job_id, None)
        self._dp_ranks.pop(job_id)
        self._targets.pop(job_id)
        group = self._groups[key]
        self._follow(group.leave(job_id, time.monotonic()))
        if not group.job_ids:
            del self._groups[key]

    def has_replicas(self, job_id: str) -> bool:
        return job_id in self._with_replicas

    def compare_pace(self, runner: RunningJob) -> None:
        pace = runner.job.knowledge.pace
        group = self._group(runner.job_id) if self.has_replicas(runner.job_id) else None
        if group is None:
            return
        if pace.own_time_s is not None:  # unknown for some iterations after a change of the number of microbatches
            own = Pace(pace.own_time_s, runner.job_id, time.monotonic(), pace.iteration_time_s)
            self._follow(group.update_pace(own))
        self._prepare(group)
        job_ids = sorted(group.job_ids, key=lambda job_id: self._dp_ranks[job_id])
        share_budget([self._targets[job_id] for job_id in job_ids])

    def block_begins(self, runner: RunningJob, apply_at_iteration: int) -> None:
        group = self._group(runner.job_id)
        for job_id in sorted(group.job_ids - {runner.job_id}) if group is not None else ():
            other = self._runners.get(job_id)
            if other is not None and not other.job.is_ended:
                other.handle(ReplicaBlockBegins(apply_at_iteration))

    def least_overhead_s(self, runner: RunningJob) -> float | None:
        group = self._group(runner.job_id)
        others = group.job_ids - {runner.job_id} if group is not None else frozenset()
        known = [self._runners[job_id].job.knowledge.pace.overhead_s for job_id in others]
        known.append(self._overhead_elsewhere_s.get(runner.job_id))
        return min((overhead_s for overhead_s in known if overhead_s is not None), default=None)

    def handle_report(self, runner: JobRunner, report: PaceReport) -> PaceReply:
        """Handle the paces of replicas on other hosts; return this replica's pace, or that of the slowest on this host.

        Raises:
            ProtocolError: a time is out of range.
        """
        check_paces(
            slowest_other_time_s=report.slowest_other_time_s,
            age_s=report.age_s,
            least_other_overhead_s=report.least_other_overhead_s,
        )
        group = self._group(runner.job_id)
        if runner.job.is_ended or group is None:
            return PaceReply(None, None)
        covered = sorted(group.job_ids, key=self._dp_ranks.__getitem__) if report.covers_host else [runner.job_id]
        self._with_replicas.update(covered)
        now_s = time.monotonic()
        pace = None
        if report.slowest_other_time_s:
            pace = Pace(report.slowest_other_time_s, "a replica elsewhere", now_s - report.age_s)
        for job_id in covered:
            self._follow(group.update_pace_elsewhere(job_id, pace, now_s, is_news=report.is_news))
            self._overhead_elsewhere_s[job_id] = report.least_other_overhead_s
        self._prepare(group)
        share = handle_budget([self._targets[job_id] for job_id in covered], report.budget)
        paces = [self._runners[job_id].job.knowledge.pace for job_id in covered]
        slowest = max(paces, key=lambda pace: pace.own_time_s or 0.0)
        overheads_s = [pace.overhead_s for pace in paces if pace.overhead_s is not None]
        straggler_time_s = runner.job.target.straggler_time_s
        least_s = min(overheads_s, default=None)
        return PaceReply(slowest.own_time_s, straggler_time_s, slowest.num_readings, least_s, share)

    def check_time_limits(self) -> None:
        """Withdraw paces and targets of replicas that no longer report; called every second."""
        for group in list(self._groups.values()):
            self._follow(group.expire_paces(time.monotonic()))
        for target in self._targets.values():
            target.check_time_limit()

    def status(self, runner: JobRunner) -> dict[str, Any]:
        """Return the replica fields of a job's status."""
        straggler, since_mono_s = self._stragglers.get(runner.job_id, (None, None))
        pace = straggler.pace if straggler is not None else None
        return {
            "own_time_s": runner.job.knowledge.pace.own_time_s,
            "straggler_time_s": runner.job.target.straggler_time_s,
            **straggler_saving_fields(runner.job.knowledge.straggler_saving),
            "straggler": pace.replica if pace is not None else None,
            "straggler_reason": straggler.reason if straggler is not None else None,
            "straggler_since_s": None if since_mono_s is None else max(0.0, time.monotonic() - since_mono_s),
        }

    def _group(self, job_id: str) -> ReplicaGroup | None:
        key = self._key_of.get(job_id)
        return None if key is None else self._groups[key]

    def _prepare(self, group: ReplicaGroup) -> None:
        """Prepare plans for a replica that may be a straggler, until its next reading shows whether it is one."""
        now_s = time.monotonic()
        for job_id in group.job_ids:
            if (runner := self._runners.get(job_id)) is not None:
                runner.prepare_for_pace(group.suspected_time_s(job_id, now_s))

    def _follow(self, changes: tuple[StragglerChange, ...]) -> None:
        for change in changes:
            runner = self._runners.get(change.job_id)
            if runner is None or runner.job.is_ended:
                continue
            before = self._stragglers.pop(change.job_id, None)
            if change.pace is not None:
                self._stragglers[change.job_id] = change, before[1] if before is not None else time.monotonic()
            runner.straggler_changed(change.pace.own_time_s if change.pace is not None else None, change.reason)


def straggler_saving_fields(estimator: StragglerSavingEstimator) -> dict[str, Any]:
    """Return the status fields of the saving at a straggler's pace; None until it is measured."""
    saving = estimator.saving
    return {
        "extrinsic_saving_ratio": saving.saving_ratio if saving else None,
        "waiting_iteration_energy_j": saving.waiting_energy_j if saving else None,
        "straggler_iteration_energy_j": saving.following_energy_j if saving else None,
    }


_ENDED_KEPT = 64
"""Most accounts kept for trainings without a running job, whose ranks may restart, as after a failure."""


class TimeAccounts:
    """The accounts of all trainings, owned by the event loop."""

    def __init__(self, path: Path | None = None) -> None:
        """Keep the accounts in a file; without a path, they are lost when the daemon ends."""
        what = "time accounts"
        self._file = None if path is None else AccountFile(path, FileContent[AccountTotals], what=what)
        self._shared: OrderedDict[TrainingKey, TimeAccount] = OrderedDict()
        self._key_of: dict[str, TrainingKey] = {}

    def join(self, key: TrainingKey, runner: RunningJob) -> None:
        """Let a job share the account of its training; the first job brings its own."""
        experiments = runner.job.control.experiments
        if not experiments.is_paying:
            return
        self._key_of[runner.job_id] = key
        experiments.account = self._shared.setdefault(key, experiments.account)
        self._shared.move_to_end(key)

    def claim(self, runner: RunningJob) -> None:
        """Continue the account that an earlier daemon saved for the processes of a newly registered job."""
        experiments = runner.job.control.experiments
        if self._file is None or not experiments.is_paying or experiments.account.num_iterations:
            return
        saved = self._file.take_over(runner.job.description.job_name, runner.pids)
        if saved is not None:
            experiments.account.take_over(saved)
            log.info(
                "job %s: took over its time account: cost so far %.3g s", runner.job_id, experiments.account.cost_s
            )

    def leave(self, job_id: str) -> None:
        """Record the end of a job; the account is kept if the training has a run key and could continue later."""
        key = self._key_of.pop(job_id, None)
        if key is None or key in self._key_of.values():
            return
        self._shared[key].forget_iterations()
        if not key[-1]:
            del self._shared[key]
        idle = [other for other in self._shared if other not in self._key_of.values()]
        for oldest in idle[:-_ENDED_KEPT]:
            del self._shared[oldest]

    async def save(self, runners: Iterable[RunningJob]) -> None:
        """Write the accounts of running jobs to the file; committed time is saved as spent."""
        if self._file is None:
            return
        saved = []
        for runner in runners:
            experiments, own = runner.job.control.experiments, runner.job.control.experiments.account
            if experiments.is_paying and own.num_iterations:
                totals = replace(own.totals, cost_s=own.totals.cost_s + own.spent_or_committed_s - own.cost_s)
                saved.append(SavedAccount(runner.job.description.job_name, running_processes(runner.pids), totals))
        await asyncio.to_thread(self._file.save, tuple(saved))
