"""Caching of expensive responses: rebuilt for each request, or reused for 0.2 s under load."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
CPU_SHARE = 0.05
"""Share of one CPU core that may be spent on rebuilding a response for each request."""
BURST_S = 0.1
LIFETIME_S = 0.2


@dataclass(slots=True)
class Snapshot(Generic[T]):
    """A cached response, rebuilt for each request while that uses little CPU time, else when it is `LIFETIME_S` old.

    Call `invalidate` after a change of state, so that the next request always shows the change.
    """

    build: Callable[[], T]
    monotonic_s: Callable[[], float] = time.monotonic
    cpu_s: Callable[[], float] = time.thread_time
    _credit_s: float = BURST_S
    _requested_at_s: float = float("-inf")
    _cached: tuple[T, float] | None = None

    def value(self) -> T:
        now_s = self.monotonic_s()
        self._credit_s = min(BURST_S, self._credit_s + (now_s - self._requested_at_s) * CPU_SHARE)
        self._requested_at_s = now_s
        if self._cached is None or self._credit_s > 0 or now_s - self._cached[1] >= LIFETIME_S:
            begin_s = self.cpu_s()
            self._cached = self.build(), now_s
            self.charge(self.cpu_s() - begin_s)
        return self._cached[0]

    def charge(self, spent_s: float) -> None:
        """Add CPU time to the cost of building the response."""
        self._credit_s = max(-BURST_S, self._credit_s - spent_s)

    def invalidate(self) -> None:
        """Rebuild the response at the next request."""
        self._cached = None


@dataclass(slots=True)
class SnapshotText(Generic[T]):
    """The encoded text of a snapshot, encoded once per build of the snapshot."""

    snapshot: Snapshot[T]
    encode: Callable[[T], bytes]
    _cached: tuple[T, bytes] | None = None

    def value(self) -> bytes:
        """Return the encoded response."""
        response = self.snapshot.value()
        if self._cached is None or self._cached[0] is not response:
            begin_s = self.snapshot.cpu_s()
            self._cached = response, self.encode(response)
            self.snapshot.charge(self.snapshot.cpu_s() - begin_s)
        return self._cached[1]
