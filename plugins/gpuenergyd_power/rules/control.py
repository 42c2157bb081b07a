"""Power control of a host: the backstop, the learned excess, and whether plans are trusted to keep the budget."""

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from gpuenergyd_power.rules.backstop import Backstop, GpuPower
from gpuenergyd_power.rules.trim import PowerTrim

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
        self,
        now_s: float,
        readings: Mapping[str, GpuPower],
        *,
        budget_w: float | None,
        host_power_w: float,
        fits: bool,
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
