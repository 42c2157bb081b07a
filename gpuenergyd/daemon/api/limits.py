"""Request rate and connection limits per user."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_EXPIRY_S = 60.0
_MAX_KNOWN_USERS = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at_s: float


@dataclass(slots=True)
class RequestRates:
    """One token bucket per uid; a bucket holds the tokens of one second."""

    rate_per_s: float
    monotonic_s: Callable[[], float] = time.monotonic
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    def wait_s(self, uid: int) -> float:
        """Count a request of a user; return 0 if it is within the rate, else the time until it would be."""
        now_s = self.monotonic_s()
        if len(self._buckets) > _MAX_KNOWN_USERS:
            self._buckets = {u: b for u, b in self._buckets.items() if now_s - b.filled_at_s < _EXPIRY_S}
        capacity = max(1.0, self.rate_per_s)
        bucket = self._buckets.setdefault(uid, _Bucket(capacity, now_s))
        bucket.tokens = min(capacity, bucket.tokens + (now_s - bucket.filled_at_s) * self.rate_per_s)
        bucket.filled_at_s = now_s
        if bucket.tokens >= 1.0:
            bucket.tokens -= 1.0
            return 0.0
        return (1.0 - bucket.tokens) / self.rate_per_s


@dataclass(slots=True)
class ConnectionCounts:
    """Open connections per uid, and their limit."""

    max_per_user: int
    _open: Counter[int] = field(default_factory=Counter)

    def add(self, uid: int) -> bool:
        """Count a new connection unless it exceeds the limit; return whether it was counted."""
        if self._open[uid] >= self.max_per_user:
            return False
        self._open[uid] += 1
        return True

    def num_open(self, uid: int) -> int:
        """Return the number of open connections of a user."""
        return self._open.get(uid, 0)

    def remove(self, uid: int) -> None:
        """Remove a closed connection from the count."""
        self._open[uid] -= 1
        if self._open[uid] <= 0:
            del self._open[uid]
