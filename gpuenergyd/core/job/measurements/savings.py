"""Baseline of a job, and the measured saving of its plans with a confidence interval.

Both come from iterations of the job itself: at full speed (before the first plan, in proof blocks, after a fall-back)
and under a tuned plan. Because a job drifts, the baseline time comes from the newest full-speed block alone if that
differs significantly from the older ones, unless moved clocks at power limits explain it. The saving comes from
brackets, see `brackets`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median
from typing import NamedTuple

from gpuenergyd.core.job.measurements.brackets import LEAST_BRACKETS, Bracket, LogPoint, complete_brackets, scatter
from gpuenergyd.core.job.measurements.sensor_error import hidden_energy_error_ratio
from gpuenergyd.core.measurement.observation import IterationObservation
from gpuenergyd.core.measurement.robust import robust_sigma
from gpuenergyd.core.measurement.sustained_clock import moved_clocks
from gpuenergyd.core.policy_api.policy import BaselineView


class Point(NamedTuple):
    """An iteration, or the medians of consecutive iterations stored as one row."""

    first_index: int
    time_s: float
    energy_j: float | None
    num_iterations: int = 1


CONFIDENCE = 0.95
_DIFFERS_AT_SIGMA = 2.5
_SAME_CYCLES_RATIO = 0.02
"""Change of the clock cycles of an iteration below which it is the same work, see `JobRules.job_changed_ratio`."""


def baseline_view(full_speed: Sequence[IterationObservation]) -> BaselineView:
    """Return the baseline from a job's regular full-speed iterations, in order; at least one is required."""
    blocks = _blocks(full_speed)
    newest, older = blocks[-1], [o for block in blocks[:-1] for o in block]
    times_s = [o.own_time_s for o in newest]
    if older and (not _differ(times_s, [o.own_time_s for o in older]) or _is_moved_by_limits(older, newest)):
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
        return self.low > 0.0 or self.high < 0.0


@dataclass(frozen=True, slots=True)
class MeasuredSaving:
    """Energy saving and slowdown of an iteration, as ratios to the baseline."""

    saving_ratio: Interval | None
    slowdown_ratio: Interval
    num_full_speed: int
    num_tuned: int


@dataclass(frozen=True, slots=True)
class SavingEstimate:
    """A job's estimate as shown by status, live page, report and history: values at full speed and under plans."""

    since_iteration: int
    """First iteration included; earlier ones ran before the job changed."""
    baseline_time_s: float
    baseline_energy_j: float | None
    iteration_time_s: float | None
    """Median under tuned plans, like `energy_j`; None if there is no such iteration."""
    energy_j: float | None
    saving: MeasuredSaving | None

    @property
    def ratios(self) -> tuple[Interval | None, Interval | None]:
        """Energy saving and slowdown, each None if not measured."""
        return (None, None) if self.saving is None else (self.saving.saving_ratio, self.saving.slowdown_ratio)


def measured_saving(
    full_speed: Sequence[IterationObservation], tuned: Sequence[IterationObservation]
) -> MeasuredSaving | None:
    """Return the measured saving from a job's iterations, computed by `saving_between`."""
    at_full_speed, under_plans = (
        [Point(o.iteration_index, o.iteration_time_s, o.energy_j) for o in side] for side in (full_speed, tuned)
    )
    hidden_ratio = math.hypot(hidden_energy_error_ratio(full_speed), hidden_energy_error_ratio(tuned))
    return saving_between(at_full_speed, under_plans, hidden_energy_error=hidden_ratio)


def saving_between(
    full_speed: Sequence[Point], tuned: Sequence[Point], *, hidden_energy_error: float = 0.0
) -> MeasuredSaving | None:
    """Return the measured saving of a job from its brackets (`brackets`); None with fewer than two valid ones.

    A bracket is valid if its two spans agree in time and, where measured, in energy. `hidden_energy_error` is the
    standard deviation of an error in the energy ratio that is not visible in the scatter.
    """
    in_time = complete_brackets(_log_times(full_speed), _log_times(tuned))
    in_energy = complete_brackets(_log_energies(full_speed), _log_energies(tuned))
    void = {b.block[0].first_index for kind in (in_time, in_energy) for b in kind if b.is_void(scatter(kind))}
    times = _mean_effect([b for b in in_time if b.block[0].first_index not in void])
    energies = _mean_effect([b for b in in_energy if b.block[0].first_index not in void], hidden_energy_error)
    if times is None:
        return None
    return MeasuredSaving(
        saving_ratio=None if energies is None else Interval(-energies.estimate, -energies.high, -energies.low),
        slowdown_ratio=times,
        num_full_speed=len(full_speed),
        num_tuned=len(tuned),
    )


