"""Excess of a host's power over the predictions for its targets, learned from means and peaks of measured power.

Predictions are means over iterations, and contain the errors of the jobs' curves. A budget limits the long-term mean
and, with a small tolerance, the mean of each second. The larger excess is subtracted from the budget before it is
divided.
"""

from collections import deque
from dataclasses import dataclass, field

PEAK_S = 1.0
"""Averaging time of the power whose highest value is limited."""
PEAK_TOLERANCE_RATIO = 0.01
"""How far one-second means may exceed the budget."""
_GAIN = 0.5
_LIMITS_RATIO = (-0.05, 0.5)
"""Range of the excess relative to the budget; its lower end limits the extra power after too high predictions."""


@dataclass(slots=True)
class PowerTrim:
    """The learned excess of measured over predicted power."""

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
