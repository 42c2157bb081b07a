"""When a clock that was set is effective: the driver does not say, so the GPU is looked at until it shows.

Between the last look without the new clock and the first with it lies the instant. Looks come every millisecond at
first, then further apart, always a fixed share of the time that has passed: a slow GPU is not looked at more often
than a quick one, and what is not known is the same share of what is.
"""

from dataclasses import dataclass, replace

from gpuenergyd.gpu.device import GpuReading
from gpuenergyd.gpu.link_messages import ClockSet

_FIRST_LOOKS_NS = 1_000_000
_LOOK_SHARE = 8
_FIRST_LIMIT_NS = 40_000_000
_LAST_LIMIT_NS = 640_000_000
"""Clock changes of up to half a second have been published; an idle GPU never shows a raise, and somebody waits."""


@dataclass(slots=True)
class EffectWatch:
    """The clock change of one GPU whose effect is awaited; a newer one replaces it."""

    next_look_ns: int = 0
    """When the GPU should be read for this; 0 for never."""
    _change: ClockSet | None = None
    _was_at_mhz: int | None = None
    _limit_ns: int = _FIRST_LIMIT_NS

    def await_effect(self, change: ClockSet) -> ClockSet | None:
        """Watch for a change from now on; return the one before it if that was not seen to arrive."""
        overtaken, self._change = self._change, replace(change, previous_sm_clock_mhz=self._was_at_mhz)
        self.next_look_ns = change.returned_mono_ns
        return overtaken

    def take(self, reading: GpuReading) -> ClockSet | None:
        """Take a reading; return the awaited change once it shows, or when it has had its time."""
        change = self._change
        if change is None:
            self._was_at_mhz = reading.sm_clock_mhz
            return None
        passed_ns = reading.read_mono_ns - change.returned_mono_ns
        if passed_ns < 0:
            return None
        if _shows(reading, change):
            change = replace(change, effective_mono_ns=reading.read_mono_ns)
        else:
            change = replace(change, unseen_until_mono_ns=reading.read_mono_ns)
            if passed_ns <= self._limit_ns:
                self._change = change
                self.next_look_ns = reading.read_mono_ns + max(_FIRST_LOOKS_NS, passed_ns // _LOOK_SHARE)
                return None
            if _is_still_above(reading, change):
                self._limit_ns = min(2 * self._limit_ns, _LAST_LIMIT_NS)
        self._change, self.next_look_ns = None, 0
        self._was_at_mhz = reading.sm_clock_mhz
        return replace(change, actual_sm_clock_mhz=reading.sm_clock_mhz)


def _shows(reading: GpuReading, change: ClockSet) -> bool:
    """Return whether a reading shows the requested clock, as far as the GPU will ever show it."""
    actual_mhz, was_at_mhz = reading.sm_clock_mhz, change.previous_sm_clock_mhz
    if actual_mhz is None:
        return False
    if was_at_mhz is None or was_at_mhz > change.requested_sm_clock_mhz:
        return actual_mhz <= change.requested_sm_clock_mhz
    has_risen_to_cap = bool(reading.is_power_capped) and actual_mhz > was_at_mhz
    return actual_mhz >= change.requested_sm_clock_mhz or has_risen_to_cap


def _is_still_above(reading: GpuReading, change: ClockSet) -> bool:
    """Return whether the GPU is visibly slow to obey: a raise that does not show may be an idle GPU's."""
    return reading.sm_clock_mhz is not None and reading.sm_clock_mhz > change.requested_sm_clock_mhz
