"""When a clock that was set is effective: the driver does not say, so the GPU is looked at until it shows.

Between the last look without the new clock and the first with it lies the instant. Looks come every millisecond at
first, then further apart, always a fixed share of the time that has passed: a slow GPU is not looked at more often
than a quick one, and what is not known is the same share of what is.

An idle GPU rests at a low clock of its own and shows no raise. So a look without the new clock says that the change
is still on its way only where the GPU runs faster than was asked for, or at the clock that was locked before.
"""

from dataclasses import dataclass, replace

from gpuenergyd.gpu.device import GpuReading
from gpuenergyd.gpu.link.messages import ClockChange

_FIRST_LOOKS_NS = 1_000_000
_LOOK_SHARE = 8
_FIRST_LIMIT_NS = 40_000_000
_LAST_LIMIT_NS = 640_000_000
"""Clock changes of up to half a second have been published; an idle GPU never shows a raise, and somebody waits."""


@dataclass(slots=True)
class EffectWatch:
    """The clock change of one GPU whose effect is awaited; a newer one replaces it."""

    next_read_ns: int = 0
    """When the GPU should be read for this; 0 for never."""
    _change: ClockChange | None = None
    _was_at_mhz: int | None = None
    _locked_mhz: int | None = None
    _was_idle: bool = False
    _limit_ns: int = _FIRST_LIMIT_NS

    def await_effect(self, change: ClockChange) -> ClockChange | None:
        """Watch for a change from now on; return the one before it if that was not seen to arrive."""
        replaced, self._change = self._change, replace(change, previous_sm_clock_mhz=self._was_at_mhz)
        if replaced is not None:
            self._locked_mhz = replaced.requested_sm_clock_mhz
        self.next_read_ns = change.returned_mono_ns
        self._was_idle = False
        return replaced

    def observe(self, reading: GpuReading) -> ClockChange | None:
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
            if _is_on_its_way(reading, change, self._locked_mhz):
                change = replace(change, unseen_until_mono_ns=reading.read_mono_ns)
            else:
                self._was_idle = True
            if passed_ns <= self._limit_ns:
                self._change = change
                self.next_read_ns = reading.read_mono_ns + max(_FIRST_LOOKS_NS, passed_ns // _LOOK_SHARE)
                return None
            if not self._was_idle:
                self._limit_ns = min(2 * self._limit_ns, _LAST_LIMIT_NS)
        if self._was_idle:  # when the clock was there to be used, nobody knows
            change = replace(change, previous_sm_clock_mhz=None, unseen_until_mono_ns=None)
        self._change, self.next_read_ns = None, 0
        self._was_at_mhz, self._locked_mhz = reading.sm_clock_mhz, change.requested_sm_clock_mhz
        return replace(change, actual_sm_clock_mhz=reading.sm_clock_mhz)


def _shows(reading: GpuReading, change: ClockChange) -> bool:
    """Return whether a reading shows the requested clock, as far as the GPU will ever show it."""
    actual_mhz, was_at_mhz = reading.sm_clock_mhz, change.previous_sm_clock_mhz
    if actual_mhz is None:
        return False
    if was_at_mhz is None or was_at_mhz > change.requested_sm_clock_mhz:
        return actual_mhz <= change.requested_sm_clock_mhz
    has_risen_to_cap = bool(reading.is_power_capped) and actual_mhz > was_at_mhz
    return actual_mhz >= change.requested_sm_clock_mhz or has_risen_to_cap


def _is_on_its_way(reading: GpuReading, change: ClockChange, locked_mhz: int | None) -> bool:
    """Return whether the GPU is visibly slow to obey, where the new clock does not show."""
    actual_mhz, was_at_mhz = reading.sm_clock_mhz, change.previous_sm_clock_mhz
    if actual_mhz is None or was_at_mhz is None:
        return False
    if was_at_mhz > change.requested_sm_clock_mhz:
        return actual_mhz > change.requested_sm_clock_mhz
    return was_at_mhz == locked_mhz and actual_mhz >= was_at_mhz
