"""Reset watch: resets by commands whose effect an idle GPU has not shown, watched until the GPU computes.

A sample above the lock confirms a reset. A GPU that computes at the lock for 2 s, although the driver names no other
reason, is reset again, at growing intervals. Nothing is done while the GPU shows neither.
"""

import threading
from dataclasses import dataclass
from enum import StrEnum

from gpuenergyd.gpu.link.messages import GpuSample

_SETTLED_AFTER_NS = 1_000_000_000
"""A lock that was under way shows by then: changes that take up to half a second are published."""
_HELD_NS = 2_000_000_000
_FIRST_PAUSE_NS = 2_000_000_000
_LAST_PAUSE_NS = 60_000_000_000
_BELOW_MHZ = 32
"""A lock keeps the clock at most two steps below itself and its tolerance."""


class ResetEvidence(StrEnum):
    """What a sample says of a reset that has not been confirmed."""

    CONFIRMED = "confirmed"
    WITHOUT_EFFECT = "without effect"


@dataclass(slots=True)
class _Awaited:
    """One GPU: the clock that it must exceed, and since when it has been held there under load."""

    above_mhz: int
    since_mono_ns: int
    held_since_mono_ns: int | None = None
    pause_ns: int = _FIRST_PAUSE_NS
    not_before_mono_ns: int = 0


class ResetWatch:
    """The resets that are unconfirmed, by GPU; methods may be called on any thread."""

    def __init__(self) -> None:
        self._awaited: dict[str, _Awaited] = {}
        self._guard = threading.Lock()

    def expect(self, gpu_uuid: str, above_sm_clock_mhz: int, now_mono_ns: int) -> None:
        """Expect a GPU above a clock; a repetition keeps the pause until the next one."""
        with self._guard:
            known = self._awaited.get(gpu_uuid)
            awaited = self._awaited[gpu_uuid] = _Awaited(above_sm_clock_mhz, now_mono_ns)
            if known is not None:
                awaited.pause_ns, awaited.not_before_mono_ns = known.pause_ns, known.not_before_mono_ns

    def forget(self, gpu_uuid: str) -> None:
        """Stop watching a GPU: another lock is in force, or nothing has to be confirmed."""
        with self._guard:
            self._awaited.pop(gpu_uuid, None)

    def is_replaced(self, gpu_uuid: str, locked_mono_ns: int | None) -> bool:
        """Return, once, whether a lock was set after the reset, which then needs no proof any more."""
        with self._guard:
            awaited = self._awaited.get(gpu_uuid)
            if awaited is None or locked_mono_ns is None or locked_mono_ns < awaited.since_mono_ns:
                return False
            del self._awaited[gpu_uuid]
            return True

    def is_watched(self, gpu_uuid: str) -> bool:
        """Return whether the last reset of a GPU is unconfirmed."""
        return gpu_uuid in self._awaited

    def evidence(self, sample: GpuSample) -> ResetEvidence | None:
        """Return what a sample proves; a reset without effect is reported again only after a pause."""
        with self._guard:
            awaited = self._awaited.get(sample.gpu_uuid)
            clock_mhz, now_ns = sample.sm_clock_mhz, sample.read_mono_ns
            if awaited is None or clock_mhz is None or now_ns < awaited.since_mono_ns + _SETTLED_AFTER_NS:
                return None
            if clock_mhz > awaited.above_mhz:
                awaited.since_mono_ns = now_ns  # reported again after a second, if it is still watched then
                return ResetEvidence.CONFIRMED
            if sample.is_clock_limited or sample.is_power_capped or clock_mhz < awaited.above_mhz - _BELOW_MHZ:
                awaited.held_since_mono_ns = None
                return None
            if awaited.held_since_mono_ns is None:
                awaited.held_since_mono_ns = now_ns
            if now_ns < max(awaited.held_since_mono_ns + _HELD_NS, awaited.not_before_mono_ns):
                return None
            awaited.held_since_mono_ns = None
            awaited.not_before_mono_ns = now_ns + awaited.pause_ns
            awaited.pause_ns = min(2 * awaited.pause_ns, _LAST_PAUSE_NS)
            return ResetEvidence.WITHOUT_EFFECT
