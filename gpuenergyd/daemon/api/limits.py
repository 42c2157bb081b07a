"""How much one user may ask for: so many requests a second, so many connections at once."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

_FORGET_AFTER_S = 60.0
_MAX_KNOWN_USERS = 1024


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at_s: float


@dataclass(slots=True)
class RequestRates:
    """A token bucket per uid; a bucket holds one second's worth, so a burst of that size passes."""

    rate_per_s: float
    monotonic_s: Callable[[], float] = time.monotonic
    _buckets: dict[int, _Bucket] = field(default_factory=dict)

    def wait_s(self, uid: int) -> float:
        """Take one request of a user; return 0, or how long to wait before it would be taken."""
        now_s = self.monotonic_s()
        if len(self._buckets) > _MAX_KNOWN_USERS:
            self._buckets = {u: b for u, b in self._buckets.items() if now_s - b.filled_at_s < _FORGET_AFTER_S}
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
    """How many connections each uid has open, and how many it may."""

    max_per_user: int
    _open: Counter[int] = field(default_factory=Counter)

    def take(self, uid: int) -> bool:
        """Count one more; return whether that is allowed (else it is not counted)."""
        if self._open[uid] >= self.max_per_user:
            return False
        self._open[uid] += 1
        return True

    def num_open(self, uid: int) -> int:
        """Return how many connections a user has."""
        return self._open.get(uid, 0)

    def give_back(self, uid: int) -> None:
        """Count one less."""
        self._open[uid] -= 1
        if self._open[uid] <= 0:
            del self._open[uid]
