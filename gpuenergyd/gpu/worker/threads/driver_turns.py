"""Turns of the GPUs' clock changes: the driver makes them one after another, so raises go first, then the oldest.

A call keeps its turn for a tenth of a second at most, which is several times what a call takes: one that does not
return delays the other GPUs by that, once.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_TURN_LIMIT_S = 0.1
_NS_PER_S = 1_000_000_000
_CALLS_KEPT = 64
"""More than one request can wait for: each GPU has at most one call between two of another GPU."""

Urgency = tuple[bool, int]
"""Whether a request may wait (it is no raise), and the instant for which it was made; the least goes first."""


@dataclass(frozen=True, slots=True)
class FinishedCall:
    """A driver call that set a GPU's clock: when it began and returned."""

    gpu_uuid: str
    called_mono_ns: int
    returned_mono_ns: int


class DriverTurns:
    """Lets one GPU after another change its clock; methods may be called on any thread."""

    def __init__(self, turn_limit_s: float = _TURN_LIMIT_S) -> None:
        self._turn_limit_s = turn_limit_s
        self._changed = threading.Condition()
        self._waiting: dict[str, Callable[[], Urgency]] = {}
        self._holder: str | None = None
        self._held_since_ns = 0
        self._finished: deque[FinishedCall] = deque(maxlen=_CALLS_KEPT)

    @contextmanager
    def turn(self, gpu_uuid: str, urgency: Callable[[], Urgency]) -> Iterator[None]:
        """Wait for the GPU's turn, and keep it during the block; the urgency may change while it waits."""
        with self._changed:
            self._waiting[gpu_uuid] = urgency
            while (wait_s := self._wait_s(gpu_uuid)) > 0.0:
                self._changed.wait(wait_s)
            del self._waiting[gpu_uuid]
            self._holder, self._held_since_ns = gpu_uuid, time.monotonic_ns()
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                if self._holder == gpu_uuid:
                    self._holder = None
                self._changed.notify_all()

    @property
    def num_waiting(self) -> int:
        """Number of GPUs that wait for their turn."""
        return len(self._waiting)

    def reconsider(self) -> None:
        """Have the waiting GPUs look again: the urgency of one has changed."""
        with self._changed:
            self._changed.notify_all()

    def record(self, call: FinishedCall) -> None:
        with self._changed:
            self._finished.append(call)

    def blocked_ns(self, gpu_uuid: str, due_ns: int, called_ns: int) -> int:
        """Return how long calls for other GPUs occupied the driver between these instants."""
        with self._changed:
            return sum(
                max(0, min(call.returned_mono_ns, called_ns) - max(call.called_mono_ns, due_ns))
                for call in self._finished
                if call.gpu_uuid != gpu_uuid
            )

    def _wait_s(self, gpu_uuid: str) -> float:
        """Return how long to wait before looking again unless something changes; 0 if it is this GPU's turn."""
        first = min(self._waiting, key=lambda uuid: (self._waiting[uuid](), uuid))
        held_s = (time.monotonic_ns() - self._held_since_ns) / _NS_PER_S
        if self._holder is not None and held_s < self._turn_limit_s:
            return self._turn_limit_s - held_s
        return 0.0 if first == gpu_uuid else self._turn_limit_s
