"""The replicas of one training among this daemon's jobs: what each takes by itself goes in, stragglers are told of.

Jobs of one user with one name and run key are replicas of one training (docs/adr/0005). What replicas on other hosts
take is known to the training's own clients, who post it (`POST /v1/pace`).
"""

import math
import time
from dataclasses import dataclass, field
from typing import Any

from gpuenergyd.core.distributed.straggler_savings import StragglerSavingEstimator
from gpuenergyd.core.distributed.stragglers import Pace, ReplicaGroup, StragglerChange, StragglerRules
from gpuenergyd.daemon.jobs.runner import JobRunner
from gpuenergyd.daemon.ports import RunningJob
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.messages import PaceReply, PaceReport

_MAX_PACE_S = 86_400.0

TrainingKey = tuple[int, str, str]
"""uid, job name, run key."""


@dataclass(slots=True)
class Replicas:
    """All trainings of this daemon, owned by the event loop."""

    rules: StragglerRules = field(default_factory=StragglerRules)
    _groups: dict[TrainingKey, ReplicaGroup] = field(default_factory=dict)
    _key_of: dict[str, TrainingKey] = field(default_factory=dict)
    _runners: dict[str, JobRunner] = field(default_factory=dict)
    _imposed: dict[str, tuple[StragglerChange, float]] = field(default_factory=dict)
    """What is imposed on a job, and since when (host monotonic)."""
    _overhead_elsewhere_s: dict[str, float | None] = field(default_factory=dict)
    """By job: the least time that any replica on another host spends outside its instructions."""

    def join(self, key: TrainingKey, runner: JobRunner) -> None:
        """Take a job in; with a second one of the same training, both are watched."""
        group = self._groups.setdefault(key, ReplicaGroup(self.rules))
        group.join(runner.job_id)
        self._key_of[runner.job_id], self._runners[runner.job_id] = key, runner
        if len(group.job_ids) > 1:
            for job_id in group.job_ids:
                self._runners[job_id].observed.replicas = self

    def leave(self, job_id: str) -> None:
        """Forget a job that has ended."""
        key = self._key_of.pop(job_id, None)
        if key is None:
            return
        self._runners.pop(job_id)
        self._imposed.pop(job_id, None)
        self._overhead_elsewhere_s.pop(job_id, None)
        group = self._groups[key]
        self._tell(group.leave(job_id, time.monotonic()))
        if not group.job_ids:
            del self._groups[key]

    def observed(self, runner: RunningJob) -> None:
        """Compare what a job takes by itself with the others of its training."""
        own_time_s = self._runners[runner.job_id].observed.pace.own_time_s
        group = self._group(runner.job_id)
        if own_time_s is not None and group is not None:
            self._tell(group.update_pace(Pace(own_time_s, runner.job_id, time.monotonic())))

    def least_overhead_s(self, runner: RunningJob) -> float | None:
        """Return the least time that another replica of the training spends outside its instructions."""
        group = self._group(runner.job_id)
        others = group.job_ids - {runner.job_id} if group is not None else frozenset()
        known = [self._runners[job_id].observed.pace.overhead_s for job_id in others]
        known.append(self._overhead_elsewhere_s.get(runner.job_id))
        return min((overhead_s for overhead_s in known if overhead_s is not None), default=None)

    def told(self, runner: JobRunner, report: PaceReport) -> PaceReply:
        """Take what replicas elsewhere need, and say what this one needs by itself.

        Raises:
            ProtocolError: a time that cannot be one.
        """
        for name in ("slowest_other_time_s", "age_s", "least_other_overhead_s"):
            value = getattr(report, name)
            if value is not None and not (math.isfinite(value) and 0 <= value <= _MAX_PACE_S):
                raise ProtocolError(f"{name} {value}: must be a time of 0 to {_MAX_PACE_S:g} s")
        group = self._group(runner.job_id)
        if runner.job.is_ended or group is None:
            return PaceReply(None, None)
        runner.observed.replicas = self
        now_s = time.monotonic()
        pace = None
        if report.slowest_other_time_s:
            pace = Pace(report.slowest_other_time_s, "a replica elsewhere", now_s - report.age_s)
        self._tell(group.update_pace_elsewhere(runner.job_id, pace, now_s, is_news=report.is_news))
        self._overhead_elsewhere_s[runner.job_id] = report.least_other_overhead_s
        gauge = runner.observed.pace
        return PaceReply(gauge.own_time_s, runner.job.target.straggler_time_s, gauge.num_readings, gauge.overhead_s)

    def look_after(self) -> None:
        """Withdraw what those impose who have fallen silent: call it about once a second."""
        for group in list(self._groups.values()):
            self._tell(group.expire_paces(time.monotonic()))

    def status(self, runner: JobRunner) -> dict[str, Any]:
        """Return how a job stands among its likes, as status shows it."""
        imposed, since_mono_s = self._imposed.get(runner.job_id, (None, None))
        pace = imposed.pace if imposed is not None else None
        return {
            "own_time_s": runner.observed.pace.own_time_s,
            "straggler_time_s": runner.job.target.straggler_time_s,
            **extrinsic_spoken_of(runner.observed.extrinsic),
            "straggler": pace.replica if pace is not None else None,
            "straggler_reason": imposed.reason if imposed is not None else None,
            "straggler_since_s": None if since_mono_s is None else max(0.0, time.monotonic() - since_mono_s),
        }

    def _group(self, job_id: str) -> ReplicaGroup | None:
        key = self._key_of.get(job_id)
        return None if key is None else self._groups[key]

    def _tell(self, changes: tuple[StragglerChange, ...]) -> None:
        for change in changes:
            runner = self._runners.get(change.job_id)
            if runner is None or runner.job.is_ended:
                continue
            before = self._imposed.pop(change.job_id, None)
            if change.pace is not None:
                self._imposed[change.job_id] = change, before[1] if before is not None else time.monotonic()
            runner.straggler_changed(change.pace.own_time_s if change.pace is not None else None, change.reason)


def extrinsic_spoken_of(gauge: StragglerSavingEstimator) -> dict[str, Any]:
    """Return what following a straggler saves, as status shows it; None where nothing was measured yet."""
    saving = gauge.saving
    return {
        "extrinsic_saving_ratio": saving.saving_ratio if saving else None,
        "waiting_iteration_energy_j": saving.waiting_energy_j if saving else None,
        "straggler_iteration_energy_j": saving.following_energy_j if saving else None,
    }
