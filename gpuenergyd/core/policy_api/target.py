"""Iteration time targets of training jobs."""

import math
from dataclasses import dataclass, replace

from gpuenergyd.errors import TargetError

MAX_SLOWDOWN_RATIO = 1.0
"""Largest slowdown that may be permitted: iterations take twice as long."""
LARGE_SLOWDOWN_RATIO = 0.5
"""Larger slowdowns cause a warning, because they are likely a mistake, such as a percentage given as a ratio."""


def slowdown_problem(ratio: float) -> str | None:
    """Return what is wrong with a permitted slowdown, with the valid range; None if it is valid."""
    if 0.0 <= ratio <= MAX_SLOWDOWN_RATIO:
        return None
    return f"{ratio:g}: must be a ratio from 0 to {MAX_SLOWDOWN_RATIO:g}, e.g. 0.05 for 5 %"


@dataclass(frozen=True, slots=True)
class PerformanceTarget:
    """Longest iteration time of a plan: a slowdown against full speed, or the pace of a straggler.

    `max_slowdown_ratio` permits a slowdown, used only where it saves energy. `permitted_time_s` gives it as an
    absolute time and takes precedence. `straggler_time_s` is the time of the slowest replica at full speed; the job
    waits that long in any case, so slowing down to it is free. The permitted slowdown applies to the whole training and
    is added to the straggler's time, because the slowest replica uses it too. With `power_time_s` the host's power
    budget requires iterations to be at least that long, whatever is permitted.
    """

    max_slowdown_ratio: float = 0.0
    straggler_time_s: float | None = None
    permitted_time_s: float | None = None
    power_time_s: float | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_slowdown_ratio) and self.max_slowdown_ratio >= 0):
            raise TargetError(f"slowdown {self.max_slowdown_ratio} must be a finite ratio >= 0, e.g. 0.05 for 5 %")
        if self.straggler_time_s is not None and not (
            math.isfinite(self.straggler_time_s) and self.straggler_time_s > 0
        ):
            raise TargetError(f"straggler time {self.straggler_time_s} s must be finite and > 0")
        if self.permitted_time_s is not None and not (
            math.isfinite(self.permitted_time_s) and self.permitted_time_s > 0
        ):
            raise TargetError(f"target time {self.permitted_time_s} s must be finite and > 0")
        if self.power_time_s is not None and not (math.isfinite(self.power_time_s) and self.power_time_s > 0):
            raise TargetError(f"time of the power budget {self.power_time_s} s must be finite and > 0")

    @property
    def is_forced(self) -> bool:
        """Whether a straggler causes at least part of this time."""
        return self.straggler_time_s is not None

    @property
    def is_power_limited(self) -> bool:
        """Whether a power budget requires iterations slower than full speed."""
        return self.power_time_s is not None

    @property
    def fills_time(self) -> bool:
        """Whether iterations should last as long as the target even if a faster one needs less energy."""
        return self.is_forced or self.is_power_limited

    @property
    def own(self) -> "PerformanceTarget":
        """The target of the job itself, without straggler and power budget."""
        return replace(self, straggler_time_s=None, power_time_s=None)

    def iteration_time_s(self, baseline_time_s: float) -> float:
        """Return the target as an iteration time."""
        least_s = max(self.straggler_time_s or 0.0, self.power_time_s or 0.0)
        if self.permitted_time_s is not None:
            return max(self.permitted_time_s, least_s)
        return max(self._own_or_straggler_s(baseline_time_s) * (1.0 + self.max_slowdown_ratio), least_s)

    def permitted_ratio(self, baseline_time_s: float) -> float:
        """Return the permitted slowdown beyond full speed, or beyond the straggler's pace if there is one."""
        return self.iteration_time_s(baseline_time_s) / self._own_or_straggler_s(baseline_time_s) - 1.0

    def _own_or_straggler_s(self, baseline_time_s: float) -> float:
        return max(baseline_time_s, self.straggler_time_s or 0.0)
