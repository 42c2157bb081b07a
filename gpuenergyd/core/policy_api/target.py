"""What performance is owed to the training job."""

import math
from dataclasses import dataclass

from gpuenergyd.errors import TargetError


@dataclass(frozen=True, slots=True)
class PerformanceTarget:
    """The iteration time a plan may take: a slowdown against full speed, or a time that is waited for anyway.

    With `straggler_time_s` the job waits until then whatever it does, so slowness up to it is free;
    with `max_slowdown_ratio` slowness is a permission, worth using only while it saves energy. `permitted_time_s`
    says the same as an absolute time and goes first.
    """

    max_slowdown_ratio: float = 0.0
    straggler_time_s: float | None = None
    permitted_time_s: float | None = None

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

    @property
    def is_forced(self) -> bool:
        """Whether the wait happens whatever we do."""
        return self.straggler_time_s is not None

    def iteration_time_s(self, baseline_time_s: float) -> float:
        """Return the iteration time owed, given the baseline's."""
        permitted_s = self.permitted_time_s
        if permitted_s is None:
            permitted_s = baseline_time_s * (1.0 + self.max_slowdown_ratio)
        return permitted_s if self.straggler_time_s is None else max(permitted_s, self.straggler_time_s)
