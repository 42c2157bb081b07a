"""Power readings between two timestamped updates of an energy counter: how the energy is distributed over that time.

Theory of operation. A counter that is expensive to read is read about once a second; power, which is cheap, ten times
a second. The energy between two updates is known; only its distribution within that gap comes from power. A power
reading is an instantaneous value. If instructions and waits alternate faster than power is read, a reading says little
about the tenth of a second around it, and energy is best distributed evenly. If power changes slowly, energy follows
it. To distinguish the cases, the mean power by readings is compared with that by the counter from gap to gap: the slope
of the counter's means over the readings' means goes from 0 (unrelated) to 1. If all gaps have about the same mean, the
order of the readings decides: von Neumann's ratio, the mean square of successive differences over twice the variance,
is about 1 for readings in random order and near 0 for slow changes (Annals of Mathematical Statistics 12, 1941).

Between two readings, power changes at an unknown instant. The energy computed from a gap's readings therefore differs
from the known energy. The difference is distributed over the intervals between readings in proportion to the variance
of their energy. If power changed once, this finds the instant of the change. Given the energy of the gap, the variance
of a part of it is v * (1 - v / V), with v the variance of the part and V that of the whole gap.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_NS_PER_S = 1e9
_SAME_NS = 250_000_000
"""A driver may keep a value for 100 ms; equal values further apart than this are two readings."""
_READ_EVERY_S = 0.1
_MIN_READINGS = 4
_AROUND_NS = 1_000_000_000
"""Readings this long before and after a gap are used for the scatter of power."""
_MIN_GAPS = 4
_PRIOR_RATIO = 0.15
"""Scatter of the gaps' means, relative to power, above which they outweigh the order of readings."""
_ORDER_RATIO, _NO_ORDER_RATIO = 0.4, 0.75
"""Readings follow power below the first value of von Neumann's ratio, and may be unordered above the second: for 20
unordered readings the ratio is 1 with a standard deviation of 0.2."""
_CHANGE_SHARE = 1 / 6
"""Variance of the energy between two readings, as a share of (power change times duration) squared: 1/12 if power
changes once, more because an update may cut the interval short."""
_NOISE_RATIO, _NOISE_W = 0.03, 1.0
"""Error of a reading as a value for the power around it, even if its neighbours are equal."""
_LEAST_SPREAD_RATIO = 0.03
"""Minimum standard deviation relative to mean power, for changes that instantaneous readings miss."""
_SD_OF_95_PERCENT = 2.0


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two updates of the counter, and its energy."""

    begin_ns: int
    end_ns: int
    energy_j: float

    @property
    def mean_w(self) -> float:
        return self.energy_j / (self.end_ns - self.begin_ns) * _NS_PER_S


@dataclass(frozen=True, slots=True)
class GapShape:
    """Energy and its variance from the start of a gap, at some instants within it."""

    at_ns: tuple[int, ...]
    energy_j: tuple[float, ...]
    variance: tuple[float, ...]

    def energy_at(self, at_ns: int) -> float:
        """Return the energy from the start of the gap to an instant."""
        return _between(self.at_ns, self.energy_j, at_ns)

    def variance_between(self, begin_ns: int, end_ns: int) -> float:
        """Return the variance of the energy of a part, given the energy of the gap."""
        whole = self.variance[-1]
        part = _between(self.at_ns, self.variance, end_ns) - _between(self.at_ns, self.variance, begin_ns)
        return part * (1.0 - part / whole) if whole > 0.0 else 0.0


@dataclass(slots=True)
class PowerReadings:
    """Readings of one GPU's power."""

    _at_ns: list[int] = field(default_factory=list)
    _power_w: list[float] = field(default_factory=list)

    def record(self, mono_ns: int, power_w: float) -> None:
        """Record a reading, unless it is older than the last one or a value that the driver only repeats."""
        if self._at_ns:
            passed_ns = mono_ns - self._at_ns[-1]
            if passed_ns <= 0 or (power_w == self._power_w[-1] and passed_ns < _SAME_NS):
                return
        self._at_ns.append(mono_ns)
        self._power_w.append(power_w)

    def forget_before(self, mono_ns: int) -> None:
        """Drop readings that are not needed for gaps after this instant."""
        keep_from = bisect_left(self._at_ns, mono_ns - _AROUND_NS)
        if keep_from > 0:
            del self._at_ns[:keep_from], self._power_w[:keep_from]

    def shape(self, gap: Gap, around: Sequence[Gap]) -> GapShape:
        """Return how a gap's energy is distributed; `around` are the gaps near it, including itself."""
        at_ns, powers_w = self._points(gap)
        spread_w, trust = self._spread_w(gap), self._trust(around)
        durations_s = [(b - a) / _NS_PER_S for a, b in pairwise(at_ns)]
        levels_w = list(pairwise(powers_w))
        variances = [_variance(*two_w) * duration_s**2 for two_w, duration_s in zip(levels_w, durations_s, strict=True)]
        read_j = [sum(two_w) / 2 * duration_s for two_w, duration_s in zip(levels_w, durations_s, strict=True)]
        read_j = _with_sum(gap.energy_j, read_j, variances)
        points = [(0.0, 0.0, 0.0)]  # duration, energy by readings, and variance since the start
        for two_w, duration_s, energy_j, variance in zip(levels_w, durations_s, read_j, variances, strict=True):
            since_s, since_j, since_variance = points[-1]
            change_s = _change_s(*two_w, duration_s, energy_j)
            if change_s is not None:
                share = change_s / duration_s
                points.append((since_s + change_s, since_j + two_w[0] * change_s, since_variance + share * variance))
            points.append((since_s + duration_s, since_j + energy_j, since_variance + variance))
        even = spread_w**2 * _READ_EVERY_S
        return GapShape(
            tuple(gap.begin_ns + round(since_s * _NS_PER_S) for since_s, _, _ in points),
            tuple(trust * since_j + (1.0 - trust) * gap.mean_w * since_s for since_s, since_j, _ in points),
            tuple(trust * variance + (1.0 - trust) * even * since_s for since_s, _, variance in points),
        )

    def _points(self, gap: Gap) -> tuple[list[int], list[float]]:
        """Return a gap's two ends with the instants of the readings between them, and the power at each.

        Power at the ends is that of the last reading before and the first one after; without readings it is the mean.
        """
        first, last = bisect_right(self._at_ns, gap.begin_ns), bisect_left(self._at_ns, gap.end_ns)
        known_w = self._power_w or [gap.mean_w]
        at_ns = [gap.begin_ns, *self._at_ns[first:last], gap.end_ns]
        return at_ns, [known_w[max(0, first - 1)], *self._power_w[first:last], known_w[min(last, len(known_w) - 1)]]

    def _trust(self, gaps: Sequence[Gap]) -> float:
        """Return how well the means of readings follow those of the counter, from 0 to 1."""
        means = []
        for gap in gaps:
            at_ns, powers_w = self._points(gap)
            if len(at_ns) > 2:
                parts = zip(pairwise(at_ns), pairwise(powers_w), strict=True)
                read_j = sum((end_ns - begin_ns) * sum(two_w) / 2 for (begin_ns, end_ns), two_w in parts)
                means.append((read_j / (gap.end_ns - gap.begin_ns), gap.mean_w))
        if len(means) < _MIN_GAPS:
            return 0.0
        mean_read_w, mean_counted_w = (sum(column) / len(means) for column in zip(*means, strict=True))
        variance = sum((read_w - mean_read_w) ** 2 for read_w, _ in means)
        covariance = sum((read_w - mean_read_w) * (counted_w - mean_counted_w) for read_w, counted_w in means)
        weight = len(means) * (_PRIOR_RATIO * mean_counted_w) ** 2
        order = self._order(self._around(gaps[0].begin_ns, gaps[-1].end_ns))
        return min(1.0, max(0.0, (covariance + weight * order) / (variance + weight))) if weight > 0.0 else 0.0

    @staticmethod
    def _order(powers_w: Sequence[float]) -> float:
        """Return how similar successive readings are, from 0 to 1."""
        if len(powers_w) < _MIN_READINGS:
            return 0.0
        mean_w = sum(powers_w) / len(powers_w)
        variance = sum((power_w - mean_w) ** 2 for power_w in powers_w) / len(powers_w)
        ratio = _successive_variance(powers_w) / variance if variance > 0.0 else 1.0
        return min(1.0, max(0.0, (_NO_ORDER_RATIO - ratio) / (_NO_ORDER_RATIO - _ORDER_RATIO)))

    def _around(self, begin_ns: int, end_ns: int) -> Sequence[float]:
        return self._power_w[bisect_left(self._at_ns, begin_ns) : bisect_right(self._at_ns, end_ns)]

    def _spread_w(self, gap: Gap) -> float:
        """Return the standard deviation of instantaneous power; the mean power if unknown."""
        powers_w = self._around(gap.begin_ns - _AROUND_NS, gap.end_ns + _AROUND_NS)
        if len(powers_w) < _MIN_READINGS:
            return gap.mean_w
        return math.hypot(math.sqrt(_successive_variance(powers_w)), _LEAST_SPREAD_RATIO * gap.mean_w)


