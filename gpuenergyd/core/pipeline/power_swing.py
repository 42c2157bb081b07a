"""Power swings of a host: peak, trough, ramp, and the energy of the power signal from 0.1 to 20 Hz.

Synchronous training makes the power of whole data centers swing with its iterations. Grid operators name 0.1 to 20 Hz
as the critical frequencies, and limit ramps (arXiv 2508.14318, "Power Stabilization for AI Training Datacenters").

The band energy is that of Parseval's theorem: the mean square, in watts squared, of the part of the wave in the band,
so its square root is the RMS power of the swing. A periodic wave with Fourier coefficients c_k at k / T has the band
energy 2 * sum of |c_k|^2 over the harmonics k / T in the band.
"""

import cmath
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise

from gpuenergyd.core.pipeline.timeline import Timeline

LOWEST_HZ, HIGHEST_HZ = 0.1, 20.0
"""The critical frequencies, both included."""
RAMP_WINDOW_S = 1.0
"""Ramps are computed between means over this time, because each step of the unsmoothed wave is an infinite ramp."""
_SAME_RATIO = 1e-9


@dataclass(frozen=True, slots=True)
class SwingFigures:
    """Size of a wave's swing: highest and lowest power, steepest ramp up or down, and energy in the critical band."""

    peak_w: float
    trough_w: float
    mean_w: float
    ramp_w_per_s: float
    """Largest difference between the mean powers of two successive seconds."""
    band_energy_w2: float
    """Mean square of the wave from 0.1 to 20 Hz, in watts squared."""

    @property
    def band_rms_w(self) -> float:
        """RMS power of the wave from 0.1 to 20 Hz."""
        return math.sqrt(self.band_energy_w2)


class SwingFigure(StrEnum):
    """Names of a plan's figures for the predicted power swing of its job's GPUs."""

    PEAK = "predicted_peak_w"
    TROUGH = "predicted_trough_w"
    RAMP = "predicted_ramp_w_per_s"
    BAND_RMS = "predicted_swing_rms_w"


@dataclass(frozen=True, slots=True)
class PlannedSwing:
    """Swing of a plan, of full speed, and of the least-energy plan from which the flatter plan was made."""

    planned: SwingFigures
    full_speed: SwingFigures
    least_energy: SwingFigures


_SAME_TIME_S = 1e-9
"""Events closer than this are simultaneous, so that an instruction does not overlap with the one before it."""


@dataclass(frozen=True, slots=True)
class PowerWave:
    """Total power of the GPUs over one iteration, including waits; the wave repeats without a gap.

    `powers_w[k]` applies from `times_s[k]` to `times_s[k + 1]`; the last of `times_s` is the end of the iteration.
    """

    times_s: tuple[float, ...]
    powers_w: tuple[float, ...]

    @property
    def iteration_time_s(self) -> float:
        return self.times_s[-1]

    @property
    def energy_j(self) -> float:
        return sum(self._step_energies_j())

    @property
    def mean_w(self) -> float:
        """Mean power over the iteration."""
        return self.energy_j / self.iteration_time_s if self.iteration_time_s > 0 else 0.0

    @property
    def peak_w(self) -> float:
        """Largest power at any instant."""
        return max(self.powers_w, default=0.0)

    def peak_mean_w(self, window_s: float) -> float:
        """Return the largest mean power over any window of this length, which may span iterations.

        Args:
            window_s: length in seconds; 0 means the instantaneous peak.
        """
        if window_s <= 0 or self.iteration_time_s <= 0:
            return self.peak_w
        whole, rest_s = divmod(window_s, self.iteration_time_s)
        if rest_s <= _SAME_TIME_S:
            return self.mean_w
        before_j = [0.0, *accumulate(self._step_energies_j())]
        # The mean is piecewise linear in the window's start, so its maximum has an end of the window at a step.
        starts_s = self.times_s[:-1]
        begins_s = [*starts_s, *((time_s - rest_s) % self.iteration_time_s for time_s in starts_s)]
        in_rest_j = (self._until_j(at_s + rest_s, before_j) - self._until_j(at_s, before_j) for at_s in begins_s)
        return (whole * self.energy_j + max(in_rest_j)) / window_s

    def _step_energies_j(self) -> list[float]:
        return [w * (b - a) for w, (a, b) in zip(self.powers_w, pairwise(self.times_s), strict=True)]

    def _until_j(self, at_s: float, before_j: Sequence[float]) -> float:
        """Return the energy from the start of an iteration to a time within it or the next one."""
        whole = at_s >= self.iteration_time_s
        at_s -= whole * self.iteration_time_s
        step = min(bisect_right(self.times_s, at_s), len(self.powers_w)) - 1
        return whole * before_j[-1] + before_j[step] + self.powers_w[step] * (at_s - self.times_s[step])


