"""Baseline of a job, and the measured saving of its plans with a confidence interval.

Both come from iterations of the job itself: those at full speed (before the first plan, in proof blocks, after a
fall-back) and those under a tuned plan. Because a job drifts, the baseline time comes from the newest full-speed block
if that differs significantly from the older ones. Energy and saving come from a regression with linear drift.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from statistics import NormalDist, fmean, median
from typing import TypeAlias

from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.policy_api.policy import BaselineView

Point: TypeAlias = tuple[int, float, float | None]
"""One iteration: its index, its time in s, and its energy in J if that was measured."""

CONFIDENCE = 0.95
_DIFFERS_AT_SIGMA = 2.5
_FAR_AT_SIGMA = 4.0
_MAX_DISTURBED_RATIO = 1 / 3
"""More disturbed iterations than this share of the full-speed ones are a change of the job, not a disturbance."""


def baseline_view(full_speed: Sequence[IterationObservation]) -> BaselineView:
    """Return the baseline from a job's regular full-speed iterations in order (at least one)."""
    blocks = _blocks(full_speed)
    newest, older = blocks[-1], [o for block in blocks[:-1] for o in block]
    times_s = [o.own_time_s for o in newest]
    if older and not _differ(times_s, [o.own_time_s for o in older]):
        times_s += [o.own_time_s for o in older]
    measured = [(energy_j, o.is_at_straggler_pace) for o in full_speed if (energy_j := o.energy_j) is not None]
    energies_j = [energy_j for energy_j, is_at_straggler_pace in measured if not is_at_straggler_pace] or [
        j for j, _ in measured
    ]
    iteration_time_s = median(times_s)
    return BaselineView(
        iteration_time_s=iteration_time_s,
        energy_j=median(energies_j) if energies_j else None,
        num_iterations=len(full_speed),
        iteration_sigma_s=robust_sigma(abs(t - iteration_time_s) for t in times_s),
    )


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    estimate: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes 0."""
        return self.low > 0.0 or self.high < 0.0


@dataclass(frozen=True, slots=True)
class MeasuredSaving:
    """Saving of energy and slowdown of an iteration, as ratios to the baseline."""

    saving_ratio: Interval | None
    slowdown_ratio: Interval
    num_full_speed: int
    num_tuned: int


@dataclass(frozen=True, slots=True)
class SavingEstimate:
    """The estimate of a job that status, live page, report and history show: values at full speed and under plans."""

    since_iteration: int
    """The first iteration that counts: earlier ones ran before the job changed."""
    baseline_time_s: float
    baseline_energy_j: float | None
    iteration_time_s: float | None
    """Medians under tuned plans; None while there is no such iteration."""
    energy_j: float | None
    saving: MeasuredSaving | None

    @property
    def ratios(self) -> tuple[Interval | None, Interval | None]:
        """Saving of energy and slowdown, each None if not measured."""
        return (None, None) if self.saving is None else (self.saving.saving_ratio, self.saving.slowdown_ratio)


def measured_saving(
    full_speed: Sequence[IterationObservation], tuned: Sequence[IterationObservation]
) -> MeasuredSaving | None:
    """Return the measured saving of a job's iterations, as `saving_between` computes it."""
    return saving_between(
        *([(o.iteration_index, o.iteration_time_s, o.energy_j) for o in own] for own in (full_speed, tuned))
    )


def saving_between(full_speed: Sequence[Point], tuned: Sequence[Point]) -> MeasuredSaving | None:
    """Return the measured saving; None with fewer than three iterations on either side.

    log(y) = level + effect * is_tuned + drift * iteration + noise, by least squares; the interval is Student's.
    Full-speed iterations far from their median are left out: a short disturbance must not pass for a saving.
    """
    times = _effect(*([(index, time_s) for index, time_s, _ in own] for own in (full_speed, tuned)))
    if times is None:
        return None
    energies = _effect(*([(index, j) for index, _, j in own if j is not None] for own in (full_speed, tuned)))
    return MeasuredSaving(
        saving_ratio=None if energies is None else Interval(-energies.estimate, -energies.high, -energies.low),
        slowdown_ratio=times,
        num_full_speed=len(full_speed),
        num_tuned=len(tuned),
    )


def saved_power_w(saving: MeasuredSaving | None, baseline: BaselineView | None) -> Interval | None:
    """Return the energy saved per iteration divided by the tuned iteration time; None if energy was not measured.

    Without a slowdown this equals baseline power minus tuned power. A slower job draws less power for longer; only the
    energy that it saves per iteration counts.
    """
    if saving is None or saving.saving_ratio is None or baseline is None or baseline.energy_j is None:
        return None
    tuned_time_s = baseline.iteration_time_s * (1.0 + saving.slowdown_ratio.estimate)
    power_w = baseline.energy_j / tuned_time_s
    ratio = saving.saving_ratio
    return Interval(ratio.estimate * power_w, ratio.low * power_w, ratio.high * power_w)


