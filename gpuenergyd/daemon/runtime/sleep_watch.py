"""Noticing that the host slept: the monotonic clock stands still meanwhile, the boot-time clock goes on."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_NS_PER_S = 1_000_000_000
_SHORTEST_SLEEP_S = 0.5
"""Below this the two clocks were only read apart."""


def boottime_ns() -> int:
    """Return the time since boot, sleep included."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass(slots=True)
class SleepWatch:
    """Compares the two clocks each time it is asked; neither knows of the wall clock's jumps."""

    boottime_ns: Callable[[], int] = boottime_ns
    monotonic_ns: Callable[[], int] = time.monotonic_ns
    _asleep_ns: int = field(default=-1)

    def slept_s(self) -> float:
        """Return how long the host has slept since this was asked last, 0 when it did not."""
        asleep_ns = self.boottime_ns() - self.monotonic_ns()
        before_ns, self._asleep_ns = self._asleep_ns, asleep_ns
        slept_s = (asleep_ns - before_ns) / _NS_PER_S
        return slept_s if before_ns >= 0 and slept_s >= _SHORTEST_SLEEP_S else 0.0
