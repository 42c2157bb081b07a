"""Time curves: instruction times at every clock, from a few clocks and from instructions that changed clock.

An instruction that ran in shares of different clocks satisfies sum(share / t(clock)) = 1. The unknowns are the log
times at the measured clocks; between them, log time is interpolated monotonically over the log clock (PCHIP) instead of
by a formula, because errors in time cost more than errors in energy. Under a power cap, time no longer falls with the
clock: the bend is where the line of the uncapped clocks (time over 1 / clock) reaches the capped time. It becomes a
knot of its own, since interpolation across it is wrong on both sides.

Disturbances only make instructions slower. A sample that is slower than others at the same clock is left out of the
fit. If there is no other, its shape decides: time over the clock is convex, with or without a cap, and halving the
clock at most doubles it. A knot above that is *doubtful*: it must be measured again, and is replaced by the bound from
its neighbours until then.

A knot that violates these bounds but is confirmed by a second measurement shows a *step* of the work between two clocks
(another kernel, another state of a part other than the SM; the published A40 table has one). The position of the step
between them is unknown, so no clock in between is offered, and each side has a curve of its own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, least_squares

from gpuenergyd.core.measurement.observation import InstructionSample, IterationObservation
from gpuenergyd.core.pipeline.graph import InstructionClass
from gpuenergyd_policies.profiling.monotone_curve import MonotoneCurve

FloatArray = NDArray[np.float64]

_TIME_NOISE_RATIO = 0.003
_MAX_SIGMA_RATIO = 1.0
"""Upper limit of a standard error: a time known to a factor of e is unknown, and draws from it must stay finite."""
_MAX_LOG_CHANGE = 3.0
"""Largest logarithm of the ratio of a fitted time to the one that the fit starts from, in either direction."""
_MAX_EVALUATIONS = 100
"""Of the residuals, in the fit of one class; ordinary ones need 10 to 45."""
_MIN_SHARE_RATIO = 0.02
"""Smallest share of an instruction that counts; below it, a share is rounding noise between two clocks."""
_ON_THE_LINE_RATIO = 0.015
_CAPPED_RATIO = 0.03
"""Excess over the line of the lower clocks above which a cap explains a time better than curvature."""
_MIN_CAPPED_KNOTS = 2
_FLAT_RATIO = 0.01
"""Range of times under a cap: they must be equal at several clocks, a single one may be disturbed."""
_DISTURBED_RATIO = 0.03
"""Excess over other samples at a clock, or of a knot over the bound from its neighbours, that means a disturbance."""
_STEP_RATIO = 0.02
"""Excess of a confirmed knot over the line (time over 1 / clock) between its neighbours that means a step."""
_SAME_RATIO = 0.01
"""Difference within which samples of two iterations confirm each other."""
_NEAR_RATIO = 0.02
"""Relative distance within which a bend is assigned to a measured clock."""
_SAME_CLOCK_RATIO = 1e-3
"""Relative distance below which the knot of a cap takes the place of a measured clock."""
_WAITING_QUANTILE = 0.25
_WAITING_RATIO = 0.1
"""Share of its time by which a phase that waits may be longer at low clocks; one that computes would be by a third."""
_CLEARLY_LOWER_RATIO = 0.8
_LEAST_TIME_S = 1e-6
_BETWEEN_KNOTS_RATIO = 0.004
"""Uncertainty of interpolation half way between two knots: 0.1-0.4 % on published tables and simulated GPUs."""


@dataclass(frozen=True, slots=True)
class TimeCurve:
    """Time of one class over the clock, flat above the last knot.

    `cap_mhz` is the highest clock under a power cap, None without a cap. `sigma_ratios` are the standard errors of the
    knots' times; `doubtful_mhz` are measured clocks whose time is doubtful. `steps_mhz` are pairs of measured clocks,
    ascending, between which the work changes.
    """

    knots_mhz: tuple[float, ...]
    knot_times_s: tuple[float, ...]
    cap_mhz: float | None = None
    sigma_ratios: tuple[float, ...] = ()
    doubtful_mhz: tuple[float, ...] = ()
    steps_mhz: tuple[tuple[float, float], ...] = ()
    measured_to_mhz: float = 0.0
    bend_mhz: float | None = None
    """The clock at which the line of the lower clocks reaches the highest clock's time, if that is well below it.

    Times alone cannot distinguish a power cap there from work that does not scale with the clock; energies can.
    """

    is_flat: bool = False
    """Whether the class waits, so that its time is the same at all clocks."""

    @property
    def lowest_mhz(self) -> float:
        """The lowest measured clock; extrapolated times below it would miss deadlines."""
        return self.knots_mhz[0]

    @property
    def highest_mhz(self) -> float:
        """The highest measured clock, under a cap too."""
        return max(self.knots_mhz[-1], self.measured_to_mhz)

    def times_s(self, sm_clocks_mhz: Sequence[float]) -> FloatArray:
        """Return the times at given clocks; inside a step, the time of its upper end."""
        clocks, knots = np.asarray(sm_clocks_mhz, dtype=np.float64), np.array(self.knots_mhz)
        if self.is_flat:
            return np.full(len(clocks), self.knot_times_s[0])
        if not self.steps_mhz:
            return _interpolate(clocks, knots, np.array(self.knot_times_s))
        parts, part_of_knot = self.part_indices(clocks), self.part_indices(knots)
        times_s = np.empty(len(clocks))
        for part in np.unique(parts):
            own = part_of_knot == part
            times_s[parts == part] = _interpolate(clocks[parts == part], knots[own], np.array(self.knot_times_s)[own])
        return times_s

    def part_index(self, sm_clock_mhz: float) -> int:
        """Return the index of the curve's part that holds a clock, from the lowest; inside a step, the upper one."""
        return int(self.part_indices([sm_clock_mhz])[0])

    def part_indices(self, sm_clocks_mhz: Sequence[float] | FloatArray) -> NDArray[np.int64]:
        """Return the indices of the curve's parts that hold clocks, from the lowest; inside a step, the upper one."""
        clocks_mhz = np.asarray(sm_clocks_mhz, dtype=np.float64)
        return np.searchsorted([low for low, _ in self.steps_mhz], clocks_mhz, side="left").astype(np.int64)

    def is_offered(self, sm_clock_mhz: float) -> bool:
        """Return whether a plan may use a clock: neither below the lowest measured clock, nor inside a step.

        Above a power cap only the highest clock is offered: all of them have the same effect.
        """
        if any(low < sm_clock_mhz < high for low, high in self.steps_mhz):
            return False
        is_like_highest = self.cap_mhz is not None and self.cap_mhz < sm_clock_mhz < self.highest_mhz
        return sm_clock_mhz >= self.lowest_mhz and not is_like_highest

    def sigmas_ratio(self, sm_clocks_mhz: Sequence[float]) -> FloatArray:
        """Return the relative standard errors of the times, smallest at measured clocks, largest half way between."""
        clocks, knots = np.asarray(sm_clocks_mhz, dtype=np.float64), np.array(self.knots_mhz)
        at_knots = self.measured_sigmas_ratio(sm_clocks_mhz)
        if self.is_flat or len(knots) == 1:
            return at_knots
        right = np.clip(np.searchsorted(knots, clocks), 1, max(1, len(knots) - 1))
        share = np.clip((clocks - knots[right - 1]) / (knots[right] - knots[right - 1]), 0.0, 1.0)
        return np.asarray(np.hypot(at_knots, _BETWEEN_KNOTS_RATIO * 4 * share * (1 - share)), dtype=np.float64)

    def measured_sigmas_ratio(self, sm_clocks_mhz: Sequence[float]) -> FloatArray:
        """Return the same without what the shape between measured clocks may be off by."""
        if self.is_flat:
            return np.zeros(len(sm_clocks_mhz))
        knots = np.array(self.knots_mhz)
        found = np.interp(np.asarray(sm_clocks_mhz, dtype=np.float64), knots, self.sigma_ratios or np.zeros(len(knots)))
        return np.asarray(found, dtype=np.float64)

    def as_capped(self) -> "TimeCurve":
        """Return the curve with its bend as a power cap, and as a knot unless one is near."""
        bend_mhz = self.bend_mhz
        if bend_mhz is None:
            return self
        if min(abs(knot / bend_mhz - 1) for knot in self.knots_mhz) <= _NEAR_RATIO:
            return replace(self, cap_mhz=bend_mhz)
        k = int(np.searchsorted(self.knots_mhz, bend_mhz))
        return replace(
            self,
            knots_mhz=(*self.knots_mhz[:k], bend_mhz, *self.knots_mhz[k:]),
            knot_times_s=(*self.knot_times_s[:k], max(self.knot_times_s[k:]), *self.knot_times_s[k:]),
            sigma_ratios=(*self.sigma_ratios[:k], _BETWEEN_KNOTS_RATIO, *self.sigma_ratios[k:]),
            cap_mhz=bend_mhz,
        )

    def effective_mhz(self, sm_clock_mhz: float) -> float:
        """Return the clock at which the GPU runs the class, power cap included."""
        return float(sm_clock_mhz) if self.cap_mhz is None else min(float(sm_clock_mhz), self.cap_mhz)


