"""When a GPU that holds contexts without work is lowered, and when it is lifted: one object per GPU.

`observe` takes each reading and returns an order or None. Every sign of work lifts: a kernel, more power than an idle
GPU at that clock draws, another process, a job or a lease. A GPU that is only observed gets the same decisions and
never the orders, so its estimate is of what control would do.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from gpuenergyd_idle.rules.brackets import IdleBracket
from gpuenergyd_idle.rules.idle_spans import IdleSpans
from gpuenergyd_idle.rules.lost_time import LostTimeAccount
from gpuenergyd_idle.rules.saving import ModelSaving
from gpuenergyd_idle.rules.use import WORKING, GpuUse, UseReading, use_of

_LONGEST_GAP_S = 2.0
"""Time between two readings that is counted; more is unknown."""
_LEAST_PAUSE_S = 60.0
"""Least time between two lowerings of a GPU."""
_REVIEW_S = 60.0
"""Time after which the threshold is computed again."""
_SAME_CLOCK_MHZ = 16
_LONGEST_LIFT_S = 5.0
"""Time after which a lift counts as effective although no reading has shown it."""
_POWER_STEP_RATIO, _POWER_STEP_W = 1.25, 10.0
"""Power above that of the idle GPU at the lower clock that shows work."""
_FIRST_BRACKET_S = 60.0
"""Time lowered before the first bracket."""
_AFTER_WORK_S = 15.0
"""Time after work ends from which power readings count as those of an idle GPU."""


class Order(StrEnum):
    """What to do with a GPU now."""

    LOWER = "lower"
    LIFT = "lift"


@dataclass(slots=True)
class IdleGpu:
    """Decisions for one GPU. It never asks for the time: each reading brings its own."""

    low_mhz: int
    account: LostTimeAccount
    spans: IdleSpans
    saving: ModelSaving
    acts: bool = True
    """Whether orders are carried out."""
    use: GpuUse = GpuUse.UNKNOWN
    use_since_s: float = 0.0
    is_lowered: bool = False
    lowered_s: float = 0.0
    """Time at the lower clock, or what would have been."""
    num_lowerings: int = 0
    reason: str = "no reading yet"
    """Why the GPU is lowered or not."""
    _last: UseReading | None = None
    _idle_since_s: float | None = None
    _lowered_at_s: float = -_LEAST_PAUSE_S
    _bracket: IdleBracket = field(default_factory=IdleBracket)
    _next_bracket_s: float = 0.0
    _wake_from_s: float | None = None
    _threshold_s: float = 0.0
    _reviewed_s: float = float("-inf")

    @property
    def is_raised(self) -> bool:
        """Whether the clock of a lowered GPU is raised for a while, to measure."""
        return self.is_lowered and self._bracket.is_raised

    def observe(self, reading: UseReading, *, obstacle: str | None = None) -> Order | None:
        """Return what to do after a reading; an obstacle forbids to lower the GPU."""
        use, at_s = use_of(reading), reading.at_s
        passed_s = 0.0 if self._last is None else min(at_s - self._last.at_s, _LONGEST_GAP_S)
        before, self._last = self._last, reading
        if use is not self.use:
            self.use, self.use_since_s = use, at_s
        if use in WORKING:
            self.account.working_s += passed_s
        if self.is_lowered and not self._bracket.is_raised and not (self.acts and self._is_high(reading)):
            self.lowered_s += passed_s
        self._follow_wake(reading, passed_s)
        if use in WORKING or reading.is_of_job or self._has_power_step(reading):
            return self._wake(reading, before)
        if use is not GpuUse.IDLE_CONTEXT:
            self._idle_since_s = None
            if use is GpuUse.IDLE_EMPTY:
                self._observe_power(passed_s, at_s - self.use_since_s, reading)
            return self._lift("no process holds a context" if use is GpuUse.IDLE_EMPTY else "its use is unknown")
        if self._idle_since_s is None:
            self._idle_since_s = at_s
        if before is not None and (reading.num_processes or 0) > (before.num_processes or 0) and self.is_lowered:
            self._idle_since_s = at_s
            return self._lift("another process has come")
        return self._idle(reading, passed_s, obstacle)

    def lost_clock(self, reason: str) -> None:
        """Take note that the lower clock is gone, or could not be set."""
        self._lift(reason)

    # --- inside ---

    def _idle(self, reading: UseReading, passed_s: float, obstacle: str | None) -> Order | None:
        at_s = reading.at_s
        idle_s = at_s - (self._idle_since_s or 0.0)
        if not (self.is_lowered and self.acts):
            self._observe_power(passed_s, idle_s, reading)
        if self.is_lowered:
            return self._lift(obstacle) if obstacle else self._measure(reading)
        if at_s >= self._reviewed_s + _REVIEW_S and idle_s >= self.spans.after_s:
            self._threshold_s, self._reviewed_s = self.spans.threshold_s(at_s, self.account), at_s
        needed_s = max(self.spans.after_s, self._threshold_s)
        if obstacle:
            self.reason = obstacle
        elif self.saving.has_no_effect:
            self.reason = "lower clocks change nothing on this model while it is idle"
        elif not self.account.can_pay_wake(at_s):
            self.reason = "the account of lost time does not cover another wake"
        elif idle_s < needed_s:
            self.reason = f"lowered once it has been idle for {needed_s:.0f} s"
        elif at_s >= self._lowered_at_s + _LEAST_PAUSE_S:
            self.is_lowered, self._lowered_at_s, self.num_lowerings = True, at_s, self.num_lowerings + 1
            self._bracket.restart(at_s)
            self._next_bracket_s = max(self._next_bracket_s, at_s + _FIRST_BRACKET_S)
            self.reason = f"idle with a context: {self.low_mhz} MHz until work, a process, a job or a lease comes"
            return Order.LOWER
        return None

    def _observe_power(self, passed_s: float, idle_s: float, reading: UseReading) -> None:
        if reading.power_w is not None and idle_s >= _AFTER_WORK_S:
            self.saving.observe_idle(passed_s, reading.power_w, has_context=self.use is GpuUse.IDLE_CONTEXT)

    def _measure(self, reading: UseReading) -> Order | None:
        """Measure what lowering saves, by brackets while the GPU stays idle."""
        at_s, bracket = reading.at_s, self._bracket
        if not self.acts:
            return None
        bracket.observe(at_s, reading.power_w)
        if (found := bracket.result(at_s)) is not None:
            if not self._is_high(reading):  # else the lower clock is not in force, which says nothing of the model
                self.saving.add_bracket(*found)
            self._next_bracket_s = at_s + self.saving.bracket_period_s
            if self.saving.has_no_effect:
                return self._lift("lower clocks change nothing on this model while it is idle")
        if not bracket.is_settled(at_s):
            return None
        if bracket.is_raised:
            bracket.lower_clock(at_s)
            return Order.LOWER
        if at_s < self._next_bracket_s:
            return None
        bracket.raise_clock(at_s)
        self._next_bracket_s = float("inf")
        return Order.LIFT

    def _wake(self, reading: UseReading, before: UseReading | None) -> Order | None:
        """End an idle span; work that begins on a lowered GPU loses time until its clock has risen."""
        if self._idle_since_s is not None:
            self.spans.record(reading.at_s, reading.at_s - self._idle_since_s)
            self._idle_since_s = None
        if self.is_lowered and not self._bracket.is_raised:
            if self.acts:
                self._wake_from_s = (reading.at_s + (before or reading).at_s) / 2
            else:
                self.account.charge_assumed()
        return self._lift("a job or lease has it" if reading.has_job else "it works")

    def _lift(self, reason: str) -> Order | None:
        self.reason = reason
        if not self.is_lowered:
            return None
        self.is_lowered = False
        if self._next_bracket_s == float("inf"):  # the bracket under way is lost
            self._next_bracket_s = 0.0
        return None if self._bracket.is_raised else Order.LIFT

    def _follow_wake(self, reading: UseReading, passed_s: float) -> None:
        """Charge a wake once the clock has risen; both ends lie between two readings, whose age is the same."""
        if self._wake_from_s is None:
            return
        lift_s = reading.at_s - passed_s / 2 - self._wake_from_s
        if lift_s >= _LONGEST_LIFT_S or self._is_high(reading):
            self.account.charge(lift_s)
            self._wake_from_s = None

    def _is_high(self, reading: UseReading) -> bool:
        return reading.sm_clock_mhz is not None and reading.sm_clock_mhz > self.low_mhz + _SAME_CLOCK_MHZ

    def _has_power_step(self, reading: UseReading) -> bool:
        quiet_w = self._bracket.lowered_w if self.acts and self.is_lowered else None
        if quiet_w is None or reading.power_w is None:
            return False
        return reading.power_w > _POWER_STEP_RATIO * quiet_w + _POWER_STEP_W