def _successive_variance(powers_w: Sequence[float]) -> float:
    """Return the variance estimated from successive differences."""
    return sum((after - before) ** 2 for before, after in pairwise(powers_w)) / (2 * (len(powers_w) - 1))


def error_range(energy_j: float, variance: float, most_j: float) -> tuple[float, float]:
    """Return a 95 % range of the energy, limited to possible values: from 0 to `most_j`."""
    margin_j = _SD_OF_95_PERCENT * math.sqrt(variance)
    return max(0.0, energy_j - margin_j), max(energy_j, min(most_j, energy_j + margin_j))


def _variance(before_w: float, after_w: float) -> float:
    """Return the variance of the mean power between two readings."""
    noise_w = _NOISE_W + _NOISE_RATIO * (before_w + after_w) / 2
    return _CHANGE_SHARE * (after_w - before_w) ** 2 + noise_w**2


def _change_s(before_w: float, after_w: float, duration_s: float, energy_j: float) -> float | None:
    """Return how long the first power lasted if power changed once; None if no single change gives this energy."""
    change_s = (energy_j - after_w * duration_s) / (before_w - after_w) if before_w != after_w else 0.0
    return change_s if 0.0 < change_s < duration_s else None


def _with_sum(sum_j: float, parts_j: list[float], variances: list[float]) -> list[float]:
    """Return parts corrected to a given sum, in proportion to their variances; none becomes negative."""
    missing_j = sum_j - sum(parts_j)
    whole = sum(variances)
    corrected_j = [part_j + missing_j * variance / whole for part_j, variance in zip(parts_j, variances, strict=True)]
    if min(corrected_j) >= 0.0:
        return corrected_j
    return [sum_j * part_j / sum(parts_j) for part_j in parts_j]


def _between(at_ns: Sequence[int], values: Sequence[float], instant_ns: int) -> float:
    """Return a value interpolated linearly at an instant; outside the known instants, the nearest value."""
    right = bisect_left(at_ns, instant_ns)
    if right == len(at_ns) or right == 0:
        return values[min(right, len(at_ns) - 1)]
    left = right - 1
    share = (instant_ns - at_ns[left]) / (at_ns[right] - at_ns[left])
    return values[left] + share * (values[right] - values[left])
