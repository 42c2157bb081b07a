"""Distribution of switch latencies that are known only within bounds, because the driver shows clocks late.

Each change took effect between two bounds. These are as far apart as clocks are old when read, 100 ms on one H200,
while latencies are 5 to 60 ms. All bounds together still determine the distribution, because the reading that may show
a change comes at a random time: if half of the readings after 20 ms show it, the median is 20 ms. The likelihood of the
interval-censored times (Turnbull, 1976) is maximized on a grid with the EM algorithm. Each round also averages
neighbours a little (Silverman et al., 1990); otherwise the bounds of few changes would put all weight on a few steps.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_NUM_STEPS, _NUM_ROUNDS = 40, 30
_NEIGHBOUR_WEIGHT = 0.125
_LEAST_SHARE = 1e-12


@dataclass(frozen=True, slots=True)
class LatencyDistribution:
    """Shares of latencies in steps of equal width that begin at 0; the rest, up to 1, is longer than all steps."""

    step_s: float
    shares: tuple[float, ...]

    def quantile_s(self, share: float) -> float | None:
        """Return a quantile; None if too many changes were never seen to take effect."""
        left = share
        for k, of_step in enumerate(self.shares):
            if of_step >= left:
                return self.step_s * (k + left / max(of_step, _LEAST_SHARE))
            left -= of_step
        return None


def distribution_of(bounds_s: Sequence[tuple[float, float | None]]) -> LatencyDistribution:
    """Return the distribution of latencies with these bounds; the upper bound is None if no effect was seen."""
    step_s = max((high_s for _, high_s in bounds_s if high_s is not None), default=0.0) / _NUM_STEPS
    if not step_s:
        return LatencyDistribution(0.0, ())
    counts = Counter(_steps(low_s, high_s, step_s) for low_s, high_s in bounds_s)
    shares = [1.0 / (_NUM_STEPS + 1)] * (_NUM_STEPS + 1)
    for _ in range(_NUM_ROUNDS):
        up_to = list(accumulate(shares, initial=0.0))
        weights = [0.0] * (_NUM_STEPS + 2)  # the weight added from each step on
        for (first, end), count in counts.items():
            share = up_to[end] - up_to[first]
            weight = count / (share if share > _LEAST_SHARE else _LEAST_SHARE)  # noqa: FURB136  a third faster than max()
            weights[first] += weight
            weights[end] -= weight
        expected = [share * weight / len(bounds_s) for share, weight in zip(shares, accumulate(weights), strict=False)]
        shares = [*_smoothed(expected[:-1]), expected[-1]]
    return LatencyDistribution(step_s, tuple(shares[:-1]))


def _steps(low_s: float, high_s: float | None, step_s: float) -> tuple[int, int]:
    """Return the first step in which a latency may lie and that after the last; longer ones are in the last of all."""
    if high_s is None:
        return min(_NUM_STEPS, math.ceil(low_s / step_s)), _NUM_STEPS + 1
    first = min(_NUM_STEPS - 1, int(low_s / step_s))
    return first, max(first + 1, min(_NUM_STEPS, math.ceil(high_s / step_s)))


def _smoothed(shares: Sequence[float]) -> list[float]:
    padded = [shares[0], *shares, shares[-1]]
    return [
        (1 - 2 * _NEIGHBOUR_WEIGHT) * share + _NEIGHBOUR_WEIGHT * (before + after)
        for before, share, after in zip(padded, shares, padded[2:], strict=False)
    ]
