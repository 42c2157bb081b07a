"""What a leader records for a whole pipeline: its saving and its carbon account."""

import time
from dataclasses import dataclass
from datetime import timedelta

from gpuenergyd.core.job.messages import RecordIteration
from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.jobs.iterations import ESTIMATE_EVERY_NS, estimate_record
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
