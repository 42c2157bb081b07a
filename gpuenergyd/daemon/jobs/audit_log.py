"""Who changed what of a job's control, and why: into the history, line by line."""

import time
from dataclasses import dataclass

from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.store.records import ControlEventRecord


@dataclass(frozen=True, slots=True)
class ControlTrail:
    """The trail of one job."""

    history: HistoryPort
    job_id: str

    def record(
        self, action: str, actor: str, reason: str, *, gpu_uuid: str | None = None, before: str = "", after: str = ""
    ) -> None:
        """Write what happened just now."""
        self.history.write(
            ControlEventRecord(utc_at(time.monotonic_ns()), action, actor, self.job_id, gpu_uuid, reason, before, after)
        )