def fit_times(observations: Sequence[IterationObservation]) -> Mapping[InstructionClass, TimeCurve]:
    """Return the time curve of every timed class."""
    samples: dict[InstructionClass, list[InstructionSample]] = defaultdict(list)
    for observation in observations:
        for sample in observation.instruction_samples:
            samples[sample.instruction_class].append(sample)
    return {
        key: (_waiting_curve(members) if key.kind.is_wait else None) or _curve(members)
        for key, members in samples.items()
    }


def _waiting_curve(samples: Sequence[InstructionSample]) -> TimeCurve | None:
    """Return the flat curve of a phase that waits; None if it takes clearly longer at low clocks, so that it computes.

    Its time is a low quantile: waits for other ranks come on top, and a faster clock must be back before it ends.
    It is offered down to the lowest clock at which some iteration was as fast, as all those in between.
    """
    clocks_mhz = sorted({sample.main_share.sm_clock_mhz for sample in samples})
    top_mhz = clocks_mhz[-1]
    fast_s = [s.time_s for s in samples if s.main_share.sm_clock_mhz == top_mhz]
    slow_s = [s.time_s for s in samples if s.main_share.sm_clock_mhz <= _CLEARLY_LOWER_RATIO * top_mhz]
    time_s = float(np.quantile(fast_s, _WAITING_QUANTILE))
    if slow_s and float(np.quantile(slow_s, _WAITING_QUANTILE)) > (1 + _WAITING_RATIO) * time_s:
        return None
    fastest_s = {mhz: min(s.time_s for s in samples if s.main_share.sm_clock_mhz == mhz) for mhz in clocks_mhz}
    # Other ranks that run slow clocks make a wait longer at any clock of this one. No clock is slower than a lower one,
    # so that a single usual time at a low clock speaks for all above it.
    usual_mhz = [mhz for mhz in clocks_mhz if fastest_s[mhz] <= (1 + _WAITING_RATIO) * time_s]
    clocks_mhz = [mhz for mhz in clocks_mhz if mhz >= min(usual_mhz, default=top_mhz)]
    knots = (float(clocks_mhz[0]), float(top_mhz)) if len(clocks_mhz) > 1 else (float(top_mhz),)
    return TimeCurve(knots, (max(time_s, _LEAST_TIME_S),) * len(knots), is_flat=True)


