"""What a lower clock saves on an idle GPU: measured by brackets, or estimated before anything was lowered.

A bracket is the mean power of an idle GPU without the lower clock, less that of the seconds before and after with it.
GPUs cool down after work, so a comparison of before and after alone would count that as a saving.
"""

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev

from gpuenergyd.core.job.measurements.savings import student_quantile

CONFIDENCE = 0.95
_NUM_BEFORE_STOP = 4
_NUM_WANTED = 6
_MAX_KEPT = 64
_LEAST_SAVING_W, _LEAST_SAVING_RATIO = 2.0, 0.02
"""A saving that is certainly below these counts as none."""
_CLOSE_RATIO = 0.1
"""Half width of the interval, relative to the mean, that is exact enough."""
_OFTEN_S, _SELDOM_S = 600.0, 6 * 3600.0
_ASSUMED_RATIO = (0.2, 0.44, 0.6)
"""Saved part of the power with a context: that of a V100 from 1,530 to 405 MHz (Constantinescu, Senator, Atienza:
GridPilot, CC-BY-4.0) in an assumed range."""
_DROP_RANGE = (0.5, 1.2)
"""Assumed range, relative to the smaller and the greater of two figures: the V100's part, and what a GPU of the model
draws less without a context. The lowest clock is one part of the latter state, and a context keeps others awake."""


@dataclass(frozen=True, slots=True)
class IdleSaving:
    """Watts that a lower clock saves on one idle GPU, with a range and what it is based on."""

    mean_w: float
    low_w: float
    high_w: float
    basis: str

    def text(self) -> str:
        """Return `41 W (38 to 44), 6 brackets`."""
        return f"{self.mean_w:.0f} W ({self.low_w:.0f} to {self.high_w:.0f}), {self.basis}"


@dataclass(slots=True)
class ModelSaving:
    """Brackets and mean idle powers of one GPU model."""

    brackets_w: list[float] = field(default_factory=list)
    measured: IdleSaving | None = None
    """The measured saving; None before two brackets."""
    has_no_effect: bool = False
    """Whether a lower clock certainly saves next to nothing on this model."""
    _energy_j: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})
    """Energy of idle time at full clocks, with and without a context."""
    _time_s: dict[bool, float] = field(default_factory=lambda: {True: 0.0, False: 0.0})

    def observe_idle(self, time_s: float, power_w: float, *, has_context: bool) -> None:
        """Take note of the power of idle time at full clocks."""
        self._time_s[has_context] += time_s
        self._energy_j[has_context] += power_w * time_s

    def add_bracket(self, raised_w: float, lowered_w: float) -> None:
        self.brackets_w = [*self.brackets_w, raised_w - lowered_w][-_MAX_KEPT:]
        num = len(self.brackets_w)
        if num < 2:
            return
        mean_w = fmean(self.brackets_w)
        half_w = student_quantile(0.5 + CONFIDENCE / 2, num - 1) * stdev(self.brackets_w) / math.sqrt(num)
        self.measured = IdleSaving(mean_w, mean_w - half_w, mean_w + half_w, f"{num} brackets")
        least_w = max(_LEAST_SAVING_W, _LEAST_SAVING_RATIO * raised_w)
        self.has_no_effect = num >= _NUM_BEFORE_STOP and self.measured.high_w < least_w

    @property
    def bracket_period_s(self) -> float:
        """How long after the last bracket the next one is due."""
        measured = self.measured
        if measured is None or len(self.brackets_w) < _NUM_WANTED:
            return _OFTEN_S
        is_close = measured.high_w - measured.mean_w <= _CLOSE_RATIO * abs(measured.mean_w)
        return _SELDOM_S if is_close else _OFTEN_S

    def estimate(self) -> IdleSaving | None:
        """Return the measured saving, otherwise one from idle powers; None while the model was not idle."""
        if (measured := self.measured) is not None:
            return measured
        if not self._time_s[True]:
            return None
        context_w = self._energy_j[True] / self._time_s[True]
        low, mean, high = (ratio * context_w for ratio in _ASSUMED_RATIO)
        if not self._time_s[False]:
            return IdleSaving(mean, low, high, f"{context_w:.0f} W with a context, and a V100's table")
        empty_w = self._energy_j[False] / self._time_s[False]
        drop_w = max(0.0, context_w - empty_w)
        low, high = _DROP_RANGE[0] * min(drop_w, mean), _DROP_RANGE[1] * max(drop_w, mean)
        basis = f"{context_w:.0f} W with and {empty_w:.0f} W without a context, and a V100's table"
        return IdleSaving((drop_w + mean) / 2, low, high, basis)
