"""Time that the plans of other replicas cost a training, charged to the account on the first replica's host.

Theory of operation. Replicas end each iteration together. The account is charged with an iteration's time, but at most
with the permitted time if something other than the plan prolonged it (`charged_time_s`). That something may be another
replica's plan, while it profiles or before it has followed a new target. So each host reports what its own plans have
cost. Growth of that cost beyond the charges of the same period is charged too, but never more than recent iterations
really took. Stalls, checkpoints and slow GPUs therefore use no budget, and nothing is charged twice.
"""

from collections import deque
from dataclasses import dataclass, field
from itertools import islice

_RECENT_ITERATIONS = 32
"""Number of recent iterations that a late report of another replica may refer to."""
_MAX_SETTLING_ITERATIONS = 64


@dataclass(slots=True)
class PlanExcess:
    """Time beyond full speed caused by a job's own plans, without slow hardware and disturbances."""

    total_s: float = 0.0
    _permitted_s: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_SETTLING_ITERATIONS))

    def add(
        self,
        charged_s: float,
        *,
        full_speed_time_s: float,
        permitted_time_s: float,
        is_trial: bool,
        settling_iterations: int,
    ) -> None:
        """Add an iteration under a plan, with its charged time and the target at its start.

        A trial is charged its full time. A tuned plan is charged at most what recent targets permitted,
        because a new target takes effect some iterations later.
        """
        self._permitted_s.appendleft(permitted_time_s)
        if not is_trial:
            charged_s = min(charged_s, max(islice(self._permitted_s, max(1, settling_iterations))))
        self.total_s += max(0.0, charged_s - full_speed_time_s)


@dataclass(slots=True)
class OtherPlansExcess:
    """Cost of other replicas' plans that this job's account has not been charged with."""

    _reported_s: float | None = None
    _open_s: float = 0.0
    """Reported cost not yet matched with an iteration; negative while the last charge has not been reported."""
    _uncharged_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT_ITERATIONS))
    """For each recent iteration, the part of its time that the account was not charged with."""

    def report(self, excess_s: float) -> float:
        """Return the time to charge after other replicas have reported the total cost of their plans."""
        if self._reported_s is not None:
            self._open_s += max(0.0, excess_s - self._reported_s)
        self._reported_s = excess_s
        return self._claim()

    def iteration(self, *, charged_excess_s: float, uncharged_s: float) -> float:
        """Return the time to charge after an iteration, in addition to its own charge.

        Args:
            charged_excess_s: the time beyond full speed charged for this iteration.
            uncharged_s: the time of this iteration beyond that charge.
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
