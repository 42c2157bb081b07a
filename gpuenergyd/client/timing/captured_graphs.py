"""CUDA graphs that the program captures and replays: the one being captured now, and listeners to replays."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

Replay = Callable[[], Any]
Follower = Callable[[Replay], Any]
"""Calls the replay that it is given, exactly once, and returns its result."""


class CapturedGraphs:
    """Told by the device's graph class of each capture and replay; graphs are of any type with weak references.

    A replay that nobody follows costs one look-up.
    """

    def __init__(self) -> None:
        self.gate = CaptureGate()
        self.num_captures = 0
        """Captures that have begun in this process."""
        self.num_unknown_replays = 0
        """Replays of graphs that nobody follows."""
        self._being_captured: dict[int, Any] = {}
        self._followers: WeakKeyDictionary[Any, Follower] = WeakKeyDictionary()
        self._of_capture: WeakSet[Any] = WeakSet()
        """Graphs whose follower ends with the next capture."""

    @property
    def being_captured(self) -> Any | None:
        """The graph that the present thread captures; None if it captures none."""
        return self._being_captured.get(threading.get_ident())

    def begin_capture(self, graph: Any) -> None:
        """Announce a capture: no other thread of ours calls the device until it has ended."""
        self.gate.begin_capture()
        self.num_captures += 1
        self._being_captured[threading.get_ident()] = graph
        if graph in self._of_capture:
            self.unfollow(graph)  # what it held before is gone

    def end_capture(self) -> None:
        """Announce the end of a capture, successful or not."""
        self._being_captured.pop(threading.get_ident(), None)
        self.gate.end_capture()

    def follow(self, graph: Any, follower: Follower, *, until_next_capture: bool = False) -> None:
        """Have each replay of a graph called through a follower, in place of an earlier one."""
        self._followers[graph] = follower
        (self._of_capture.add if until_next_capture else self._of_capture.discard)(graph)

    def is_followed(self, graph: Any) -> bool:
        """Return whether somebody follows the replays of a graph."""
        return graph in self._followers

    def unfollow(self, graph: Any) -> None:
        """Replay a graph without a follower again."""
        self._followers.pop(graph, None)
        self._of_capture.discard(graph)

    def replay(self, graph: Any, replay: Replay) -> Any:
        follower = self._followers.get(graph)
        if follower is None:
            self.num_unknown_replays += 1
            return replay()
        return follower(replay)


class CaptureGate:
    """Mutual exclusion between captures, which may overlap, and the calls of one thread.

    A CUDA call from another thread breaks a capture in its usual, global mode: even the query of an event.
    """

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
