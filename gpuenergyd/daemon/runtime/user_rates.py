"""Rate limits per user, with a token bucket for each uid."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

_MAX_KNOWN_USERS = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at_s: float


@dataclass(slots=True)
class UserRates:
    """One bucket per uid, full at first: permits `capacity` events at once, and `rate_per_s` in the long run."""

    rate_per_s: float
    capacity: float
    monotonic_s: Callable[[], float] = time.monotonic
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    def wait_s(self, uid: int) -> float:
        """Return the time until the next event is permitted; 0 if it is permitted now."""
        return max(0.0, (1.0 - self._filled(uid).tokens) / self.rate_per_s)

    def count(self, uid: int) -> None:
        self._filled(uid).tokens -= 1.0

    def _filled(self, uid: int) -> _Bucket:
        now_s = self.monotonic_s()
        if len(self._buckets) > _MAX_KNOWN_USERS:
            full_after_s = self.capacity / self.rate_per_s
            self._buckets = {u: b for u, b in self._buckets.items() if now_s - b.filled_at_s < full_after_s}
        bucket = self._buckets.setdefault(uid, _Bucket(self.capacity, now_s))
        bucket.tokens = min(self.capacity, bucket.tokens + (now_s - bucket.filled_at_s) * self.rate_per_s)
        bucket.filled_at_s = now_s
        return bucket
