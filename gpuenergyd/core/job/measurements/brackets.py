"""Change of time and energy by a plan, from brackets: a full-speed block and the plan's iterations on both sides.

Theory of operation. A job changes while it is measured: loading warms up, other processes come and go, the room becomes
warmer. So a block at full speed is compared only with the iterations under the plan directly before and after it. Half
a change that goes on through the bracket is on either side, and cancels. The first iterations of a job, before any
plan, are in no bracket.

A bracket whose two spans differ beyond the scatter of iterations is void: something else has changed within it. Each
bracket gives one effect, of medians, so that single stalls do not count. Between two blocks each iteration belongs to
the nearer one, so that the effects are independent. The estimate is their mean, in which each counts as the iterations
near its block, since what a plan saves may change, as where the GPU throttles. The interval is Student's, from the
spread of the effects: what changes from bracket to bracket is in it, whatever its kind. It is never narrower than the
scatter of iterations makes it: few effects may agree by chance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple

from gpuenergyd.core.measurement.robust import MEDIAN_PER_MEAN_ERROR, robust_sigma, weighted_median


class LogPoint(NamedTuple):
    """An iteration, or consecutive ones stored as one row, and the logarithm of its time or energy (their medians)."""

    first_index: int
    value: float
    num_iterations: int = 1

    @property
    def last_index(self) -> int:
        return self.first_index + self.num_iterations - 1


LEAST_BRACKETS = 2
_SPAN = 8
"""Iterations under the plan that are compared on each side of a block."""
_LEAST_SIDE = 2
"""Fewer iterations, of a block or of a span, say nothing."""
_LARGEST_GAP = 3
"""Iterations from a block to the spans beside it, of which some are missing since clocks were changing there."""
REACH = _SPAN + _LARGEST_GAP
"""Iterations farther from any block are in no bracket."""
_VOID_AT_SIGMA = 3.5
_TOLERATED = 0.005
"""Spans may always differ by this, as a slow drift makes them: at most half of it is the error of a bracket."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """A block at full speed and the iterations under plans on either side of it."""

    before: tuple[LogPoint, ...]
    block: tuple[LogPoint, ...]
    after: tuple[LogPoint, ...]
    num_near: float
    """Iterations, stored or not, that are nearer to this block than to others."""

    @property
    def effect(self) -> float:
        """The plan's values over those at full speed, as a logarithm."""
        return fmean((_middle(self.before), _middle(self.after))) - _middle(self.block)

    def error(self, sigma: float) -> float:
        """Return the standard error of the effect, as far as it comes from the scatter of single iterations."""
        shares = 1 / _count(self.block) + (1 / _count(self.before) + 1 / _count(self.after)) / 4
        return sigma * MEDIAN_PER_MEAN_ERROR * math.sqrt(shares)

    def is_void(self, sigma: float) -> bool:
        """Return whether the two spans differ beyond the scatter of single iterations."""
        chance = sigma * MEDIAN_PER_MEAN_ERROR * math.sqrt(1 / _count(self.before) + 1 / _count(self.after))
        return abs(_middle(self.before) - _middle(self.after)) > max(_TOLERATED, _VOID_AT_SIGMA * chance)


def complete_brackets(full_speed: Sequence[LogPoint], tuned: Sequence[LogPoint]) -> list[Bracket]:
    """Return the complete brackets of a job, in order; both sequences are by iteration index."""
    runs = _runs(full_speed, tuned)
    found = []
    for number, (is_tuned, block) in enumerate(runs):
        if is_tuned or number in {0, len(runs) - 1}:
            continue
        before, after = runs[number - 1][1], runs[number + 1][1]
        begin, end = float(before[0].first_index), float(after[-1].last_index)
        if number > 2:  # the earlier half belongs to the block before
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

    The smallest distance on each side counts nothing: a side's median lies on one of few iterations, or near it. With
    it, the estimate would be a quarter too low.
    """
    sides = [side for bracket in brackets for side in (bracket.before, bracket.block, bracket.after)]
    distances = [
        distance
        for side in sides
        for distance in sorted(abs(point.value - _middle(side)) for point in side if point.num_iterations == 1)[1:]
    ]
    return robust_sigma(distances) if distances else 0.0


def _runs(full_speed: Sequence[LogPoint], tuned: Sequence[LogPoint]) -> list[tuple[bool, list[LogPoint]]]:
    """Return the iterations as runs at full speed and under plans by turns."""
    runs: list[tuple[bool, list[LogPoint]]] = []
    for point, is_tuned in sorted([(point, False) for point in full_speed] + [(point, True) for point in tuned]):
        if not runs or runs[-1][0] is not is_tuned:
            runs.append((is_tuned, []))
        runs[-1][1].append(point)
    return runs


def _half(run: Sequence[LogPoint]) -> int:
    """Return how many points have their middle in the earlier half of the iterations of a run."""
    ends = list(accumulate(point.num_iterations for point in run))
    return sum(2 * end - point.num_iterations < ends[-1] for end, point in zip(ends, run, strict=True))


def _nearest(run: Sequence[LogPoint]) -> tuple[LogPoint, ...]:
    """Return the first points, until they are as many iterations as a span."""
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
