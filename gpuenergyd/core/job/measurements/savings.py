"""Baseline of a job, and the measured saving of its plans with a confidence interval.

Both come from iterations of the job itself: those at full speed (before the first plan, in proof blocks, after a
fall-back) and those under a tuned plan. Because a job drifts, the baseline time comes from the newest full-speed block
if that differs significantly from the older ones. Energy and saving come from a regression with linear drift.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import mul
from statistics import NormalDist, fmean, median
from typing import TypeAlias

from gpuenergyd.core.job.measurements.sensor_error import hidden_energy_error_ratio
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.policy_api.policy import BaselineView
from gpuenergyd.count_text import count_text

Point: TypeAlias = tuple[int, float, float | None]
"""One iteration: its index, its time in s, and its energy in J if that was measured."""

_LogPoint: TypeAlias = tuple[int, float]
"""The index of one iteration and the logarithm of its time or energy."""

CONFIDENCE = 0.95
_DIFFERS_AT_SIGMA = 2.5
_FAR_AT_SIGMA = 4.0
_MIN_POINTS = 3
_VISIBLE_RATIO = 0.3
"""Share of the spread of iterations that must remain beside tuned or not tuned for drift to be distinguished."""
_WARM_AFTER_ITERATIONS = 15.0
"""Time constant of warming: iterations take 0.1 to 10 s, a GPU 20 s (V100: measured, gridpilot) and its box minutes.
The interval hardly depends on it: with 15, true constants of 5 to 60 iterations are covered alike."""
_WARMTH_RATIO = 0.005
"""Standard deviation of what warming changes (assumed): a kelvin adds 0.39 W to a V100 (measured, gridpilot)."""
_UNDETERMINED_RATIO = 1e-6
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
    by_plan: dict[str | None, list[Point]] = {}
    for o in tuned:
        by_plan.setdefault(o.plan_id, []).append((o.iteration_index, o.iteration_time_s, o.energy_j))
    at_full_speed = [(o.iteration_index, o.iteration_time_s, o.energy_j) for o in full_speed]
    hidden_ratio = math.hypot(hidden_energy_error_ratio(full_speed), hidden_energy_error_ratio(tuned))
    return saving_between(at_full_speed, *by_plan.values(), hidden_energy_error=hidden_ratio)


def saving_between(
    full_speed: Sequence[Point], *tuned: Sequence[Point], hidden_energy_error: float = 0.0
) -> MeasuredSaving | None:
    """Return the measured saving, the mean over the tuned iterations of all plans, each a sequence of its own.

    None with fewer than three iterations on either side.

    log(y) = level + effect of the plan + drift * iteration + warmth * exp(-iteration / tau) + noise, by least squares;
    the interval is Student's. Each plan has an effect of its own: otherwise a plan that saves more than the one before
    it would pass for drift. GPUs grow warm within the first iterations, by an amount with a prior: the interval
    contains what cannot be distinguished from the saving. Full-speed iterations far from their median are left out: a
    short disturbance must not pass for a saving. `hidden_energy_error` is the standard deviation of an error of the
    ratio of energies that does not show in their scatter.
    """
    times = _effect([[(index, time_s) for index, time_s, _ in own] for own in (full_speed, *tuned)])
    if times is None:
        return None
    energies = _effect(
        [[(index, j) for index, _, j in own if j is not None] for own in (full_speed, *tuned)],
        hidden_error=hidden_energy_error,
    )
    return MeasuredSaving(
        saving_ratio=None if energies is None else Interval(-energies.estimate, -energies.high, -energies.low),
        slowdown_ratio=times,
        num_full_speed=len(full_speed),
        num_tuned=sum(map(len, tuned)),
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


def _effect(groups: Sequence[Sequence[tuple[int, float]]], *, hidden_error: float = 0.0) -> Interval | None:
    """Return the relative effect of plans on a positive quantity; the first group is at full speed."""
    full_speed, *plans = ([(index, math.log(value)) for index, value in group] for group in groups)
    tuned = [point for plan in plans for point in plan]
    if len(full_speed) < _MIN_POINTS or len(tuned) < _MIN_POINTS:
        return None
    effect, standard_error, degrees = _contrast(_undisturbed(full_speed, tuned), [plan for plan in plans if plan])
    margin = student_quantile(0.5 + CONFIDENCE / 2, degrees) * math.hypot(standard_error, hidden_error)
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


@dataclass(frozen=True, slots=True)
class _DriftFit:
    """Drift by least squares of differences within groups: columns, slopes, and their covariance per noise variance."""

    columns: tuple[Callable[[int], float], ...]
    slopes: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    squares: float
    """Sum of the squares left."""
    degrees: int
    """Degrees of freedom left."""


def _contrast(full_speed: Sequence[_LogPoint], plans: Sequence[Sequence[_LogPoint]]) -> tuple[float, float, int]:
    """Return (mean under plans minus mean at full speed, without drift; its standard error; degrees of freedom)."""
    tuned = [point for plan in plans for point in plan]
    groups = [full_speed, *plans]
    if len(full_speed) + len(tuned) - len(groups) - 2 < _MIN_POINTS:
        groups = [full_speed, tuned]
    fit = _drift(groups, full_speed, tuned)
    distances = [
        fmean(column(index) for index, _ in tuned) - fmean(column(index) for index, _ in full_speed)
        for column in fit.columns
    ]
    effect = fmean(y for _, y in tuned) - fmean(y for _, y in full_speed) - sum(map(mul, fit.slopes, distances))
    variance = 1 / len(full_speed) + 1 / len(tuned)
    variance += sum(x * sum(map(mul, row, distances)) for x, row in zip(distances, fit.covariance, strict=True))
    return effect, math.sqrt(fit.squares / fit.degrees * variance), fit.degrees


def _drift(
    groups: Sequence[Sequence[_LogPoint]], full_speed: Sequence[_LogPoint], tuned: Sequence[_LogPoint]
) -> _DriftFit:
    """Return the drift; none if it is nearly collinear with being tuned: without proof blocks it is not visible."""
    indices = _about_mean([index for index, _ in (*full_speed, *tuned)])
    is_tuned = _about_mean([0.0] * len(full_speed) + [1.0] * len(tuned))
    alike = _products(is_tuned, indices) ** 2
    is_visible = alike <= (1 - _VISIBLE_RATIO) * _products(is_tuned, is_tuned) * _products(indices, indices)
    linear = _fit_within(groups, (float,)) if is_visible else None
    if linear is None or linear.degrees <= _MIN_POINTS:
        return linear or _without_drift(groups)
    begin = min(index for index, _ in (*full_speed, *tuned))
    variance = linear.squares / linear.degrees
    warmth = partial(_coldness, begin)
    return _fit_within(groups, (float, warmth), prior=variance / _WARMTH_RATIO**2) or linear


def _coldness(begin: int, index: int) -> float:
    return math.exp(-(index - begin) / _WARM_AFTER_ITERATIONS)


def _without_drift(groups: Sequence[Sequence[_LogPoint]]) -> _DriftFit:
    y = [value for group in groups for value in _about_mean([v for _, v in group])]
    return _DriftFit((), (), (), _products(y, y), len(y) - len(groups))


def _fit_within(
    groups: Sequence[Sequence[_LogPoint]], columns: tuple[Callable[[int], float], ...], *, prior: float = 0.0
) -> _DriftFit | None:
    """Return the slopes of one or two columns with a level for each group; None if they are undetermined.

    `prior` is the variance of the noise over that of the second slope, which is zero on average.
    """
    y = [value for group in groups for value in _about_mean([v for _, v in group])]
    x = [[value for group in groups for value in _about_mean([column(i) for i, _ in group])] for column in columns]
    degrees = len(y) - len(groups) - len(columns)
    match x:
        case [a]:
            saa = _products(a, a)
            if saa <= 0.0:
                return None
            slopes: tuple[float, ...] = (_products(a, y) / saa,)
            covariance: tuple[tuple[float, ...], ...] = ((1 / saa,),)
        case [a, b]:
            saa, sbb, sab, say, sby = (_products(*pair) for pair in ((a, a), (b, b), (a, b), (a, y), (b, y)))
            sbb += prior
            determinant = saa * sbb - sab * sab
            if determinant <= _UNDETERMINED_RATIO * saa * sbb:
                return None
            slopes = ((say * sbb - sby * sab) / determinant, (sby * saa - say * sab) / determinant)
            covariance = ((sbb / determinant, -sab / determinant), (-sab / determinant, saa / determinant))
        case _:
            raise ValueError(f"{count_text(len(columns), 'column')}; one or two are supported")
    left = [value - sum(map(mul, slopes, row)) for value, *row in zip(y, *x, strict=True)]
    return _DriftFit(columns, slopes, covariance, _products(left, left), degrees)


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
