"""Audit log of a job: who changed what and why, one record per change in the history database."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.core.job.messages import RecordNotice, RecordPhase
from gpuenergyd.core.pipeline.switching import SwitchLatency
from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.gpus.inventory import Gpu, utc_at
from gpuenergyd.daemon.gpus.knobs import FOREIGN, KnobChange
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.store.records import ORDER_ADVICE, ControlEventRecord

log = logging.getLogger(__name__)

DAEMON = "daemon"
"""The actor recorded for the daemon's own decisions."""


@dataclass(frozen=True, slots=True)
class AuditLog:
    """The audit log of one job."""

    history: HistoryPort
    job_id: str
    actor: str = DAEMON
    """Who decides for the job."""

    def record(
        self, action: str, actor: str, reason: str, *, gpu_uuid: str | None = None, before: str = "", after: str = ""
    ) -> None:
        """Record a change at the present instant."""
        self.history.write(
            ControlEventRecord(utc_at(time.monotonic_ns()), action, actor, self.job_id, gpu_uuid, reason, before, after)
        )

    def record_phase(self, command: RecordPhase) -> None:
        """Record that the job entered a phase, or why it continues differently in its present one."""
        log.info("job %s: %s (%s)", self.job_id, command.phase, command.reason)
        self.record("phase", DAEMON, command.reason, after=command.phase)

    def record_notice(self, command: RecordNotice) -> None:
        """Record an event that does not change the phase."""
        log.info("job %s: %s", self.job_id, command.reason)
        if command.advice is None:
            self.record("notice", self.actor, command.reason)
        else:
            self.record(ORDER_ADVICE, self.actor, command.reason, after=f"{command.advice.saving_ratio:.4f}")


def record_latency(history: HistoryPort, gpu: Gpu, before: SwitchLatency) -> None:
    """Record the switch latency that plans for a GPU use from now on."""
    job_id = gpu.claim.job_id if gpu.claim is not None else None
    now, reason = utc_at(time.monotonic_ns()), f"{count_text(gpu.switching.num_seen, 'clock change')} measured"
    texts = _latency_text(before), _latency_text(gpu.switching.latency)
    history.write(ControlEventRecord(now, "switch_latency", DAEMON, job_id, gpu.identity.gpu_uuid, reason, *texts))


def record_knob(history: HistoryPort, gpu: Gpu, change: KnobChange) -> None:
    """Record that a setting of a GPU has changed, with who changed it."""
    uuid = gpu.identity.gpu_uuid
    suspects = suspects_text() if change.actor == FOREIGN else ""
    reason = f"{change.name} changed by {change.actor}{f', perhaps {suspects}' if suspects else ''}"
    log.info("GPU %s: %s: %s -> %s", uuid, reason, change.before, change.after)
    job_id = gpu.claim.job_id if gpu.claim is not None and not gpu.claim.is_lease else None
    now = utc_at(time.monotonic_ns())
    history.write(ControlEventRecord(now, "knob", change.actor, job_id, uuid, reason, change.before, change.after))


def _latency_text(latency: SwitchLatency) -> str:
    return f"raise {1000 * latency.raise_s:.3g} ms, lower {1000 * latency.lower_s:.3g} ms, {latency.basis}"


_CHANGES_GPUS = frozenset(
    {"nv-hostengine", "dcgmi", "nvidia-smi", "nvidia-settings", "nvidia-powerd", "zeusd", "geopmd", "tuned", "eard"}
)
"""Programs that may have changed a setting, since the driver does not say who did; names as in /proc/PID/comm, at most
15 characters. nv-hostengine is DCGM's daemon, which re-applies its targets."""
_MAX_NAMED = 3


def suspects_text(proc: Path = Path("/proc")) -> str:
    """Return the running programs that may have changed a GPU, with their pids; empty if there are none."""
    found = sorted(_running(proc))
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(f"{name} pid {pid}" for name, pid in found[:_MAX_NAMED]) + more


def _running(proc: Path) -> Iterator[tuple[str, int]]:
    for folder in proc.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            name = (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue  # it has ended
        if name in _CHANGES_GPUS:
            yield name, int(folder.name)
