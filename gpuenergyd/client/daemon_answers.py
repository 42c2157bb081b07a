"""Whether the daemon answers a rank: a circuit breaker after failures, and when to report a long silence."""

from dataclasses import dataclass
from datetime import datetime

FAILURES_TO_OPEN = 3
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
SILENCE_REPORTED_AFTER_S = 30.0
"""If the daemon answers none of a rank's requests for this long, the program's log says so."""


@dataclass(slots=True)
class CircuitBreaker:
    """Opens after three consecutive failures; each further failure doubles the pause, up to 30 s."""

    num_failures: int = 0
    closed_again_mono_s: float = 0.0

    def may_try(self, now_mono_s: float) -> bool:
        """Return whether a request may be sent now."""
        return now_mono_s >= self.closed_again_mono_s

    def record_success(self) -> None:
        """Reset the failure count, so that reports are sent again."""
        self.num_failures = 0
        self.closed_again_mono_s = 0.0

    def record_failure(self, now_mono_s: float) -> None:
        """Count a failure; open the breaker after three consecutive ones."""
        self.num_failures += 1
        if self.num_failures >= FAILURES_TO_OPEN:
            doublings = min(self.num_failures - FAILURES_TO_OPEN, 10)
            self.closed_again_mono_s = now_mono_s + min(FIRST_PAUSE_S * 2.0**doublings, LONGEST_PAUSE_S)


@dataclass(slots=True)
class DaemonSilence:
    """How long the daemon has not answered a rank's requests; reported once when it is long, and again when it ends.

    Instants are monotonic, in seconds; `began_at` is the start in wall-clock time, for log messages.
    """

    began_mono_s: float | None = None
    began_at: datetime | None = None
    error: Exception | None = None
    is_reported: bool = False

    def record_failure(self, error: Exception, now_mono_s: float, now: datetime) -> None:
        """Record a request without an answer."""
        self.error = error
        if self.began_mono_s is None:
            self.began_mono_s, self.began_at = now_mono_s, now

    def report(self, now_mono_s: float) -> float | None:
        """Return the length of the silence in seconds if it should be reported now."""
        if self.is_reported or self.began_mono_s is None or now_mono_s - self.began_mono_s < SILENCE_REPORTED_AFTER_S:
            return None
        self.is_reported = True
        return now_mono_s - self.began_mono_s

    def end(self, now_mono_s: float) -> float | None:
        """Record an answer; return the length of the silence in seconds if it was reported."""
        began_mono_s, was_reported = self.began_mono_s, self.is_reported
        self.began_mono_s, self.began_at, self.error, self.is_reported = None, None, None, False
        return now_mono_s - began_mono_s if was_reported and began_mono_s is not None else None
