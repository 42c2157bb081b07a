"""Alignment of an external meter with the GPUs' power, and the level of measurement that a proof reaches.

A meter reports late, averages, and measures more than the GPUs: P_meter(t) = offset + gain * mean P_gpu(t - lag). For
each lag on a grid, gain and offset are fitted by least squares. The lag with the smallest residual is chosen, and a
parabola through it and its neighbors refines it. The signal is the change of power between arms and at starts and ends.

Levels are those of the EE HPC WG power measurement methodology (version 2.0). Level 1 requires the mean power over the
core phase, with at least one reading per second, of the nodes upstream of their power supplies. Level 2 requires the
whole run, and network and other subsystems, measured or estimated. Level 3 requires a revenue-grade meter that
integrates energy; no program can verify that, so it is never claimed. A proof that reads only GPU boards or CPU
packages reaches no level.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from gpuenergyd_prove.proof.measurements import PowerSample
from gpuenergyd_prove.proof.registration import MeterFacts

MAX_LAG_S = 60.0
_LEAST_SAMPLES = 20
_LEAST_CORRELATION = 0.8
_SURE_AT_SIGMA = 3.0
"""Half width of the stated errors in standard errors; large, because errors of neighboring readings are correlated."""
COVERS = ("node", "node-and-network", "components")
_LEVEL_1_PERIOD_S = 1.0
_TOLERANCE = 1.1
_LEAST_PHASE_S = 60.0
_WHOLE_RATIO = 0.99


@dataclass(frozen=True, slots=True)
class Alignment:
    """How a meter's readings follow the GPUs' power.

    The lag's error is three standard errors of the fit plus half a grid step; the gain's error includes its effect.
    """

    lag_s: float
    lag_error_s: float
    gain: float
    gain_error: float
    offset_w: float
    correlation: float
    num_samples: int

    @property
    def is_aligned(self) -> bool:
        """Whether the meter follows the GPUs closely enough to evaluate both over the same windows."""
        return self.correlation >= _LEAST_CORRELATION


@dataclass(frozen=True, slots=True)
class _MeterFit:
    left_ratio: float
    """Share of the variance of the readings that the GPUs' power does not explain."""
    gain: float
    offset_w: float
    correlation: float
    gain_error: float
    num_samples: int


PowerPair = tuple[Sequence[PowerSample], Sequence[PowerSample]]
"""Power of the GPUs and of a meter over the same block; between blocks, neither is known."""


def alignment(blocks: Sequence[PowerPair], *, max_lag_s: float = MAX_LAG_S) -> Alignment | None:
    """Return the alignment of a meter; None with fewer than 20 meter readings in blocks with GPU readings."""
    known = [(_RunningMean(gpu), meter) for gpu, meter in blocks if len(gpu) > 1 and len(meter) > 1]
    if sum(len(meter) for _, meter in known) < _LEAST_SAMPLES:
        return None
    window_s = median(b.at_s - a.at_s for _, meter in known for a, b in pairwise(meter))
    step_s = max(window_s / 4, 0.02)

    def fitted(lag_s: float) -> _MeterFit | None:
        return _fit(known, lag_s, window_s)

    fits = {k: fit for k in range(math.ceil(max_lag_s / step_s) + 1) if (fit := fitted(k * step_s)) is not None}
    if not fits:
        return None
    most = max(fit.num_samples for fit in fits.values())
    usable = {k: fit for k, fit in fits.items() if 2 * fit.num_samples >= most and fit.gain > 0}
    if not usable:
        return None
    best = min(usable, key=lambda k: usable[k].left_ratio)
    here = usable[best]
    lag_s, error_s = best * step_s, step_s
    if best - 1 in usable and best + 1 in usable:
        before, after = usable[best - 1].left_ratio, usable[best + 1].left_ratio
        bend = before - 2 * here.left_ratio + after
        if bend > 0:
            lag_s += step_s * (before - after) / (2 * bend)
            error_s = step_s * math.sqrt(2 * here.left_ratio / (bend * max(1, here.num_samples - 3)))
    fit = fitted(lag_s) or here
    lag_error_s = math.hypot(_SURE_AT_SIGMA * error_s, step_s / 2)
    # A slightly wrong lag blurs the GPUs' power and so lowers the gain.
    blurred = [other.gain for sign in (-1, 1) if (other := fitted(lag_s + sign * lag_error_s)) is not None]
    return Alignment(
        lag_s=lag_s,
        lag_error_s=lag_error_s,
        gain=fit.gain,
        gain_error=math.hypot(_SURE_AT_SIGMA * fit.gain_error, max((abs(g - fit.gain) for g in blurred), default=0.0)),
        offset_w=fit.offset_w,
        correlation=fit.correlation,
        num_samples=fit.num_samples,
    )


