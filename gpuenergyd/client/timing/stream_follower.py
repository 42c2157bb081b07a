"""Thread that polls a device's events: the fallback where the GPU cannot write its progress into memory.

Each query needs the interpreter, for which a launch-bound program makes every thread wait. So the pause between two
queries is a multiple of the time that a query took, waiting included. Only replays of captured graphs, whose times are
overwritten by the next replay, and requests on devices that cannot give a signal are followed this way.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from gpuenergyd.client.timing.event_device import EventDevice
from gpuenergyd.client.timing.replays import ReplayReading

_POLL_S = 0.001
_PAUSE_PER_QUERY = 20.0
"""Pause after a query as a multiple of its time: at most one twentieth of a core is spent, or taken from training."""
_LONGEST_PAUSE_S = 0.1


class StreamFollower:
    """Calls functions when a device reaches events, in the order in which they were put; its thread starts with one."""

    def __init__(
        self, device: EventDevice, *, sleep: Callable[[float], None] = time.sleep, mono_s: Callable[[], float]
    ) -> None:
        self._device = device
        self._sleep = sleep
        self._mono_s = mono_s
        self._reached: queue.SimpleQueue[tuple[Any, Callable[[], None], ReplayReading | None] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def put(self, event: Any, act: Callable[[], None], reading: ReplayReading | None = None) -> None:
        """Have `act` called when the device reaches an event, and a replay read until then."""
        if self._is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow, name="gpuenergyd-device-events", daemon=True)
            self._thread.start()
        self._reached.put((event, act, reading))

    def close(self, limit_s: float) -> None:
        """End the thread once the device has reached all events, or after `limit_s`."""
        self._reached.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)
        self._is_closed = True

    def _follow(self) -> None:
        while (entry := self._reached.get()) is not None:
            event, act, reading = entry
            with contextlib.suppress(Exception):  # this thread must not print tracebacks into a training run
                while not self._is_closed and not self._has_completed(event, reading):
                    pass
                if not self._is_closed:
                    act()

    def _has_completed(self, event: Any, reading: ReplayReading | None) -> bool:
        """Return whether the device has reached an event; pause if it has not."""
        begun_s = self._mono_s()
        with self._device.calls():
            is_completed = self._device.has_completed(event)
            if reading is not None:  # after the query: once the replay has ended, all its events have completed
                reading.read(self._device)
        if not is_completed:
            took_s = self._mono_s() - begun_s
            self._sleep(min(max(_POLL_S, _PAUSE_PER_QUERY * took_s), _LONGEST_PAUSE_S))
        return is_completed