def _curve(samples: Sequence[InstructionSample]) -> TimeCurve:
    # A redescending loss follows the fast samples that it starts from; samples far above its fit are excluded.
    fit = _fit_class_times(samples, loss="cauchy")
    kept = [s for s, off in zip(samples, fit.residuals, strict=True) if off <= _DISTURBED_RATIO]
    if {s.main_share.sm_clock_mhz for s in kept} != {s.main_share.sm_clock_mhz for s in samples}:
        kept = list(samples)
    fit = _fit_class_times(kept, loss="soft_l1")
    is_confirmed = _confirmed(kept, fit)
    doubtful = _doubtful(fit.knots_mhz, fit.times_s, is_confirmed)
    accepted = ~doubtful
    steps = _steps(fit.knots_mhz[accepted], fit.times_s[accepted], is_confirmed[accepted])
    curve = _with_steps(
        fit.knots_mhz[accepted], fit.times_s[accepted], fit.counts[accepted], fit.sigma_ratios[accepted], steps
    )
    lowest_mhz = float(fit.knots_mhz[0])
    if doubtful[0]:
        # The upper bound of its time: until it is measured again, no plan should use it.
        slowest_s = curve.knot_times_s[0] * curve.knots_mhz[0] / lowest_mhz
        curve = replace(
            curve,
            knots_mhz=(lowest_mhz, *curve.knots_mhz),
            knot_times_s=(slowest_s, *curve.knot_times_s),
            sigma_ratios=(_DISTURBED_RATIO, *curve.sigma_ratios),
        )
    return replace(curve, doubtful_mhz=tuple(fit.knots_mhz[doubtful].tolist()))


