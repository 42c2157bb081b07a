"""Keeps threads of the client from calling the device while the program captures a graph of its work.

A CUDA call from another thread breaks a capture in its usual, global mode: even the query of an event.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CaptureGate:
    """Mutual exclusion between captures, which may overlap, and the calls of one thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_captures = 0

    def begin_capture(self) -> None:
        """Wait until no call is in progress, microseconds at most, and let none begin until the capture has ended."""
        with self._changed:
            self._num_captures += 1

    def end_capture(self) -> None:
        """Permit calls again after the last capture."""
        with self._changed:
            self._num_captures = max(0, self._num_captures - 1)
            self._changed.notify_all()

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is being captured now."""
        return self._num_captures > 0

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Wait until no graph is being captured, and let none begin while the block calls the device."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_captures == 0)
            yield