def _log_times(points: Sequence[Point]) -> list[LogPoint]:
    return [LogPoint(point.first_index, math.log(point.time_s), point.num_iterations) for point in points]


def _log_energies(points: Sequence[Point]) -> list[LogPoint]:
    measured = ((point, energy_j) for point in points if (energy_j := point.energy_j))
    return [LogPoint(point.first_index, math.log(energy_j), point.num_iterations) for point, energy_j in measured]


def _mean_effect(brackets: Sequence[Bracket], hidden_error: float = 0.0) -> Interval | None:
    """Return the mean relative effect of plans with its interval; None with too few brackets.

    The variance of the weighted mean is estimated from weighted squared deviations. The degrees of freedom are those of
    the number of equal weights that would give the same variance.
    """
    effects = [bracket.effect for bracket in brackets]
    if len(effects) < LEAST_BRACKETS:
        return None
    total = math.fsum(bracket.num_near for bracket in brackets)
    shares = [bracket.num_near / total for bracket in brackets]
    middle = math.fsum(share * effect for share, effect in zip(shares, effects, strict=True))
    squares = math.fsum(share**2 for share in shares)
    spread = math.fsum((share * (effect - middle)) ** 2 for share, effect in zip(shares, effects, strict=True))
    z, sigma = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2), scatter(brackets)
    degrees = max(1, round(1 / squares) - 1)
    seen = student_quantile(0.5 + CONFIDENCE / 2, degrees) * math.sqrt(spread / (1 - squares))
    least = z * math.hypot(*(share * bracket.error(sigma) for share, bracket in zip(shares, brackets, strict=True)))
    margin = math.hypot(max(seen, least), z * hidden_error)
    return Interval(*(math.expm1(x) for x in (middle, middle - margin, middle + margin)))


def saved_power_w(saving: MeasuredSaving | None, baseline: BaselineView | None) -> Interval | None:
    """Return the energy saved per iteration divided by the tuned iteration time; None if energy was not measured.

    Without a slowdown this equals baseline power minus tuned power. A slower job draws less power for longer, so only
    the energy saved per iteration is used.
    """
    if saving is None or saving.saving_ratio is None or baseline is None or baseline.energy_j is None:
        return None
    tuned_time_s = baseline.iteration_time_s * (1.0 + saving.slowdown_ratio.estimate)
    power_w = baseline.energy_j / tuned_time_s
    ratio = saving.saving_ratio
    return Interval(ratio.estimate * power_w, ratio.low * power_w, ratio.high * power_w)


def sum_of_significant(intervals: Sequence[Interval]) -> Interval | None:
    """Return the sum of the significant estimates, assuming independent errors; None if none is significant."""
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


def _is_moved_by_limits(older: Sequence[IterationObservation], newest: Sequence[IterationObservation]) -> bool:
    """Return whether all GPUs are at their power limits, and their clocks explain another iteration time."""
    moved = moved_clocks(older, newest)
    if not moved.ratios or len(moved.ratios) < len(newest[0].ranks):
        return False
    cycles_ratio = moved.of_all_ratio * median(o.own_time_s for o in newest) / median(o.own_time_s for o in older)
    return abs(cycles_ratio - 1) <= _SAME_CYCLES_RATIO + moved.error_ratio


def _differ(a: Sequence[float], b: Sequence[float]) -> bool:
    if len(a) < 2 or len(b) < 2:
        return False
    a_mean, b_mean = fmean(a), fmean(b)
    squares = sum((x - a_mean) ** 2 for x in a) + sum((x - b_mean) ** 2 for x in b)
    pooled = math.sqrt(squares / (len(a) + len(b) - 2))
    return abs(a_mean - b_mean) > _DIFFERS_AT_SIGMA * pooled * math.sqrt(1 / len(a) + 1 / len(b))


def student_quantile(probability: float, degrees: int) -> float:
    """Return Student's t quantile: exact for one and two degrees, else by expansion (Abramowitz and Stegun, 26.7.5)."""
    if degrees == 1:
        return math.tan(math.pi * (probability - 0.5))
    if degrees == 2:
        return (2 * probability - 1) * math.sqrt(2 / (4 * probability * (1 - probability)))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / float(degrees) ** (k + 1) for k, term in enumerate(terms))
