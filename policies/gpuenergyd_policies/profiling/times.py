"""How long each kind of instruction takes at every clock, from a few clocks and from instructions that changed clock.

An instruction that ran in shares of different clocks satisfies sum(share / t(clock)) = 1. The unknowns are the log
times at the measured clocks; between them log time is interpolated monotonically over the clock (PCHIP), never by a
formula, because an error in time costs more than one in energy. Where a power cap holds the clock down, time stops
falling: the bend is where the line of the uncapped clocks (time over 1 / clock) reaches the capped time, and becomes
a knot of its own, since interpolation across it is wrong on both sides.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator
from scipy.optimize import least_squares
from sklearn.isotonic import isotonic_regression

from gpuenergyd.core.observation import InstructionSample, IterationObservation
from gpuenergyd.core.pipeline import InstructionClass

FloatArray = NDArray[np.float64]

_TIME_NOISE_RATIO = 0.003
_MIN_SHARE_RATIO = 0.02
"""Shares smaller than this of an instruction are rounding noise of two clocks, not a measurement."""
_ON_THE_LINE_RATIO = 0.015
_CAPPED_RATIO = 0.03
"""How far above the line of the lower clocks a time must lie before a cap explains it better than curvature does."""
_MIN_CAPPED_KNOTS = 2
_FLAT_RATIO = 0.01
"""A cap makes the times of several clocks equal; one time off the line alone is a disturbed measurement."""


@dataclass(frozen=True, slots=True)
class TimeCurve:
    """Time of one class over the clock, flat above the last knot.

    `cap_mhz` is the clock a power cap holds it to, None where none was seen.
    """

    knots_mhz: tuple[float, ...]
    knot_times_s: tuple[float, ...]
    cap_mhz: float | None = None

    @property
    def lowest_mhz(self) -> float:
        """The lowest measured clock: below it nothing is known, and extrapolation overshoots deadlines."""
        return self.knots_mhz[0]

    def times_s(self, sm_clocks_mhz: Sequence[float]) -> FloatArray:
        """Return the times at some clocks."""
        return _interpolate(sm_clocks_mhz, np.array(self.knots_mhz), np.array(self.knot_times_s))

    def effective_mhz(self, sm_clock_mhz: float) -> float:
        """Return the clock the GPU really runs this at."""
        return float(sm_clock_mhz) if self.cap_mhz is None else min(float(sm_clock_mhz), self.cap_mhz)


def fit_times(observations: Sequence[IterationObservation]) -> Mapping[InstructionClass, TimeCurve]:
    """Return the curve of every class that was timed."""
    samples: dict[InstructionClass, list[InstructionSample]] = defaultdict(list)
    for observation in observations:
        for sample in observation.instruction_samples:
            samples[InstructionClass(sample.pp_rank, sample.kind, sample.chunk_index)].append(sample)
    return {key: _with_bend(*_fit_class_times(members)) for key, members in samples.items()}


def _with_bend(knots_mhz: FloatArray, times_s: FloatArray) -> TimeCurve:
    """Return the curve through the knots, with a knot at the bend where the upper ones are capped."""
    plain = TimeCurve(tuple(knots_mhz.tolist()), tuple(times_s.tolist()))
    num_on_line = 2
    if len(knots_mhz) <= num_on_line:
        return plain
    while num_on_line < len(knots_mhz):
        slope, offset_s = np.polyfit(1 / knots_mhz[:num_on_line], times_s[:num_on_line], 1)
        expected_s = offset_s + slope / knots_mhz[num_on_line]
        if abs(times_s[num_on_line] / expected_s - 1) > _ON_THE_LINE_RATIO:
            break
        num_on_line += 1
    expected_s = offset_s + slope / knots_mhz
    capped = np.flatnonzero(times_s > (1 + _CAPPED_RATIO) * expected_s)
    if slope <= 0 or len(capped) < _MIN_CAPPED_KNOTS or np.ptp(times_s[capped]) > _FLAT_RATIO * times_s[-1]:
        return plain
    capped_s = float(np.mean(times_s[capped[0] :]))
    cap_mhz = float(slope / (capped_s - offset_s))
    below = knots_mhz < cap_mhz
    if not below.any() or cap_mhz >= knots_mhz[-1]:
        return plain
    return TimeCurve(
        knots_mhz=(*knots_mhz[below].tolist(), cap_mhz),
        knot_times_s=(*np.maximum(times_s[below], capped_s).tolist(), capped_s),
        cap_mhz=cap_mhz,
    )


def _fit_class_times(samples: Sequence[InstructionSample]) -> tuple[FloatArray, FloatArray]:
    """Return (clocks ascending in MHz, times in s) of one class at its measured clocks."""
    mostly: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for sample in samples:
        main = max(sample.shares, key=lambda share: share.time_s)
        mostly[main.sm_clock_mhz].append((sample.time_s, sample.count))
    knots = np.array(sorted(mostly), dtype=float)
    start = np.array(
        [np.average([t for t, _ in mostly[int(k)]], weights=[c for _, c in mostly[int(k)]]) for k in knots]
    )
    shares, weights = [], []
    for sample in samples:
        kept = [s for s in sample.shares if s.time_s >= _MIN_SHARE_RATIO * sample.time_s]
        rest_s = sample.time_s - sum(s.time_s for s in kept)
        shares.append([(s.sm_clock_mhz, s.time_s + rest_s / len(kept)) for s in kept])
        weights.append(np.sqrt(sample.count))
    clocks = np.array([clock for row in shares for clock, _ in row], dtype=float)
    spent_s = np.array([time_s for row in shares for _, time_s in row])
    row_of = np.repeat(np.arange(len(shares)), [len(row) for row in shares])
    weight = np.array(weights, dtype=np.float64) / _TIME_NOISE_RATIO

    def residuals(log_times: FloatArray) -> FloatArray:
        progress = spent_s / np.asarray(_interpolate(clocks, knots, np.exp(log_times)))
        total = np.bincount(row_of, weights=progress, minlength=len(shares))
        return np.asarray((total - 1.0) * weight, dtype=np.float64)

    fit = least_squares(residuals, np.log(start), loss="soft_l1")
    seen = np.array([sum(count for _, count in mostly[int(k)]) for k in knots], dtype=np.float64)
    return knots, monotone_times_s(np.exp(fit.x), seen)


def monotone_times_s(times_s: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the nearest times that never rise with the clock (clocks ascending), by isotonic regression of log time.

    For samples only: of two clocks that were measured the wrong way round neither is trusted alone, so that a planner
    cannot pick the lucky one. A table that somebody gives to the planner is the truth and is never smoothed.
    """
    smooth = isotonic_regression(np.log(times_s), sample_weight=weights, increasing=False)
    return np.asarray(np.exp(smooth), dtype=np.float64)


def _interpolate(clocks_mhz: Sequence[float] | FloatArray, knots_mhz: FloatArray, times_s: FloatArray) -> FloatArray:
    clocks = np.clip(np.asarray(clocks_mhz, dtype=float), knots_mhz[0], knots_mhz[-1])
    if len(knots_mhz) == 1:
        return np.full(len(clocks), times_s[0])
    return np.asarray(np.exp(PchipInterpolator(np.log(knots_mhz), np.log(times_s))(np.log(clocks))), dtype=np.float64)
