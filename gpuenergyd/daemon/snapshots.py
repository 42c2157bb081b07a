"""Answers that are costly to build: fresh for whoever asks now and then, shared within a moment by those who flood."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
BUILDS_PER_S = 20.0
BURST = 10.0
LIFETIME_S = 0.05


@dataclass(slots=True)
class Snapshot(Generic[T]):
    """One answer: built anew for each request up to a rate, and above it only once it is older than a moment.

    Whoever changes what it says lets it `forget`, so that the change is read back whatever the rate.
    """

    build: Callable[[], T]
    monotonic_s: Callable[[], float] = time.monotonic
    _tokens: float = BURST
    _asked_at_s: float = float("-inf")
    _kept: tuple[T, float] | None = None

    def value(self) -> T:
        """Return the answer."""
        now_s = self.monotonic_s()
        self._tokens = min(BURST, self._tokens + (now_s - self._asked_at_s) * BUILDS_PER_S)
        self._asked_at_s = now_s
        if self._kept is None or self._tokens >= 1.0 or now_s - self._kept[1] >= LIFETIME_S:
            self._tokens = max(0.0, self._tokens - 1.0)
            self._kept = self.build(), now_s
        return self._kept[0]

    def forget(self) -> None:
        """Build the next answer anew."""
        self._kept = None
