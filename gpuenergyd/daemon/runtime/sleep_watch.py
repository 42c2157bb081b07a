"""Detection of a suspended host: the monotonic clock stops during suspend, the boot-time clock does not."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_NS_PER_S = 1_000_000_000
_SHORTEST_SLEEP_S = 0.5
"""A smaller difference is due to reading the two clocks one after the other."""


def boottime_ns() -> int:
    """Return the time since boot, including time suspended."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class SleepWatch:
    """Compares the two clocks at each call; neither is affected by changes of the wall clock."""

    boottime_ns: Callable[[], int] = boottime_ns
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    _asleep_ns: int = field(default=-1)

    def slept_s(self) -> float:
        """Return how long the host was suspended since the last call, 0 if it was not."""
        asleep_ns = self.boottime_ns() - self.monotonic_ns()
        before_ns, self._asleep_ns = self._asleep_ns, asleep_ns
        slept_s = (asleep_ns - before_ns) / _NS_PER_S
        return slept_s if before_ns >= 0 and slept_s >= _SHORTEST_SLEEP_S else 0.0
