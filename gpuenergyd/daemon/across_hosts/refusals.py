"""Refused messages of pipelines across hosts: logged and recorded once per reason, and shown in the status."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gpuenergyd.daemon.gpus.inventory import utc_at
from gpuenergyd.daemon.ports import HistoryPort
from gpuenergyd.errors import GpuEnergyError
from gpuenergyd.store.records import ControlEventRecord

log = logging.getLogger(__name__)

_MAX_REASONS_PER_JOB = 32
"""Most reasons recorded per job; some contain numbers, so their variety is unlimited."""
_NS_PER_S = 1e9


@dataclass(slots=True)
class _Refusal:
    """The last refusal of one kind of a job's messages."""

    reason: str
    at_mono_ns: int
    num_messages: int = 0


@dataclass(slots=True)
class Refusals:
    """The refused messages of this daemon's pipeline members, whose ranks then run at full speed."""

    history: HistoryPort
    _last: dict[tuple[str, str], _Refusal] = field(default_factory=dict)
    """By job id and kind of message."""
    _recorded: dict[str, set[str]] = field(default_factory=dict)
    """Reasons by job id."""

    @contextmanager
    def of(self, job_id: str, kind: str) -> Iterator[None]:
        """Record an error raised in the block as a refusal; success clears the last refusal of this kind of message."""
        try:
            yield
        except GpuEnergyError as error:
            self.record(job_id, str(error), kind)
            raise
        self._last.pop((job_id, kind), None)

    def record(self, job_id: str, reason: str, kind: str = "") -> None:
        """Record that a message of a job was refused; ranks repeat such messages many times a second."""
        now_ns = time.monotonic_ns()
        known = self._last.get((job_id, kind))
        num_before = known.num_messages if known is not None and known.reason == reason else 0
        self._last[job_id, kind] = _Refusal(reason, now_ns, num_before + 1)
        recorded = self._recorded.setdefault(job_id, set())
        if reason in recorded or len(recorded) >= _MAX_REASONS_PER_JOB:
            return
        recorded.add(reason)
        log.warning("job %s: message refused, the pipeline runs at full speed: %s", job_id, reason)
        self.history.write(ControlEventRecord(utc_at(now_ns), "refusal", "pipeline", job_id, None, reason))

    def keep(self, is_kept: Callable[[str], bool]) -> None:
        """Drop the refusals of jobs for which `is_kept` is false."""
        self._last = {key: last for key, last in self._last.items() if is_kept(key[0])}
        self._recorded = {job_id: reasons for job_id, reasons in self._recorded.items() if is_kept(job_id)}

    def status_fields(self, job_id: str) -> dict[str, Any] | None:
        """Return a job's last refusal: reason, age, and how many such messages in a row; None without one."""
        own = [last for (job, _), last in self._last.items() if job == job_id]
        if not own:
            return None
        last = max(own, key=lambda refusal: refusal.at_mono_ns)
        age_s = (time.monotonic_ns() - last.at_mono_ns) / _NS_PER_S
        return {"reason": last.reason, "age_s": age_s, "num_messages": last.num_messages}