def sum_of_significant(intervals: Sequence[Interval]) -> Interval | None:
    """Return the sum of the significant estimates, with independent errors; None if none is significant."""
    counted = [interval for interval in intervals if interval.is_significant]
    if not counted:
        return None
    total = math.fsum(interval.estimate for interval in counted)
    below = math.hypot(*(interval.estimate - interval.low for interval in counted))
    above = math.hypot(*(interval.high - interval.estimate for interval in counted))
    return Interval(total, total - below, total + above)


def _blocks(observations: Sequence[IterationObservation]) -> list[list[IterationObservation]]:
    """Split observations into runs of consecutive iterations."""
    blocks: list[list[IterationObservation]] = []
    for observation in observations:
        if blocks and observation.iteration_index - blocks[-1][-1].iteration_index <= 2:
            blocks[-1].append(observation)
        else:
            blocks.append([observation])
    return blocks


def _differ(a: Sequence[float], b: Sequence[float]) -> bool:
    if len(a) < 2 or len(b) < 2:
        return False
    a_mean, b_mean = fmean(a), fmean(b)
    squares = sum((x - a_mean) ** 2 for x in a) + sum((x - b_mean) ** 2 for x in b)
    pooled = math.sqrt(squares / (len(a) + len(b) - 2))
    return abs(a_mean - b_mean) > _DIFFERS_AT_SIGMA * pooled * math.sqrt(1 / len(a) + 1 / len(b))


def _effect(full_speed: Sequence[tuple[int, float]], tuned: Sequence[tuple[int, float]]) -> Interval | None:
    if len(full_speed) < 3 or len(tuned) < 3:
        return None
    baseline, after = ([(index, math.log(value)) for index, value in side] for side in (full_speed, tuned))
    kept = _undisturbed(baseline, after)
    is_tuned = [0.0] * len(kept) + [1.0] * len(after)
    indices, logs = zip(*kept, *after, strict=True)
    effect, standard_error, degrees = _regress(is_tuned, indices, logs)
    margin = student_quantile(0.5 + CONFIDENCE / 2, degrees) * standard_error
    return Interval(*(math.expm1(x) for x in (effect, effect - margin, effect + margin)))


def _undisturbed(
    full_speed: Sequence[tuple[int, float]], tuned: Sequence[tuple[int, float]]
) -> Sequence[tuple[int, float]]:
    """Return the full-speed iterations near their median, all of them if that leaves out too many."""
    middle, tuned_middle = (median(y for _, y in side) for side in (full_speed, tuned))
    distances = [abs(y - middle) for _, y in full_speed]
    sigma = robust_sigma([*distances, *(abs(y - tuned_middle) for _, y in tuned)])
    near = [point for point, distance in zip(full_speed, distances, strict=True) if distance <= _FAR_AT_SIGMA * sigma]
    return near if len(near) >= max(3.0, (1.0 - _MAX_DISTURBED_RATIO) * len(full_speed)) else full_speed


def _regress(a: Sequence[float], b: Sequence[float], y: Sequence[float]) -> tuple[float, float, int]:
    """Return (coefficient of the first column, its standard error, degrees of freedom) of y on (1, a, b).

    The second column is dropped if it is nearly collinear with the first: without proof blocks drift is not visible.
    """
    n = len(y)
    a, b, y = (_about_mean(column) for column in (a, b, y))
    saa, sbb, sab, say, sby = (_products(*pair) for pair in ((a, a), (b, b), (a, b), (a, y), (b, y)))
    determinant = saa * sbb - sab * sab
    if sbb <= 0 or determinant < 0.3 * saa * sbb:
        effect, drift, inverse, degrees = say / saa, 0.0, 1 / saa, n - 2
    else:
        effect = (say * sbb - sby * sab) / determinant
        drift = (sby * saa - say * sab) / determinant
        inverse, degrees = sbb / determinant, n - 3
    left = [y_k - effect * a_k - drift * b_k for a_k, b_k, y_k in zip(a, b, y, strict=True)]
    return effect, math.sqrt(_products(left, left) / degrees * inverse), degrees


def _about_mean(column: Sequence[float]) -> list[float]:
    mean = fmean(column)
    return [value - mean for value in column]


def _products(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total


def student_quantile(probability: float, degrees: int) -> float:
    """Return Student's t quantile by the Cornish-Fisher expansion (Abramowitz and Stegun, 26.7.5); degrees >= 3."""
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / float(degrees) ** (k + 1) for k, term in enumerate(terms))
