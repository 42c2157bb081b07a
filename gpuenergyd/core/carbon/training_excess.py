"""Time that the plans of several replicas cost one training, for the account that the first replica's host keeps.

Theory of operation. Replicas end each iteration together. The account is charged with what an iteration took, but of an
iteration that something else prolonged only with the permitted time (`charged_time_s`). The plan of another replica may
be such a thing: while it is profiled, or until it has followed a new target. So each host counts what its own plans
cost. What that grows by beyond the charges of the same time is charged to the account, too, but never more than recent
iterations took: stalls, checkpoints and slow GPUs cost no budget, and nothing is charged twice.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

_RECENT_ITERATIONS = 32
"""Iterations that a late report of another replica may refer to."""
_MAX_SETTLING_ITERATIONS = 64


@dataclass(slots=True)
class PlanExcess:
    """Time beyond full speed that a job's own plans have cost; slow hardware and disturbances are no plans."""

    total_s: float = 0.0
    _permitted_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SETTLING_ITERATIONS))

    def add(
        self,
        charged_s: float,
        *,
        full_speed_time_s: float,
        permitted_time_s: float,
        is_profiled: bool,
        settling_iterations: int,
    ) -> None:
        """Add an iteration under a plan with the time that it was charged with, and the target at its begin.

        A profiling plan costs all that it takes, a tuned one at most what the targets of the last iterations permitted:
        a new one takes effect later.
        """
        self._permitted_s.appendleft(permitted_time_s)
        if not is_profiled:
            charged_s = min(charged_s, max(islice(self._permitted_s, max(1, settling_iterations))))
        self.total_s += max(0.0, charged_s - full_speed_time_s)


@dataclass(slots=True)
class OtherPlansExcess:
    """What plans of other replicas have cost and the account of this one was not charged with."""

    _reported_s: float | None = None
    _open_s: float = 0.0
    """Reported, and neither charged nor found in an iteration yet; negative while the last charge was not reported."""
    _uncharged_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_ITERATIONS))
    """By recent iteration, time that the account was not charged with."""

    def report(self, excess_s: float) -> float:
        """Return what to charge after a report of what other replicas' plans have cost so far in sum."""
        if self._reported_s is not None:
            self._open_s += max(0.0, excess_s - self._reported_s)
        self._reported_s = excess_s
        return self._claim()

    def iteration(self, *, charged_excess_s: float, uncharged_s: float) -> float:
        """Return what to charge after an iteration, beyond its own charge.

        Args:
            charged_excess_s: what the account was charged with for it, beyond full speed.
            uncharged_s: what it took beyond that.
        """
        if self._reported_s is None:
            return 0.0
        own_s = max(0.0, charged_excess_s)
        self._open_s = max(-own_s, self._open_s - own_s)
        self._uncharged_s.append(max(0.0, uncharged_s))
        return self._claim()

    def _claim(self) -> float:
        claimed_s = left_s = max(0.0, min(self._open_s, sum(self._uncharged_s)))
        self._open_s -= claimed_s
        for number, uncharged_s in enumerate(self._uncharged_s):
            taken_s = min(left_s, uncharged_s)
            self._uncharged_s[number] = uncharged_s - taken_s
            left_s -= taken_s
        return claimed_s