@dataclass(frozen=True, slots=True)
class MeasurementLevel:
    """The level, 0 (none) to 2, and what is missing for the next level."""

    level: int
    missing: str


def measurement_level(
    meters: Sequence[MeterFacts], *, period_s: float | None, covered_s: float, run_s: float
) -> MeasurementLevel:
    """Return the level reached.

    Args:
        meters: the external meters.
        period_s: median time between readings; None without readings.
        covered_s: length of the blocks with readings.
        run_s: length of all blocks.
    """
    outside = [meter for meter in meters if meter.covers != "components"]
    if not outside or period_s is None:
        return MeasurementLevel(0, "no meter upstream of the node's power supplies: GPU counters see the boards alone")
    if period_s > _LEVEL_1_PERIOD_S * _TOLERANCE:
        return MeasurementLevel(0, f"a reading every {period_s:.1f} s; one per second is needed")
    if covered_s < min(_LEAST_PHASE_S, run_s):
        return MeasurementLevel(0, f"readings cover {covered_s:.0f} s; the core phase, at least 60 s, is needed")
    if covered_s < _WHOLE_RATIO * run_s:
        return MeasurementLevel(1, f"readings cover {covered_s:.0f} of {run_s:.0f} s; level 2 needs the whole run")
    if not any(meter.covers == "node-and-network" for meter in outside):
        return MeasurementLevel(1, "network and storage are neither measured nor estimated")
    return MeasurementLevel(2, "level 3 needs a revenue-grade meter that integrates energy")


class _RunningMean:
    """Means of a power series between instants, from the integral of its linear interpolation."""

    def __init__(self, samples: Sequence[PowerSample]) -> None:
        self._at_s = [sample.at_s for sample in samples]
        self._power_w = [sample.power_w for sample in samples]
        self._until_j = [0.0]
        for left, right in pairwise(samples):
            mean_w = (left.power_w + right.power_w) / 2
            self._until_j.append(self._until_j[-1] + mean_w * (right.at_s - left.at_s))

    def between(self, from_s: float, to_s: float) -> float | None:
        """Return the mean power in watts; None outside the series."""
        if from_s < self._at_s[0] or to_s > self._at_s[-1]:
            return None
        return (self._integral(to_s) - self._integral(from_s)) / (to_s - from_s)

    def _integral(self, at_s: float) -> float:
        k = max(1, min(bisect_left(self._at_s, at_s), len(self._at_s) - 1))
        left_s, right_s = self._at_s[k - 1], self._at_s[k]
        share = (at_s - left_s) / (right_s - left_s)
        here_w = self._power_w[k - 1] + share * (self._power_w[k] - self._power_w[k - 1])
        return self._until_j[k - 1] + (self._power_w[k - 1] + here_w) / 2 * (at_s - left_s)


def _fit(
    blocks: Sequence[tuple[_RunningMean, Sequence[PowerSample]]], lag_s: float, window_s: float
) -> _MeterFit | None:
    pairs = [
        (gpu_w, sample.power_w)
        for means, meter in blocks
        for sample in meter
        if (gpu_w := means.between(sample.at_s - lag_s - window_s, sample.at_s - lag_s)) is not None
    ]
    if len(pairs) < _LEAST_SAMPLES:
        return None
    x_mean, y_mean = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    xx = math.fsum((x - x_mean) ** 2 for x, _ in pairs)
    yy = math.fsum((y - y_mean) ** 2 for _, y in pairs)
    xy = math.fsum((x - x_mean) * (y - y_mean) for x, y in pairs)
    if xx <= 0 or yy <= 0:
        return None
    gain = xy / xx
    left = max(0.0, 1 - gain * xy / yy)
    gain_error = math.sqrt(left * yy / max(1, len(pairs) - 3) / xx)
    correlation = xy / math.sqrt(xx * yy)
    return _MeterFit(left, gain, y_mean - gain * x_mean, correlation, gain_error, len(pairs))
