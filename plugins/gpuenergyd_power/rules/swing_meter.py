"""Measures how much the power of a host has swung in the last minute."""

import math
from collections import deque
from dataclasses import dataclass, field

from gpuenergyd.core.pipeline.power_swing import HIGHEST_HZ, SwingFigures, swing_of_samples

WINDOW_S = 60.0
"""Length of time that the figures cover."""
_SHORTEST_BIN_S = 0.5 / HIGHEST_HZ
"""Readings closer than this are averaged, because they show frequencies above the measured band."""
_LONGEST_GAP_S = 1.0
"""A longer time without a reading restarts the window."""


@dataclass(slots=True)
class SwingMeter:
    """Readings of the power of a host, averaged over bins of equal length."""

    period_s: float
    """Time between readings."""
    _bins_w: deque[float] = field(default_factory=deque)
    _bin_begin_s: float | None = None
    _sum_w: float = 0.0
    _num: int = 0

    @property
    def bin_s(self) -> float:
        """Length of the bins: the time between readings, or half the shortest period of the band."""
        return max(self.period_s, _SHORTEST_BIN_S)

    @property
    def highest_hz(self) -> float:
        """Highest frequency measured: half the rate of readings, or the upper end of the band."""
        return min(HIGHEST_HZ, 0.5 / self.bin_s)

    def observe(self, now_s: float, power_w: float | None) -> None:
        """Add a reading at a monotonic instant; None, if a GPU's power is unknown, restarts the window."""
        if power_w is None or not math.isfinite(power_w):
            self._begin(None)
            return
        if self._bin_begin_s is None or not 0 <= now_s - self._bin_begin_s <= _LONGEST_GAP_S + self.bin_s:
            self._begin(now_s)
        assert self._bin_begin_s is not None
        while now_s - self._bin_begin_s >= self.bin_s:
            # A bin without a reading gets the power of the previous bin.
            self._bins_w.append(self._sum_w / self._num if self._num else self._bins_w[-1])
            self._bin_begin_s += self.bin_s
            self._sum_w, self._num = 0.0, 0
        while len(self._bins_w) * self.bin_s > WINDOW_S:
            self._bins_w.popleft()
        self._sum_w += power_w
        self._num += 1

    def figures(self) -> SwingFigures | None:
        """Return the swing figures; None if readings are rare, or until they span two of the slowest periods."""
        return swing_of_samples(tuple(self._bins_w), self.bin_s) if self.bin_s <= _LONGEST_GAP_S else None

    def _begin(self, now_s: float | None) -> None:
        self._bins_w.clear()
        self._bin_begin_s, self._sum_w, self._num = now_s, 0.0, 0
