"""Slowdown account of a job: how much of the slowdown budget is used, and the longest iteration time still permitted.

Theory of operation. The account is charged with measured times. It returns how slow the next slot may be such that
running at full speed afterwards keeps the job within its budget. A plan takes effect some iterations late, iteration
times scatter, and full speed may have become slower than the baseline. A reserve covers this.
"""

import math
from dataclasses import dataclass

from gpuenergyd.core.carbon.account import charged_time_s

SETTLING_ITERATIONS = 8
"""Upper bound on the number of iterations from a new target to the first iteration under its plan."""
_DRIFT_PRIOR_ITERATIONS = 16
_RESERVED_SIGMAS = 3.0
_LEAST_RESERVE_RATIO = 0.02
"""Minimum reserve, as a ratio of one iteration."""
_FULL_SPEED_RATIO = 1e-6


@dataclass(frozen=True, slots=True)
class Allowance:
    """Slowdown budget, and the remaining time and work in which the job must get back within it.

    `left_s` is the remaining active time, infinite if only the work is limited. `work_s` is the time that the remaining
    work takes at full speed, None if unknown.
    """

    budget_ratio: float
    left_s: float
    work_s: float | None = None

    @property
    def rest_s(self) -> float:
        """The time that the rest takes at full speed, as far as it is known."""
        return self.left_s if self.work_s is None else self.work_s


@dataclass(slots=True)
class SlowdownAccount:
    """Time of a job beyond full speed, summed over all phases, without disturbances and stragglers."""

    num_iterations: int = 0
    full_speed_s: float = 0.0
    excess_s: float = 0.0
    drift_s: float = 0.0
    """Part of the excess that accrued with full speed as the target, after settling: drift, not caused by plans."""
    drift_full_speed_s: float = 0.0
    num_at_full_speed: int = 0
    """Consecutive iterations with full speed as the target."""

    def add(
        self,
        iteration_time_s: float,
        *,
        full_speed_time_s: float,
        permitted_time_s: float,
        is_own: bool,
        settling_iterations: int = SETTLING_ITERATIONS,
    ) -> None:
        charged_s = charged_time_s(
            iteration_time_s, full_speed_time_s=full_speed_time_s, permitted_time_s=permitted_time_s, is_own=is_own
        )
        self.num_iterations += 1
        self.full_speed_s += full_speed_time_s
        self.excess_s += charged_s - full_speed_time_s
        is_full_speed_target = permitted_time_s <= full_speed_time_s * (1.0 + _FULL_SPEED_RATIO)
        self.num_at_full_speed = self.num_at_full_speed + 1 if is_full_speed_target else 0
        if self.num_at_full_speed > settling_iterations:
            self.drift_s += charged_s - full_speed_time_s
            self.drift_full_speed_s += full_speed_time_s

    @property
    def active_s(self) -> float:
        """Total charged time."""
        return max(0.0, self.full_speed_s + self.excess_s)

    @property
    def slowdown_ratio(self) -> float | None:
        """Slowdown since the job began; negative if it ran faster; None before the first iteration."""
        return self.excess_s / self.full_speed_s if self.full_speed_s > 0 else None

    def drift_ratio(self, full_speed_time_s: float) -> float:
        """Return how much slower than the baseline full-speed iterations have become; at least 0."""
        known_s = self.drift_full_speed_s + _DRIFT_PRIOR_ITERATIONS * full_speed_time_s
        return max(0.0, self.drift_s / known_s)

    def reserve_s(self, full_speed_time_s: float, sigma_s: float, left_s: float) -> float:
        """Return the time reserved for drift of full speed over the remaining time, and for scatter."""
        drift_s = self.drift_ratio(full_speed_time_s) * (left_s if math.isfinite(left_s) else 0.0)
        return drift_s + _RESERVED_SIGMAS * sigma_s + _LEAST_RESERVE_RATIO * full_speed_time_s

    def longest_time_s(
        self, full_speed_time_s: float, *, allowance: Allowance, slot_s: float, reserve_s: float = 0.0
    ) -> float:
        """Return the longest iteration time in the next `slot_s` that full speed afterwards still makes up for.

        Infinite if there is no limit. A slot longer than the remaining time must stay within budget over its whole
        length, because the job may continue after it.
        """
        work_s, left_s = allowance.work_s, allowance.left_s
        if work_s is None:
            least_speed = self._least_speed(allowance.budget_ratio, slot_s, left_s, reserve_s, full_speed_time_s)
        else:
            budget_s = allowance.budget_ratio * (self.full_speed_s + work_s) - self.excess_s
            slack_s = max(0.0, min(budget_s, left_s - work_s) - reserve_s)
            work_in_s = min(slot_s, work_s + slack_s)
            least_speed = 1.0 - slack_s / work_in_s if work_in_s > 0 else 1.0
            if slot_s > work_in_s:
                beyond = self._least_speed(allowance.budget_ratio, slot_s, slot_s, reserve_s, full_speed_time_s)
                least_speed = max(least_speed, beyond)
        return full_speed_time_s / min(1.0, least_speed) if least_speed > 0 else math.inf

    def _least_speed(
        self, budget_ratio: float, slot_s: float, left_s: float, reserve_s: float, full_speed_time_s: float
    ) -> float:
        """Return the lowest speed in a slot (1 is full speed) that keeps the account within budget after `left_s`."""
        if left_s < slot_s:
            is_over_budget = self.excess_s + reserve_s > budget_ratio * self.full_speed_s
            left_s = slot_s = max(left_s, full_speed_time_s) if is_over_budget else slot_s
        required_s = self.excess_s + reserve_s + slot_s - budget_ratio * (self.full_speed_s + left_s - slot_s)
        return required_s / (slot_s * (1.0 + budget_ratio)) if slot_s > 0 else 1.0
