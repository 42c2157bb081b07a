"""The account of time that work lost because it began on a lowered GPU.

A GPU may lose 0.1 % of the time in which it works, and 2 s for each day that has begun. What is not spent is kept.
"""

from dataclasses import dataclass

PER_WORKING_TIME_RATIO = 0.001
PER_DAY_S = 2.0
DAY_S = 86_400.0
_ASSUMED_LIFT_S = 0.3
"""Time from the start of work until the clock is high, until measured: a reading of 100 ms, its way, a raise."""
_LONGEST_LIFT_S, _NUM_KNOWN = 1.0, 10
"""Assumed longest time of a wake-up, until this many wake-ups have been measured."""
_WEIGHT = 0.2


@dataclass(slots=True)
class LostTimeAccount:
    """The account of one GPU; `slow_ratio` is the largest share of speed that a lowered GPU loses."""

    slow_ratio: float
    since_s: float
    working_s: float = 0.0
    lost_s: float = 0.0
    num_wakes: int = 0
    mean_lift_s: float = _ASSUMED_LIFT_S
    longest_lift_s: float = 0.0

    def allowed_s(self, at_s: float) -> float:
        """Return the time that may have been lost until now."""
        days_begun = int(max(0.0, at_s - self.since_s) / DAY_S) + 1
        return PER_WORKING_TIME_RATIO * self.working_s + PER_DAY_S * days_begun

    def balance_s(self, at_s: float) -> float:
        """Return the time that may still be lost."""
        return self.allowed_s(at_s) - self.lost_s

    def can_pay_wake(self, at_s: float) -> bool:
        """Return whether the slowest wake seen so far is covered."""
        longest_s = self.longest_lift_s if self.num_wakes >= _NUM_KNOWN else max(self.longest_lift_s, _LONGEST_LIFT_S)
        return self.balance_s(at_s) >= longest_s * self.slow_ratio

    def wakes_a_day(self, at_s: float) -> float:
        """Return how many wakes the next day's allowance pays."""
        days = max(1.0, (at_s - self.since_s) / DAY_S)
        coming_s = PER_WORKING_TIME_RATIO * self.working_s / days
        return max(0.0, self.balance_s(at_s) + coming_s) / max(1e-6, self.mean_lift_s * self.slow_ratio)

    def charge(self, lift_s: float) -> None:
        """Charge a wake whose work ran this long at the lower clock, as if its time were inverse to the clock."""
        self.lost_s += lift_s * self.slow_ratio
        self.num_wakes += 1
        self.mean_lift_s += _WEIGHT * (lift_s - self.mean_lift_s)
        self.longest_lift_s = max(self.longest_lift_s, lift_s)

    def charge_assumed(self) -> None:
        """Charge a wake that did not happen: nothing was lowered."""
        self.charge(_ASSUMED_LIFT_S)