def _confirmed(samples: Sequence[InstructionSample], fit: "_ClassTimes") -> NDArray[np.bool_]:
    """Return the knots that two or more iterations agree on, as a mask."""
    agreed: dict[int, int] = defaultdict(int)
    for sample, off in zip(samples, fit.residuals, strict=True):
        agreed[sample.main_share.sm_clock_mhz] += abs(float(off)) <= _SAME_RATIO
    return np.array([agreed[int(knot)] > 1 for knot in fit.knots_mhz], dtype=np.bool_)


def _steps(
    knots_mhz: FloatArray, times_s: FloatArray, is_confirmed: NDArray[np.bool_]
) -> tuple[tuple[float, float], ...]:
    """Return the pairs of neighbouring knots between which the work changes, found by splitting at the largest step.

    Time over 1 / clock is convex for the same work. If a confirmed knot is above the line between its neighbours, the
    step is below the knot, or above it if the knot is slower than its upper neighbour scaled by 1 / clock.
    """
    period = 1 / knots_mhz
    excess = np.full(len(knots_mhz), -1.0)
    for k in range(1, len(knots_mhz) - 1):
        share = (period[k] - period[k + 1]) / (period[k - 1] - period[k + 1])
        excess[k] = times_s[k] / (times_s[k + 1] + share * (times_s[k - 1] - times_s[k + 1])) - 1
    excess[~is_confirmed] = -1.0
    if len(knots_mhz) == 0 or excess.max() <= _STEP_RATIO:
        return ()
    k = int(np.argmax(excess))
    is_above = times_s[k] * knots_mhz[k] > (1 + _STEP_RATIO) * times_s[k + 1] * knots_mhz[k + 1]
    split = k + 1 if is_above else k
    return (
        *_steps(knots_mhz[:split], times_s[:split], is_confirmed[:split]),
        (float(knots_mhz[split - 1]), float(knots_mhz[split])),
        *_steps(knots_mhz[split:], times_s[split:], is_confirmed[split:]),
    )


def _with_steps(
    knots_mhz: FloatArray,
    times_s: FloatArray,
    seen: FloatArray,
    sigma_ratios: FloatArray,
    steps_mhz: tuple[tuple[float, float], ...],
) -> TimeCurve:
    """Return a curve that falls smoothly with the clock between steps; only the highest part can have a power cap."""
    parts = np.searchsorted([low for low, _ in steps_mhz], knots_mhz, side="left")
    own = [np.flatnonzero(parts == part) for part in range(len(steps_mhz) + 1)]
    smooth_s = np.concatenate([monotone_times_s(times_s[k], seen[k]) for k in own])
    top, below = own[-1], np.concatenate([[], *own[:-1]]).astype(np.int64)
    curve = _with_bend(knots_mhz[top], smooth_s[top], sigma_ratios[top])
    return replace(
        curve,
        knots_mhz=(*knots_mhz[below].tolist(), *curve.knots_mhz),
        knot_times_s=(*smooth_s[below].tolist(), *curve.knot_times_s),
        sigma_ratios=(*sigma_ratios[below].tolist(), *curve.sigma_ratios),
        steps_mhz=steps_mhz,
    )


