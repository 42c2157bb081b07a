"""Settling time of clock changes: the driver does not report it, so the GPU is read until it shows the new clock.

The effect is between the start of the last reading with the old clock and the end of the first with the new one, so
that a thread that is suspended within a reading widens the bracket but does not falsify it. Readings come every
millisecond at first, then at a fixed fraction of the time that has passed: a slow GPU is not read more often than a
quick one, and the relative uncertainty is constant.

An idle GPU stays at a low clock of its own and does not show a raised clock. So a reading without the new clock proves
that the change is not yet in effect only where the GPU runs above the requested clock, or at the previous lock.

Where the driver keeps clocks (see `clock_age`), a reading proves what it shows of some earlier instant only: one from
before the change proves nothing, and the bracket becomes as wide as clocks are old.
"""

from dataclasses import dataclass, field, replace

from gpuenergyd.gpu.device import GpuReading
from gpuenergyd.gpu.link.messages import ClockChangeReport
from gpuenergyd.gpu.worker.threads.clock_age import ClockAge

_SHORTEST_PAUSE_NS = 1_000_000
_READ_FRACTION = 8
_FIRST_LIMIT_NS = 40_000_000
_LAST_LIMIT_NS = 640_000_000
"""Clock changes of up to half a second are published; the limit matters for idle GPUs, which never show a raise."""


@dataclass(slots=True)
class EffectWatch:
    """Watches for the effect of one GPU's latest clock change."""

    age: ClockAge = field(default_factory=ClockAge)
    next_read_ns: int = 0
    """Instant of the next reading that the watch needs; 0 for none."""
    _change: ClockChangeReport | None = None
    _was_at_mhz: int | None = None
    _read_mhz: int | None = None
    """Clock of the newest reading."""
    _before_mhz: int | None = None
    """Clock of the last reading before the change."""
    _locked_mhz: int | None = None
    _was_idle: bool = False
    _was_pending: bool = False
    """Whether a reading after the call has not shown the new clock."""
    _limit_ns: int = _FIRST_LIMIT_NS

    def await_effect(self, change: ClockChangeReport) -> ClockChangeReport | None:
        """Start watching for a change; return the previous one if its effect was not observed."""
        replaced = self._change
        self._change = replace(change, previous_sm_clock_mhz=self._was_at_mhz, clock_age_ns=self.age.age_ns)
        if replaced is not None:
            self._locked_mhz = replaced.requested_sm_clock_mhz
        self._before_mhz = self._read_mhz
        self.next_read_ns = self.age.first_look_ns(change.returned_mono_ns)
        self._was_idle = self._was_pending = False
        return replaced

    def observe(self, reading: GpuReading) -> ClockChangeReport | None:
        """Process a reading; return the change once it is in effect or the time limit has passed."""
        since_ns = self.age.observe(reading)
        change, self._read_mhz = self._change, reading.sm_clock_mhz
        if change is None:
            self._was_at_mhz = reading.sm_clock_mhz
            return None
        passed_ns = reading.read_mono_ns - change.returned_mono_ns
        if passed_ns < 0:
            return None
        if _shows_replaced(reading, change, self._locked_mhz):
            change = replace(change, previous_sm_clock_mhz=self._locked_mhz)
        may_be_older = since_ns < change.called_mono_ns and reading.sm_clock_mhz == self._before_mhz
        if _shows(reading, change) and not may_be_older:
            change = replace(change, effective_mono_ns=reading.sm_clock_by_mono_ns or reading.read_mono_ns)
            if self._was_pending:
                self.age.has_shown(change, reading.read_mono_ns)
        else:
            self._was_pending = True
            if not may_be_older:
                change = self._not_yet(reading, change, since_ns)
            if passed_ns <= self._limit_ns + self.age.age_ns:
                self._change = change
                pause_ns = self.age.look_pause_ns or max(_SHORTEST_PAUSE_NS, passed_ns // _READ_FRACTION)
                self.next_read_ns = reading.read_mono_ns + pause_ns
                return None
            if not self._was_idle:
                self._limit_ns = min(2 * self._limit_ns, _LAST_LIMIT_NS)
        if self._was_idle:  # the instant of the effect is unknown
            change = replace(change, previous_sm_clock_mhz=None, unseen_until_mono_ns=None)
        self._change, self.next_read_ns = None, 0
        self._was_at_mhz, self._locked_mhz = reading.sm_clock_mhz, change.requested_sm_clock_mhz
        return replace(change, actual_sm_clock_mhz=reading.sm_clock_mhz)

    def _not_yet(self, reading: GpuReading, change: ClockChangeReport, since_ns: int) -> ClockChangeReport:
        """Return a change with what a reading without the new clock says of it."""
        if _is_pending(reading, change, self._locked_mhz):
            return replace(change, unseen_until_mono_ns=max(since_ns, change.returned_mono_ns))
        self._was_idle = True
        return change


def _shows_replaced(reading: GpuReading, change: ClockChangeReport, locked_mhz: int | None) -> bool:
    """Return whether a reading shows that the change before, which had not been seen, has taken effect by now."""
    return reading.sm_clock_mhz == locked_mhz not in {change.previous_sm_clock_mhz, change.requested_sm_clock_mhz}


def _shows(reading: GpuReading, change: ClockChangeReport) -> bool:
    """Return whether a reading shows the requested clock, or the highest that the power cap allows."""
    actual_mhz, was_at_mhz = reading.sm_clock_mhz, change.previous_sm_clock_mhz
    if actual_mhz is None:
        return False
    if was_at_mhz is None or was_at_mhz > change.requested_sm_clock_mhz:
        return actual_mhz <= change.requested_sm_clock_mhz
    has_risen_to_cap = bool(reading.is_power_capped) and actual_mhz > was_at_mhz
    return actual_mhz >= change.requested_sm_clock_mhz or has_risen_to_cap


def _is_pending(reading: GpuReading, change: ClockChangeReport, locked_mhz: int | None) -> bool:
    """Return whether a reading without the new clock proves that the change is not yet in effect."""
    actual_mhz, was_at_mhz = reading.sm_clock_mhz, change.previous_sm_clock_mhz
    if actual_mhz is None or was_at_mhz is None:
        return False
    if was_at_mhz > change.requested_sm_clock_mhz:
        return actual_mhz > change.requested_sm_clock_mhz
    return was_at_mhz == locked_mhz and actual_mhz >= was_at_mhz
