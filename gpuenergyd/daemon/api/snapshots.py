"""Answers that are costly to build: fresh for whoever asks now and then, shared within a moment by those who flood."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
SHARE = 0.05
"""Of a core's time that goes into building an answer anew whenever it is asked for."""
BURST_S = 0.1
LIFETIME_S = 0.05


@dataclass(slots=True)
class Snapshot(Generic[T]):
    """One answer: built anew for each request while that takes little of a core, else once it is older than a moment.

    Whoever changes what it says lets it `forget`, so that the change is read back whatever the rate.
    """

    build: Callable[[], T]
    monotonic_s: Callable[[], float] = time.monotonic
    cpu_s: Callable[[], float] = time.thread_time
    _credit_s: float = BURST_S
    _asked_at_s: float = float("-inf")
    _kept: tuple[T, float] | None = None

    def value(self) -> T:
        """Return the answer."""
        now_s = self.monotonic_s()
        self._credit_s = min(BURST_S, self._credit_s + (now_s - self._asked_at_s) * SHARE)
        self._asked_at_s = now_s
        if self._kept is None or self._credit_s > 0 or now_s - self._kept[1] >= LIFETIME_S:
            begin_s = self.cpu_s()
            self._kept = self.build(), now_s
            self.charge(self.cpu_s() - begin_s)
        return self._kept[0]

    def charge(self, spent_s: float) -> None:
        """Count what else a new answer costs as part of building it."""
        self._credit_s = max(-BURST_S, self._credit_s - spent_s)

    def forget(self) -> None:
        """Build the next answer anew."""
        self._kept = None


@dataclass(slots=True)
class SnapshotText(Generic[T]):
    """A snapshot's answer as text, written once for each answer: so the text is no older than the answer may be."""

    snapshot: Snapshot[T]
    write: Callable[[T], bytes]
    _kept: tuple[T, bytes] | None = None

    def value(self) -> bytes:
        """Return the text."""
        answer = self.snapshot.value()
        if self._kept is None or self._kept[0] is not answer:
            begin_s = self.snapshot.cpu_s()
            self._kept = answer, self.write(answer)
            self.snapshot.charge(self.snapshot.cpu_s() - begin_s)
        return self._kept[1]
