"""Measures how much the power of a host has swung in the last minute."""

import cmath
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from gpuenergyd.core.pipeline.power_swing import HIGHEST_HZ, LOWEST_HZ, RAMP_WINDOW_S, SwingFigures, harmonics_in_band

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


def swing_of_samples(powers_w: Sequence[float], period_s: float) -> SwingFigures | None:
    """Return how much measured power swings; None if the samples are shorter than two of the band's longest periods.

    Frequencies above half the sampling rate are not visible, and sensors smooth power.

    Args:
        powers_w: means over successive periods of the same length.
        period_s: length of these periods, at least half the shortest period of the band.
    """
    n, length_s = len(powers_w), len(powers_w) * period_s
    if n < 4 or length_s < 2 / LOWEST_HZ:
        return None
    mean_w = math.fsum(powers_w) / n
    # Hann's window, whose squares have a mean of 1.5, keeps slow changes from leaking into the band.
    tapered_w = [(w - mean_w) * (1 - math.cos(2 * math.pi * (k + 0.5) / n)) for k, w in enumerate(powers_w)]
    energy_w2 = math.fsum(w * w for w in tapered_w) / n - (math.fsum(tapered_w) / n) ** 2
    # The mean square is the energy of all harmonics, so subtract the few that lie below the band.
    for k in range(1, harmonics_in_band(length_s).start):
        turn = cmath.exp(-2j * math.pi * k / n)
        now, total = 1 + 0j, 0j
        for w in tapered_w:
            total += w * now
            now *= turn
        energy_w2 -= 2 * abs(total / n) ** 2
    in_window = max(1, round(RAMP_WINDOW_S / period_s))
    before_j = [0.0, *accumulate(powers_w)]
    means_w = [(before_j[k + in_window] - before_j[k]) / in_window for k in range(n - in_window + 1)]
    pairs = zip(means_w, means_w[in_window:], strict=False)
    return SwingFigures(
        peak_w=max(powers_w),
        trough_w=min(powers_w),
        mean_w=mean_w,
        ramp_w_per_s=max((abs(b - a) for a, b in pairs), default=0.0) / (in_window * period_s),
        band_energy_w2=max(0.0, energy_w2 / 1.5),
    )