def _doubtful(knots_mhz: FloatArray, times_s: FloatArray, is_confirmed: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the knots that violate convexity or proportionality to 1 / clock, as a mask; never the highest knot.

    The worst knot is removed first, since it affects the bounds of its neighbours. The highest clock is known from the
    whole baseline, and confirmed knots are accepted as they are.
    """
    accepted = np.ones(len(knots_mhz), dtype=np.bool_)
    while True:
        index = np.flatnonzero(accepted)
        if len(index) <= 2:
            return ~accepted
        excess = np.full(len(knots_mhz), -1.0)
        for left, k, right in zip([None, *index[:-2]], index[:-1], index[1:], strict=True):
            allowed_s = times_s[right] * knots_mhz[right] / knots_mhz[k]
            if left is not None:
                share = (knots_mhz[k] - knots_mhz[left]) / (knots_mhz[right] - knots_mhz[left])
                allowed_s = min(allowed_s, times_s[left] + share * (times_s[right] - times_s[left]))
            excess[k] = times_s[k] / allowed_s - 1
        excess[is_confirmed] = -1.0
        worst = int(np.argmax(excess))
        if excess[worst] <= _DISTURBED_RATIO:
            return ~accepted
        accepted[worst] = False


def _with_bend(knots_mhz: FloatArray, times_s: FloatArray, sigma_ratios: FloatArray) -> TimeCurve:
    """Return the curve through the knots, with a knot at the bend if the upper ones are capped."""
    plain = TimeCurve(tuple(knots_mhz.tolist()), tuple(times_s.tolist()), None, tuple(sigma_ratios.tolist()))
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
    is_cap = (
        slope > 0
        and len(capped) >= _MIN_CAPPED_KNOTS
        # A cap affects all clocks from the bend up to the highest.
        and capped[-1] == len(knots_mhz) - 1
        and len(capped) == len(knots_mhz) - capped[0]
        and np.ptp(times_s[capped]) <= _FLAT_RATIO * times_s[-1]
    )
    if not is_cap:
        return replace(plain, bend_mhz=_bend_mhz(knots_mhz, times_s, num_on_line))
    capped_s = float(np.mean(times_s[capped[0] :]))
    cap_mhz = float(slope / (capped_s - offset_s))
    below = knots_mhz < (1 - _SAME_CLOCK_RATIO) * cap_mhz
    if not below.any() or cap_mhz >= knots_mhz[-1]:
        return plain
    return TimeCurve(
        knots_mhz=(*knots_mhz[below].tolist(), cap_mhz),
        knot_times_s=(*np.maximum(times_s[below], capped_s).tolist(), capped_s),
        cap_mhz=cap_mhz,
        sigma_ratios=(*sigma_ratios[below].tolist(), float(np.min(sigma_ratios[capped]))),
        measured_to_mhz=float(knots_mhz[-1]),
    )


def _bend_mhz(knots_mhz: FloatArray, times_s: FloatArray, num_on_line: int) -> float | None:
    """Return the clock at which the line of the lower knots reaches the highest clock's time; None without a bend."""
    if num_on_line == len(knots_mhz):
        return None
    (low_mhz, mhz), (low_s, time_s) = knots_mhz[num_on_line - 2 : num_on_line], times_s[num_on_line - 2 : num_on_line]
    slope = (low_s - time_s) / (1 / low_mhz - 1 / mhz)
    top_s = times_s[-1]
    if slope <= 0 or top_s <= (1 + _CAPPED_RATIO) * (time_s + slope * (1 / knots_mhz[-1] - 1 / mhz)):
        return None
    bend_mhz = float(1 / (1 / mhz - (time_s - top_s) / slope))
    # Noise can put the crossing of the two lines anywhere, even below zero.
    return bend_mhz if knots_mhz[0] < bend_mhz < knots_mhz[-1] else None


@dataclass(frozen=True, slots=True)
class _ClassTimes:
    """Fitted times of one class at its measured clocks, ascending; `residuals` are per sample."""

    knots_mhz: FloatArray
    times_s: FloatArray
    sigma_ratios: FloatArray
    counts: FloatArray
    """Number of measured instructions at each clock."""
    residuals: FloatArray


def _fit_class_times(samples: Sequence[InstructionSample], *, loss: str) -> _ClassTimes:
    mostly: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for sample in samples:
        mostly[sample.main_share.sm_clock_mhz].append((sample.time_s, sample.count))
    knots = np.array(sorted(mostly), dtype=float)
    # Disturbances only slow down, so the fit starts from the faster samples.
    start = np.array([np.quantile([t for t, _ in mostly[int(k)]], 0.25, method="lower") for k in knots])
    shares, weights = [], []
    for sample in samples:
        kept = [s for s in sample.shares if s.time_s >= _MIN_SHARE_RATIO * sample.time_s] or list(sample.shares)
        rest_s = sample.time_s - sum(s.time_s for s in kept)
        shares.append([(s.sm_clock_mhz, s.time_s + rest_s / len(kept)) for s in kept])
        weights.append(np.sqrt(sample.count))
    clocks = np.array([clock for row in shares for clock, _ in row], dtype=float)
    spent_s = np.array([time_s for row in shares for _, time_s in row])
    row_of = np.repeat(np.arange(len(shares)), [len(row) for row in shares])
    weight = np.array(weights, dtype=np.float64) / _TIME_NOISE_RATIO

    knot_of = np.clip(np.searchsorted(knots, clocks), 0, len(knots) - 1)
    is_at_knot = bool(np.all(knots[knot_of] == clocks))

    log_start = np.log(start)

    def times_at(log_times: FloatArray) -> FloatArray:
        """Return times within limits: a time that only mixtures show can be anything."""
        return np.asarray(np.exp(np.clip(log_times, log_start - _MAX_LOG_CHANGE, log_start + _MAX_LOG_CHANGE)))

    def excess(log_times: FloatArray) -> FloatArray:
        times_s = times_at(log_times)
        progress = spent_s / (times_s[knot_of] if is_at_knot else _interpolate(clocks, knots, times_s))
        return np.asarray(np.bincount(row_of, weights=progress, minlength=len(shares)) - 1.0, dtype=np.float64)

    def residuals(log_times: FloatArray) -> FloatArray:
        return excess(log_times) * weight

    def jacobian(log_times: FloatArray) -> FloatArray:
        progress = spent_s / times_at(log_times)[knot_of]
        cells = row_of * len(knots) + knot_of
        of_cells = np.bincount(cells, weights=progress, minlength=len(shares) * len(knots))
        return np.asarray(-of_cells.reshape(len(shares), len(knots)) * weight[:, None], dtype=np.float64)

    derivative: Any = jacobian if is_at_knot else "2-point"
    fit = least_squares(residuals, log_start, jac=derivative, loss=loss, max_nfev=_MAX_EVALUATIONS)
    counts = np.array([sum(count for _, count in mostly[int(k)]) for k in knots], dtype=np.float64)
    # As many samples as there are clocks are met nearly exactly, whatever the noise: they say nothing of it.
    off = np.sort(np.abs(residuals(fit.x)))[len(knots) :]
    misfit = max(1.0, float(np.median(off)) / 0.6745) if len(off) else 1.0
    derivatives = fit.jac
    if loss == "soft_l1":
        # scipy scales each row for its robust steps by how far off it is; a standard error from those rows would grow
        # with the number of instructions in an iteration, which share what disturbs it.
        derivatives = derivatives * ((1.0 + fit.fun**2) ** 0.75)[:, None]
    variance = np.diag(np.linalg.pinv(derivatives.T @ derivatives))
    sigma_ratios = np.minimum(misfit * np.sqrt(np.maximum(variance, 0.0)), _MAX_SIGMA_RATIO)
    return _ClassTimes(knots, times_at(fit.x), sigma_ratios, counts, excess(fit.x))


def monotone_times_s(times_s: FloatArray, weights: FloatArray) -> FloatArray:
    """Return the nearest times that do not rise with the clock (clocks ascending), by isotonic regression of log time.

    It is for measured samples: a planner would otherwise select clocks whose errors are in their favour. Tables given
    to the offline planner are never smoothed.
    """
    smooth = isotonic_regression(np.log(times_s), weights=weights, increasing=False)
    return np.asarray(np.exp(smooth.x), dtype=np.float64)


def _interpolate(clocks_mhz: Sequence[float] | FloatArray, knots_mhz: FloatArray, times_s: FloatArray) -> FloatArray:
    clocks = np.clip(np.asarray(clocks_mhz, dtype=float), knots_mhz[0], knots_mhz[-1])
    if len(knots_mhz) == 1:
        return np.full(len(clocks), times_s[0])
    curve = _log_curve(tuple(np.log(knots_mhz).tolist()), tuple(np.log(times_s).tolist()))
    return np.asarray(np.exp(curve.at(np.log(clocks))), dtype=np.float64)


@lru_cache(maxsize=1024)
def _log_curve(log_knots: tuple[float, ...], log_times: tuple[float, ...]) -> MonotoneCurve:
    """Return the curve of log time over log clock."""
    return MonotoneCurve.through(log_knots, log_times)
