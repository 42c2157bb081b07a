"""What a job has spent of its slowdown budget, and the longest iteration time that it may still be given.

Theory of operation. The account is charged with measured times, and whoever plans is told by it how slow the next
stretch may become so that full speed afterwards still balances it. A plan takes some iterations to arrive, iteration
times scatter, and full speed itself may be slower than the baseline was: so a reserve is kept that covers just this,
and the account is looked at after every iteration, not only when a plan is due.
"""

import math
from dataclasses import dataclass
from datetime import datetime

SETTLING_ITERATIONS = 8
"""From an order to the first iteration that follows it: decided, sent, read and applied; generously."""
_DRIFT_PRIOR_ITERATIONS = 16
_SIGMAS_KEPT = 3.0
_LEAST_KEPT_RATIO = 0.02
"""Of one iteration."""
_FULL_SPEED_RATIO = 1e-6


@dataclass(frozen=True, slots=True)
class JobLength:
    """How long a job will be, as far as its owner has said: iterations, hours of training, or when it has to end."""

    num_iterations: int | None = None
    hours: float | None = None
    """At full speed."""
    deadline_at: datetime | None = None

    def total_iterations(self, full_speed_time_s: float) -> int | None:
        """Return how many iterations the job has in all; None where nobody has said."""
        if self.num_iterations is not None:
            return self.num_iterations
        return None if self.hours is None else max(1, math.ceil(self.hours * 3600.0 / full_speed_time_s))


@dataclass(frozen=True, slots=True)
class Allowance:
    """What an account has to balance, and by when.

    `left_s` is the active time until then, infinite where only the work says when; `work_s` is the work left, as time
    at full speed, None where nobody knows it.
    """

    budget_ratio: float
    left_s: float
    work_s: float | None = None


def charged_time_s(
    iteration_time_s: float, *, full_speed_time_s: float, permitted_time_s: float, is_own: bool
) -> float:
    """Return what an iteration counts for in a job's slowdown, in its account and in every report alike.

    One in which something else ran (a checkpoint, evaluation, a stall), or that waited for a straggler, counts with
    what the job was permitted at most: how slow its own part was nobody knows, no slower than that it was meant to be.
    """
    return iteration_time_s if is_own else min(iteration_time_s, max(permitted_time_s, full_speed_time_s))


@dataclass(slots=True)
class SlowdownAccount:
    """Time a job took beyond full speed, all its phases together, by its own doing."""

    num_iterations: int = 0
    full_speed_s: float = 0.0
    excess_s: float = 0.0
    drift_s: float = 0.0
    """Of the excess, what came while full speed was owed and had settled: nobody's plan, and not to be repaid by it."""
    drift_full_speed_s: float = 0.0
    num_at_full_speed: int = 0
    """Iterations in a row for which full speed was owed."""

    def add(self, iteration_time_s: float, *, full_speed_time_s: float, permitted_time_s: float, is_own: bool) -> None:
        """Charge one iteration; `is_own` as `charged_time_s` has it."""
        charged_s = charged_time_s(
            iteration_time_s, full_speed_time_s=full_speed_time_s, permitted_time_s=permitted_time_s, is_own=is_own
        )
        self.num_iterations += 1
        self.full_speed_s += full_speed_time_s
        self.excess_s += charged_s - full_speed_time_s
        owes_full_speed = permitted_time_s <= full_speed_time_s * (1.0 + _FULL_SPEED_RATIO)
        self.num_at_full_speed = self.num_at_full_speed + 1 if owes_full_speed else 0
        if self.num_at_full_speed > SETTLING_ITERATIONS:
            self.drift_s += charged_s - full_speed_time_s
            self.drift_full_speed_s += full_speed_time_s

    @property
    def active_s(self) -> float:
        """Time that was charged so far."""
        return max(0.0, self.full_speed_s + self.excess_s)

    @property
    def slowdown_ratio(self) -> float | None:
        """Slowdown of the whole job so far; negative when it ran faster; None before the first iteration."""
        return self.excess_s / self.full_speed_s if self.full_speed_s > 0 else None

    def drift_ratio(self, full_speed_time_s: float) -> float:
        """Return how much slower full speed itself is lately than the baseline says, never less than nothing."""
        known_s = self.drift_full_speed_s + _DRIFT_PRIOR_ITERATIONS * full_speed_time_s
        return max(0.0, self.drift_s / known_s)

    def reserve_s(self, full_speed_time_s: float, sigma_s: float, left_s: float) -> float:
        """Return what is never planned with: full speed's own drift over the time left, and scatter at its end."""
        drift_s = self.drift_ratio(full_speed_time_s) * (left_s if math.isfinite(left_s) else 0.0)
        return drift_s + _SIGMAS_KEPT * sigma_s + _LEAST_KEPT_RATIO * full_speed_time_s

    def longest_time_s(
        self, full_speed_time_s: float, *, allowance: Allowance, slot_s: float, reserve_s: float = 0.0
    ) -> float:
        """Return the longest iteration time of the next `slot_s` that full speed for the rest still makes up for.

        Infinite where any time does. A slot that lasts longer than what is left has to balance all the way: the job may
        go on after it, and slowness does.
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
        """Return the speed of a slot, full speed being 1, after which the account balances once `left_s` is over."""
        if left_s < slot_s:
            is_in_debt = self.excess_s + reserve_s > budget_ratio * self.full_speed_s
            left_s = slot_s = max(left_s, full_speed_time_s) if is_in_debt else slot_s
        owed_s = self.excess_s + reserve_s + slot_s - budget_ratio * (self.full_speed_s + left_s - slot_s)
        return owed_s / (slot_s * (1.0 + budget_ratio)) if slot_s > 0 else 1.0