def power_wave(planned: Timeline, powers_w: Sequence[float], blocking_power_w: float) -> PowerWave:
    """Return the power wave of a timeline.

    Args:
        planned: the timeline; ranks wait whenever no instruction runs on them.
        powers_w: mean power of each node of the timeline's graph while it runs.
        blocking_power_w: power of a waiting rank.
    """
    changes = sorted(
        change
        for span, power_w in zip(planned.spans, powers_w, strict=True)
        for change in ((span.start_s, power_w - blocking_power_w), (span.end_s, blocking_power_w - power_w))
    )
    times_s, levels_w = [0.0], [planned.num_ranks * blocking_power_w]
    for at_s, change_w in changes:
        if at_s > times_s[-1] + _SAME_TIME_S:
            times_s.append(at_s)
            levels_w.append(levels_w[-1])
        levels_w[-1] += change_w
    if planned.iteration_time_s > times_s[-1] + _SAME_TIME_S:
        return PowerWave((*times_s, planned.iteration_time_s), tuple(levels_w))
    # The last step is the end of the iteration.
    return PowerWave((*times_s[:-1], planned.iteration_time_s), tuple(levels_w[:-1]))


def swing_of(wave: PowerWave) -> SwingFigures:
    """Return how much a periodic wave swings."""
    return SwingFigures(
        peak_w=wave.peak_w,
        trough_w=min(wave.powers_w, default=0.0),
        mean_w=wave.mean_w,
        ramp_w_per_s=steepest_ramp_w_per_s(wave, RAMP_WINDOW_S),
        band_energy_w2=band_energy_w2(wave),
    )


def harmonics_in_band(period_s: float, low_hz: float = LOWEST_HZ, high_hz: float = HIGHEST_HZ) -> range:
    """Return the harmonics of a period within a frequency band, limits included, without the mean."""
    first = max(1, math.ceil(low_hz * period_s * (1 - _SAME_RATIO)))
    return range(first, math.floor(high_hz * period_s * (1 + _SAME_RATIO)) + 1)


def band_energy_w2(wave: PowerWave, low_hz: float = LOWEST_HZ, high_hz: float = HIGHEST_HZ) -> float:
    """Return the energy of a periodic wave in a frequency band, in watts squared; exact, without sampling."""
    period_s = wave.iteration_time_s
    if period_s <= 0:
        return 0.0
    numbers = harmonics_in_band(period_s, low_hz, high_hz)
    if not numbers:
        return 0.0
    sums = [0j] * len(numbers)
    # A step function's coefficient is the sum over its steps of step * exp(-i w t) / (i w T).
    powers_w = (wave.powers_w[-1], *wave.powers_w)
    for at_s, (before_w, after_w) in zip(wave.times_s, pairwise(powers_w), strict=False):
        turn = cmath.exp(-2j * math.pi * at_s / period_s)
        now = (after_w - before_w) * turn ** numbers[0]
        for k in range(len(sums)):
            sums[k] += now
            now *= turn
    return math.fsum(abs(amplitude) ** 2 / (2 * (math.pi * k) ** 2) for k, amplitude in zip(numbers, sums, strict=True))


def steepest_ramp_w_per_s(wave: PowerWave, window_s: float) -> float:
    """Return the largest difference between mean powers of two successive windows, divided by the window length."""
    period_s = wave.iteration_time_s
    if period_s <= 0:
        return 0.0
    before_j = [0.0, *accumulate(w * (b - a) for w, (a, b) in zip(wave.powers_w, pairwise(wave.times_s), strict=True))]

    def until_j(at_s: float) -> float:
        whole, rest_s = divmod(at_s, period_s)
        step = min(bisect_right(wave.times_s, rest_s), len(wave.powers_w)) - 1
        return whole * before_j[-1] + before_j[step] + wave.powers_w[step] * (rest_s - wave.times_s[step])

    # The difference is piecewise linear in time, so its maximum has an end of a window at a step.
    meets_s = {time_s + shift_s for time_s in wave.times_s[:-1] for shift_s in (0.0, window_s, -window_s)}
    steepest_j = max(abs(until_j(t + window_s) - 2 * until_j(t) + until_j(t - window_s)) for t in meets_s)
    return steepest_j / window_s**2
