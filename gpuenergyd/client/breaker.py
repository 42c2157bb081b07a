"""When to leave a silent daemon alone: a circuit breaker that is told the time."""

from dataclasses import dataclass

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


@dataclass(slots=True)
class CircuitBreaker:
    """Opens after three failures in a row; each further failure doubles the pause, up to half a minute."""

    num_failures: int = 0
    closed_again_mono_s: float = 0.0

    def may_try(self, now_mono_s: float) -> bool:
        """Whether a request is worth sending now."""
        return now_mono_s >= self.closed_again_mono_s

    def record_success(self) -> None:
        """Forget all failures."""
        self.num_failures = 0
        self.closed_again_mono_s = 0.0

    def record_failure(self, now_mono_s: float) -> None:
        """Count a failure, and open if it was one too many."""
        self.num_failures += 1
        if self.num_failures >= FAILURES_TO_OPEN:
            doublings = min(self.num_failures - FAILURES_TO_OPEN, 10)
            self.closed_again_mono_s = now_mono_s + min(FIRST_PAUSE_S * 2.0**doublings, LONGEST_PAUSE_S)
