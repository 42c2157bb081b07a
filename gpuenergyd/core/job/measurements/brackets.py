"""Effect of a plan on time and energy, from brackets: a full-speed block and the plan's iterations on either side.

Theory of operation. A job changes while it is measured: data loading warms up, other processes come and go, the room
gets warmer. So a block at full speed is compared only with the plan's iterations directly before and after it. A steady
drift through the bracket affects both sides in opposite directions and cancels. A job's first iterations, before any
plan, are in no bracket.

A bracket is void if its two spans differ by more than the scatter of iterations, because something else changed within
it. Each bracket gives one effect, from medians, so that single stalls do not matter. Between two blocks each iteration
belongs to the nearer one, so that the effects are independent. The estimate is their mean, weighted by the iterations
near each block, since the saving may change over time, for example when the GPU throttles. The confidence interval is
Student's, from the spread of the effects, and so includes any variation from bracket to bracket. It is never narrower
than the scatter of iterations implies, because a few effects may agree by chance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple

from gpuenergyd.core.measurement.robust import MEDIAN_PER_MEAN_ERROR, robust_sigma, weighted_median


class LogPoint(NamedTuple):
    """Logarithm of the time or energy of an iteration, or the median over consecutive iterations stored as one row."""

    first_index: int
    value: float
    num_iterations: int = 1

    @property
    def last_index(self) -> int:
        return self.first_index + self.num_iterations - 1


LEAST_BRACKETS = 2
_SPAN = 8
"""Number of a plan's iterations compared on each side of a block."""
_LEAST_SIDE = 2
"""Minimum number of iterations of a block or a span."""
_LARGEST_GAP = 3
"""Maximum distance in iterations from a block to its spans; iterations with changing clocks in between are missing."""
REACH = _SPAN + _LARGEST_GAP
"""Iterations farther than this from any block are in no bracket."""
_VOID_AT_SIGMA = 3.5
_TOLERATED = 0.005
"""Spans may always differ by this much due to slow drift; the bracket's error is at most half of it."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """A block at full speed and the iterations under plans on either side of it."""

    before: tuple[LogPoint, ...]
    block: tuple[LogPoint, ...]
    after: tuple[LogPoint, ...]
    num_near: float
    """Number of iterations, stored or not, that are nearer to this block than to others."""

    @property
    def effect(self) -> float:
        """Logarithm of the ratio of the plan's value to the full-speed value."""
        return fmean((_middle(self.before), _middle(self.after))) - _middle(self.block)

    def error(self, sigma: float) -> float:
        """Return the part of the effect's standard error that comes from the scatter of single iterations."""
        shares = 1 / _count(self.block) + (1 / _count(self.before) + 1 / _count(self.after)) / 4
        return sigma * MEDIAN_PER_MEAN_ERROR * math.sqrt(shares)

    def is_void(self, sigma: float) -> bool:
        """Return whether the two spans differ by more than the scatter of single iterations."""
        chance = sigma * MEDIAN_PER_MEAN_ERROR * math.sqrt(1 / _count(self.before) + 1 / _count(self.after))
        return abs(_middle(self.before) - _middle(self.after)) > max(_TOLERATED, _VOID_AT_SIGMA * chance)


def complete_brackets(full_speed: Sequence[LogPoint], tuned: Sequence[LogPoint]) -> list[Bracket]:
    """Return the complete brackets of a job in order; both arguments are sorted by iteration index."""
    runs = _runs(full_speed, tuned)
    found = []
    for number, (is_tuned, block) in enumerate(runs):
        if is_tuned or number in {0, len(runs) - 1}:
            continue
        before, after = runs[number - 1][1], runs[number + 1][1]
        begin, end = float(before[0].first_index), float(after[-1].last_index)
        if number > 2:  # the earlier half belongs to the previous block
            before = before[_half(before) :]
            begin = fmean((runs[number - 2][1][-1].last_index, block[0].first_index))
        if number < len(runs) - 3:
            after = after[: _half(after)]
            end = fmean((block[-1].last_index, runs[number + 2][1][0].first_index))
        num_near = block[0].first_index - begin + end - block[-1].last_index
        bracket = Bracket(_nearest(before[::-1])[::-1], tuple(block), _nearest(after), num_near)
        sides = (bracket.before, bracket.block, bracket.after)
        if all(_count(side) >= _LEAST_SIDE for side in sides) and _is_close(sides):
            found.append(bracket)
    return found


def scatter(brackets: Sequence[Bracket]) -> float:
    """Return the standard deviation of single iterations within blocks and spans.

    The smallest distance on each side is left out: the median of few iterations lies on one of them or near it, so
    including that distance would make the estimate a quarter too low.
    """
    sides = [side for bracket in brackets for side in (bracket.before, bracket.block, bracket.after)]
    distances = [
        distance
        for side in sides
        for distance in sorted(abs(point.value - _middle(side)) for point in side if point.num_iterations == 1)[1:]
    ]
    return robust_sigma(distances) if distances else 0.0


def _runs(full_speed: Sequence[LogPoint], tuned: Sequence[LogPoint]) -> list[tuple[bool, list[LogPoint]]]:
    """Return the iterations grouped into alternating runs at full speed and under plans."""
    runs: list[tuple[bool, list[LogPoint]]] = []
    for point, is_tuned in sorted([(point, False) for point in full_speed] + [(point, True) for point in tuned]):
        if not runs or runs[-1][0] is not is_tuned:
            runs.append((is_tuned, []))
        runs[-1][1].append(point)
    return runs


def _half(run: Sequence[LogPoint]) -> int:
    """Return how many points have their middle in the earlier half of a run's iterations."""
    ends = list(accumulate(point.num_iterations for point in run))
    return sum(2 * end - point.num_iterations < ends[-1] for end, point in zip(ends, run, strict=True))


def _nearest(run: Sequence[LogPoint]) -> tuple[LogPoint, ...]:
    """Return the first points that together contain one span of iterations."""
    ends = accumulate((point.num_iterations for point in run), initial=0)
    return tuple(point for point, num_before in zip(run, ends, strict=False) if num_before < _SPAN)


def _is_close(sides: Sequence[Sequence[LogPoint]]) -> bool:
    return all(right[0].first_index - left[-1].last_index <= _LARGEST_GAP for left, right in pairwise(sides))


def _count(points: Sequence[LogPoint]) -> int:
    return sum(point.num_iterations for point in points)


def _middle(points: Sequence[LogPoint]) -> float:
    middle = weighted_median((point.value, point.num_iterations) for point in points)
    assert middle is not None
    return middle
