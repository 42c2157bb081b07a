"""What a leader records for a whole pipeline: its saving, its carbon account, and measured curves for later jobs."""

import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from gpuenergyd.core.job.messages import RecordIteration, StoreCurves, StoreOrderRefusal
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.audit_log import AuditLog
from gpuenergyd.daemon.jobs.iterations import ESTIMATE_EVERY_NS, estimate_record
from gpuenergyd.daemon.jobs.past_jobs import JobRuns
from gpuenergyd.daemon.ports import JobServices, RunningJob


@dataclass(slots=True)
class LeaderIterations:
    """Records merged iterations: the saving in the history, the slowdown in the carbon account, once per pipeline.

    Each member's daemon records the member's own iterations and energy.
    """

    runner: RunningJob
    services: JobServices
    _estimate_due_mono_ns: int = 0

    def record(self, command: RecordIteration) -> None:
        observation, now_ns = command.observation, time.monotonic_ns()
        if self.services.watcher is not None:
            # Merged iterations carry no timestamps; this one ended a moment ago.
            began_at = utc_at(now_ns) - timedelta(seconds=observation.iteration_time_s)
            self.services.watcher.iteration_done(self.runner, observation, command.purpose, began_at)
        if now_ns >= self._estimate_due_mono_ns:
            self._estimate_due_mono_ns = now_ns + ESTIMATE_EVERY_NS
            self.record_estimate()

    def record_estimate(self) -> None:
        """Record the measured saving of the whole pipeline under its id."""
        record = estimate_record(self.runner.job_id, self.runner.job.estimate())
        if record is not None:
            self.services.history.write(record)


@dataclass(slots=True)
class LeaderRuns:
    """Past jobs similar to the whole pipeline; iterations are handled only after the lookup."""

    runner: RunningJob
    services: JobServices
    leader_job_id: str
    uid: int
    num_tp_ranks: int
    spawn: Callable[[Coroutine[Any, Any, None]], None]
    is_recalled: bool = False
    _runs: JobRuns = field(init=False)

    def __post_init__(self) -> None:
        audit = AuditLog(self.services.history, self.leader_job_id)
        facts = "across hosts", self.num_tp_ranks
        self._runs = JobRuns(self.runner, self.services, audit, self.uid, facts)

    async def recall(self) -> None:
        """Look up past jobs in the background, since a training process waits for the reply to its report."""
        if self.services.past_jobs is None:
            self.is_recalled = True
        else:
            self.spawn(self._recall())

    async def _recall(self) -> None:
        try:
            await self._runs.recall()
        finally:
            self.is_recalled = True

    def store_refusal(self, command: StoreOrderRefusal) -> None:
        """Record that later runs must keep the program's own order of instructions."""
        self._runs.store_refusal(command)

    def store_curves(self, command: StoreCurves) -> None:
        """Store the curves measured on the whole pipeline."""
        self._runs.store_curves(command)
