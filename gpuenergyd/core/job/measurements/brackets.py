"""Effects of a plan from brackets: a block at full speed between two spans under the plan, and nothing farther away.

Theory of operation. A job changes while it is measured: loading warms up, other processes come and go, the room becomes
warmer. So a block at full speed is compared only with the iterations under the plan directly before and after it. Half
a change that goes on through the bracket is on either side, and cancels. The first iterations of a job, before any
plan, are in no bracket.

A bracket whose two spans differ beyond the scatter of iterations is void: something else has changed within it. Each
bracket gives one effect, of medians, so that single stalls do not count. Between two blocks each iteration belongs to
the nearer one, so that the effects are independent. The estimate is their mean, and the interval is Student's, from
their own spread: what changes from bracket to bracket is in it, whatever its kind. It is never
narrower than the scatter of iterations makes it: few effects may agree by chance.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import TypeAlias

from gpuenergyd.core.measurement.robust import robust_sigma

LogPoint: TypeAlias = tuple[int, float]
"""The index of one iteration and the logarithm of its time or energy."""

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
_MEDIAN_ERROR = 1.2533
"""Standard error of the median over that of the mean, of normal noise."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """A block at full speed and the iterations under plans on either side of it."""

    before: tuple[LogPoint, ...]
    block: tuple[LogPoint, ...]
    after: tuple[LogPoint, ...]

    @property
    def effect(self) -> float:
        """The plan's values over those at full speed, as a logarithm."""
        return fmean((_middle(self.before), _middle(self.after))) - _middle(self.block)

    def error(self, sigma: float) -> float:
        """Return the standard error of the effect, as far as it comes from the scatter of single iterations."""
        shares = 1 / len(self.block) + (1 / len(self.before) + 1 / len(self.after)) / 4
        return sigma * _MEDIAN_ERROR * math.sqrt(shares)

    def is_void(self, sigma: float) -> bool:
        """Return whether the two spans differ beyond the scatter of single iterations."""
        chance = sigma * _MEDIAN_ERROR * math.sqrt(1 / len(self.before) + 1 / len(self.after))
        return abs(_middle(self.before) - _middle(self.after)) > max(_TOLERATED, _VOID_AT_SIGMA * chance)


def complete_brackets(full_speed: Sequence[LogPoint], tuned: Sequence[LogPoint]) -> list[Bracket]:
    """Return the complete brackets of a job, in order; both sequences are by iteration index."""
    runs = _runs(full_speed, tuned)
    shares = [_SPAN if is_tuned else 0 for is_tuned, _ in runs]
    found = []
    for number, (is_tuned, block) in enumerate(runs):
        if is_tuned or number in {0, len(runs) - 1}:
            continue
        before, after = runs[number - 1][1], runs[number + 1][1]
        is_shared = number > 2, number < len(runs) - 3
        num_before = min(shares[number - 1], (len(before) + 1) // 2 if is_shared[0] else len(before))
        num_after = min(shares[number + 1], len(after) // 2 if is_shared[1] else len(after))
        bracket = Bracket(tuple(before[len(before) - num_before :]), tuple(block), tuple(after[:num_after]))
        if min(len(bracket.before), len(block), len(bracket.after)) >= _LEAST_SIDE and _is_close(bracket):
            found.append(bracket)
    return found


def scatter(brackets: Sequence[Bracket]) -> float:
    """Return the standard deviation of single iterations within blocks and spans."""
    distances = [
        abs(value - _middle(side))
        for bracket in brackets
        for side in (bracket.before, bracket.block, bracket.after)
        for _, value in side
    ]
    return robust_sigma(distances) if distances else 0.0


def _runs(full_speed: Sequence[LogPoint], tuned: Sequence[LogPoint]) -> list[tuple[bool, list[LogPoint]]]:
    """Return the iterations as runs at full speed and under plans by turns."""
    ordered = sorted([(index, False, value) for index, value in full_speed] + [(i, True, value) for i, value in tuned])
    runs: list[tuple[bool, list[LogPoint]]] = []
    for index, is_tuned, value in ordered:
        if not runs or runs[-1][0] is not is_tuned:
            runs.append((is_tuned, []))
        runs[-1][1].append((index, value))
    return runs


def _is_close(bracket: Bracket) -> bool:
    sides = (bracket.before, bracket.block, bracket.after)
    return all(right[0][0] - left[-1][0] <= _LARGEST_GAP for left, right in pairwise(sides))


def _middle(points: Sequence[LogPoint]) -> float:
    return median(value for _, value in points)
