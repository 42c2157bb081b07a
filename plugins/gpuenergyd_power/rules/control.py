"""Power control of a host: the backstop, the learned excess, and whether plans are trusted to keep the budget."""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from gpuenergyd_power.rules.backstop import Backstop, GpuPower

PEAK_S = 1.0
"""Averaging time of the power whose highest value is limited."""
PEAK_TOLERANCE_RATIO = 0.01
"""How far one-second means may exceed the budget."""
_GAIN = 0.5
_LIMITS_RATIO = (-0.05, 0.5)
"""Range of the excess relative to the budget; its lower end limits the extra power after too high predictions."""


@dataclass(slots=True)
class PowerTrim:
    """The learned excess of measured over predicted power, from means and peaks of measured power.

    Predictions are means over iterations, and contain the errors of the jobs' curves. A budget limits the long-term
    mean and, with a small tolerance, the mean of each second. The larger excess is subtracted from the budget before it
    is divided.
    """

    excess_w: float = 0.0
    _readings: deque[tuple[float, float]] = field(default_factory=deque)
    _peak_w: float = 0.0
    _sum_w: float = 0.0
    _num_readings: int = 0
    _begun_s: float | None = None

    def begin(self) -> None:
        """Restart the measurement, because targets have changed."""
        self._readings.clear()
        self._begun_s, self._peak_w, self._sum_w, self._num_readings = None, 0.0, 0.0, 0

    def observe(self, now_s: float, measured_w: float) -> None:
        """Add a reading of the power of the whole host."""
        self._begun_s = now_s if self._begun_s is None else self._begun_s
        self._readings.append((now_s, measured_w))
        self._sum_w += measured_w
        self._num_readings += 1
        while len(self._readings) > 1 and now_s - self._readings[0][0] >= PEAK_S:
            self._readings.popleft()
        if now_s - self._begun_s >= PEAK_S:
            self._peak_w = max(self._peak_w, sum(w for _, w in self._readings) / len(self._readings))

    def is_measured(self, now_s: float, least_s: float) -> bool:
        """Return whether the present targets were measured for at least `least_s` after the first second."""
        return self._begun_s is not None and now_s - self._begun_s >= PEAK_S + least_s

    def learn(self, predicted_w: float, budget_w: float) -> None:
        """Move the excess towards the measured one, and restart the measurement.

        Args:
            predicted_w: sum of the predictions of the targets in force, without this excess.
            budget_w: the budget in force.
        """
        mean_w = self._sum_w / max(1, self._num_readings)
        drawn_w = max(mean_w, self._peak_w - PEAK_TOLERANCE_RATIO * budget_w)
        self.add(_GAIN * (drawn_w - predicted_w - self.excess_w), budget_w)

    def add(self, change_w: float, budget_w: float) -> None:
        """Change the excess at once, within its limits, and restart the measurement."""
        least, most = (ratio * budget_w for ratio in _LIMITS_RATIO)
        self.excess_w = min(most, max(least, self.excess_w + change_w))
        self.begin()


_LEAST_LEARNING_S = 3.0
_SAME_RATIO = 1e-6
_MEAN_S = 1.0


@dataclass(frozen=True, slots=True)
class Division:
    """The prediction of a division of the budget, and the conditions for which it was made."""

    predicted_w: float
    longest_iteration_s: float
    occasion: Hashable


@dataclass(slots=True)
class PowerControl:
    """State between power readings; the caller decides divisions, and passes on targets and ceilings."""

    backstop: Backstop = field(default_factory=Backstop)
    trim: PowerTrim = field(default_factory=PowerTrim)
    division: Division | None = None
    _recent: deque[tuple[float, float]] = field(default_factory=deque)

    @property
    def mean_w(self) -> float | None:
        """Mean power of the host over the last second; None before the first reading."""
        return sum(w for _, w in self._recent) / len(self._recent) if self._recent else None

    def divided(self, division: Division | None, *, has_changed: bool) -> None:
        """Record a new division, and whether any job's target or limit has changed with it."""
        self.division = division
        if has_changed:
            self.trim.begin()

    def fits(self, budget_w: float | None, occasion: Hashable, *, are_followed: bool) -> bool:
        """Return whether the jobs follow plans that are predicted to keep the present budget."""
        division = self.division
        if division is None or budget_w is None or division.occasion != occasion or not are_followed:
            return False
        return division.predicted_w + self.trim.excess_w <= budget_w * (1 + _SAME_RATIO)

    def observe(
        self, now_s: float, readings: Mapping[str, GpuPower], *, budget_w: float | None, host_power_w: float, fits: bool
    ) -> bool:
        """Compare the power of the host with its budget, as `Backstop.observe`; return whether ceilings changed."""
        num_cuts, was_cutting = self.backstop.num_cuts, self.backstop.is_cutting
        has_changed = self.backstop.observe(
            now_s, readings, budget_w=budget_w, host_power_w=host_power_w, plans_fit=fits
        )
        measured_w = self.backstop.measured_w or 0.0
        self.trim.observe(now_s, measured_w)
        self._recent.append((now_s, measured_w))
        while now_s - self._recent[0][0] > _MEAN_S - _SAME_RATIO:
            self._recent.popleft()
        if self.backstop.num_cuts > num_cuts and fits and budget_w is not None:
            self.trim.add(max(0.0, self._drawn_w(now_s) - budget_w), budget_w)
        if self.backstop.is_cutting != was_cutting:
            self.trim.begin()
        return has_changed

    def _drawn_w(self, now_s: float) -> float:
        """Return the power that made the backstop act: the larger of the means over its patience and over a second.

        A single reading would be one point of the power wave within an iteration.
        """
        since_s = now_s - self.backstop.rules.patience_s
        latest = [w for at_s, w in self._recent if at_s >= since_s - _SAME_RATIO]
        return max(sum(latest) / len(latest), self.mean_w or 0.0)

    def learn(self, now_s: float, budget_w: float, *, fits: bool) -> None:
        """Learn the excess from the power drawn under followed plans, once they have run for two iterations."""
        if self.division is None or self.backstop.is_cutting or not fits:
            self.trim.begin()
        elif self.trim.is_measured(now_s, max(_LEAST_LEARNING_S, 2 * self.division.longest_iteration_s)):
            self.trim.learn(self.division.predicted_w, budget_w)
