"""Timer of instructions on a device that runs behind the program: all times come from events on its stream.

Theory of operation. The program launches work, possibly several iterations ahead of the GPU. So events are recorded on
the stream where an iteration begins, where each instruction begins and ends, and where the iteration ends. They are
allocated once and reused. One thread follows the stream: it waits for the events in the order in which they were
recorded, and does what was asked for at each: sends a clock request, or computes the times of an iteration. The
training thread records events and never waits.

Events measure durations, not instants. Within an iteration, all times are durations since its begin, added to one
instant, so that they are consistent. That instant is the end of the iteration before, corrected by an anchor: an event
whose instant on the host's clock is known to a few microseconds, made anew for each report.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.event_device import Anchor, EventDevice
from gpuenergyd.client.timing.recorder import NOT_RECORDED, UNTIL_NEXT_BEGIN, IterationTimes, RecordedIteration
from gpuenergyd.client.timing.replays import CapturedInstructions, ReplayReading
from gpuenergyd.wire.messages import OrderRow

NUM_BUFFERS = 16
"""Iterations that may be recorded and not yet reported; a program runs ahead by a few iterations at most."""
_POLL_S = 0.001
_NS_PER_MS = 1_000_000
_CORRECTION_SHARE = 0.25
"""Share of the difference to a new anchor that corrects the host times of the next iteration: anchors are noisy."""
_JUMP_NS = 1_000_000
"""A larger difference is corrected at once: the device's clock or the host's was stopped."""
_DRIFT_AFTER_NS = 10_000_000_000
_MAX_BRACKET_NS = 200_000
"""A wider anchor was interrupted by other work of the host and corrects nothing."""
_UNUSED: OrderRow = ("", -1, -1)


class _EventBuffer:
    """Events of one iteration."""

    def __init__(self, device: EventDevice, capacity: int) -> None:
        self.opening, self.closing, self.following = (device.make_event() for _ in range(3))
        self.begins = [device.make_event() for _ in range(capacity)]
        self.ends = [device.make_event() for _ in range(capacity)]
        self.has_ended = bytearray(capacity)
        self.keys: list[OrderRow] = []
        self.number = 0
        self.follows = 0
        """Number of the iteration whose next begin is this one's begin; 0 for the first one and after a pause."""
        self.has_following = False
        self.reading: ReplayReading | None = None
        """Where the iteration is the replay of a captured graph: then `begins` and `ends` are not used."""
        self.known: IterationTimes | None = None
        self.is_free = True

    @property
    def last(self) -> Any:
        """The event at the end of the iteration's window."""
        return self.following if self.has_following else self.closing

    def timed_slots(self) -> list[int]:
        """Return the instructions that have ended, or that last until the end of the window."""
        begun = zip(self.keys, self.has_ended, strict=False)
        return [slot for slot, (key, has_ended) in enumerate(begun) if has_ended or key[0] == UNTIL_NEXT_BEGIN]

    def times(self) -> IterationTimes:
        if self.known is None:
            raise RuntimeError("the times of this iteration are not known yet")
        return self.known

    def free(self) -> None:
        self.has_ended[:] = bytes(len(self.has_ended))
        self.has_following = False
        self.reading = None
        self.known = None
        self.is_free = True


class DeviceRecorder:
    """An InstructionTimer for the current stream of a device.

    `capacity` is the number of instructions of an iteration; more are not recorded.
    """

    def __init__(
        self,
        device: EventDevice,
        capacity: int,
        *,
        num_buffers: int = NUM_BUFFERS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device = device
        self._capacity = capacity
        self._num_buffers = num_buffers
        self._sleep = sleep
        self._buffers: list[_EventBuffer] = []
        self._current: _EventBuffer | None = None
        self._capture: CapturedInstructions | None = None
        self._newest_mark: Any = None
        self._keys = [_UNUSED] * (capacity + 1)
        self._next_slot = itertools.count().__next__
        self._numbers = itertools.count(1)
        self._reached: queue.SimpleQueue[tuple[Any, Callable[[], None], ReplayReading | None] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._first_anchored_ns: int | None = None
        self._device_ns = 0
        self._last = (0, 0)  # number of the newest iteration with known times, and the end of its window
        self.drift_ppm: float | None = None
        """Drift of the device's clock against the host's, in parts per million; None in the first seconds."""
        self.num_unread_replays = 0
        """Replays that are not reported, since the next one had overwritten a time before it was read."""

    @property
    def graphs(self) -> CapturedGraphs:
        """The graphs that this process captures and replays."""
        return self._device.graphs

    def begin_iteration(self, previous: RecordedIteration | None) -> None:
        """Mark the begin of an iteration; it directly follows `previous`, if that is not None."""
        self._keys = [_UNUSED] * (self._capacity + 1)
        self._next_slot = itertools.count().__next__
        self._current = None
        if self._device.is_capturing():
            return
        if isinstance(previous, _EventBuffer):
            self._device.record(previous.following)
            previous.has_following = True
            self._newest_mark = previous.following
        self._current = current = self._free_buffer()
        if current is None:
            return
        current.is_free = False
        current.number = next(self._numbers)
        current.follows = previous.number if isinstance(previous, _EventBuffer) else 0
        current.keys = self._keys
        self._device.record(current.opening)
        self._newest_mark = current.opening

    def begin(self, key: OrderRow) -> int:
        """Mark the begin of an instruction; while a graph is captured, in the graph if `begin_capture` was called."""
        if self._device.is_capturing():
            return NOT_RECORDED if self._capture is None else self._capture.begin(key)
        slot = self._next_slot()
        if slot >= self._capacity:
            return NOT_RECORDED
        self._keys[slot] = key
        if self._current is None:
            return NOT_RECORDED
        self._device.record(self._current.begins[slot])
        return slot

    def end(self, slot: int) -> None:
        """Mark the end of an instruction; a later call for the same slot moves it."""
        if self._capture is not None:
            self._capture.end(slot)
        elif slot >= 0 and self._current is not None and not self._device.is_capturing():
            self._device.record(self._current.ends[slot])
            self._current.has_ended[slot] = 1

    def end_iteration(self) -> RecordedIteration | None:
        """Mark the end of the iteration; None if its begin was not recorded or a graph is being captured."""
        finished, self._current = self._current, None
        if finished is None:
            return None
        if self._device.is_capturing():
            self._when_reached(finished.opening, finished.free)
            return None
        self._device.record(finished.closing)
        self._newest_mark = finished.closing
        if finished.reading is not None:
            self._when_reached(finished.closing, _do_nothing, finished.reading)
        return finished

    def begin_capture(self) -> bool:
        """Have instructions marked in the graph that is being captured; return False if there is none."""
        self._capture = CapturedInstructions(self._device, self._capacity) if self._device.is_capturing() else None
        return self._capture is not None

    def end_capture(self) -> CapturedInstructions | None:
        """Return the instructions marked since `begin_capture`."""
        captured, self._capture = self._capture, None
        return captured

    def replay(self, captured: CapturedInstructions) -> None:
        """Take the instructions of the present iteration from a graph whose replay follows."""
        self._keys[: len(captured.keys)] = captured.keys
        if self._current is not None:
            self._current.reading = ReplayReading(captured, self._current.opening)

    def order(self) -> tuple[OrderRow, ...]:
        """Return the instructions begun in the present iteration, in order."""
        return tuple(self._keys[: self._keys.index(_UNUSED)])

    def call_at_begin(self, slot: int, act: Callable[[], None]) -> None:
        """Have the timer's thread call `act` when the device reaches an instruction; never blocks."""
        if slot >= 0 and self._current is not None:
            self._when_reached(self._current.begins[slot], act)

    def call_when_reached(self, act: Callable[[], None]) -> None:
        """Have the timer's thread call `act` when the device reaches the newest begin or end of an iteration."""
        if self._newest_mark is not None:
            self._when_reached(self._newest_mark, act)

    def call_with_instant(self, act: Callable[[int], None]) -> None:
        """As `call_when_reached`; `act` gets the instant of that begin or end, in ns of the host's monotonic clock."""
        event = self._newest_mark

        def find_instant() -> None:
            with self._device.calls():
                anchor = self._device.make_anchor()
                mono_ns = anchor.mono_ns - _elapsed_ns(self._device, event, anchor.event)
            act(mono_ns)

        if event is not None:
            self._when_reached(event, find_instant)

    def call_when_known(self, recorded: RecordedIteration, act: Callable[[], None]) -> None:
        """Have the timer's thread compute the times of an iteration when they are known, and then call `act`."""
        assert isinstance(recorded, _EventBuffer)
        buffer = recorded

        def finish() -> None:
            try:
                is_read = self._compute_times(buffer)
            except Exception:
                buffer.free()
                raise
            if is_read:
                act()
            else:
                self.num_unread_replays += 1
                buffer.free()

        self._when_reached(buffer.last, finish)

    def reserve(self, capacity: int) -> None:
        """Make room for iterations of this many instructions; buffers that are still read keep theirs."""
        if capacity > self._capacity:
            self._capacity = capacity
            self._buffers = []

    def close(self, limit_s: float) -> None:
        """End the thread once the device has reached all that was marked, or after `limit_s`."""
        self._reached.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)
        self._is_closed = True

    def _free_buffer(self) -> _EventBuffer | None:
        for buffer in self._buffers:
            if buffer.is_free:
                return buffer
        if len(self._buffers) == self._num_buffers:
            return None
        self._buffers.append(_EventBuffer(self._device, self._capacity))
        return self._buffers[-1]

    def _when_reached(self, event: Any, act: Callable[[], None], reading: ReplayReading | None = None) -> None:
        if self._is_closed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._follow_stream, name="gpuenergyd-device-events", daemon=True)
            self._thread.start()
        self._reached.put((event, act, reading))

    def _follow_stream(self) -> None:
        while (entry := self._reached.get()) is not None:
            event, act, reading = entry
            with contextlib.suppress(Exception):  # this thread must not print tracebacks into a training run
                while not self._is_closed and not self._has_completed(event, reading):
                    self._sleep(_POLL_S)
                if not self._is_closed:
                    act()

    def _has_completed(self, event: Any, reading: ReplayReading | None) -> bool:
        with self._device.calls():
            is_completed = self._device.has_completed(event)
            if reading is not None:  # after the query: once the replay has ended, all its events have completed
                reading.read(self._device)
            return is_completed

    def _compute_times(self, buffer: _EventBuffer) -> bool:
        """Compute the times of an iteration whose last event has completed; False if an instruction's are lost."""
        keys = buffer.keys
        begun = buffer.timed_slots()
        with self._device.calls():
            after_ns = partial(_elapsed_ns, self._device, buffer.opening)
            ends = [buffer.ends[slot] if buffer.has_ended[slot] else buffer.last for slot in begun]
            spans_ns: list[tuple[int, int, int]] | None = [
                (slot, after_ns(buffer.begins[slot]), after_ns(end)) for slot, end in zip(begun, ends, strict=True)
            ]
            closing_ns, last_ns = after_ns(buffer.closing), after_ns(buffer.last)
            if buffer.reading is not None:
                spans_ns = buffer.reading.spans_ns(closing_ns)
                keys = buffer.reading.keys
            anchor = self._device.make_anchor()
            anchored_ns = anchor.mono_ns - _elapsed_ns(self._device, buffer.last, anchor.event)
        number, begin_ns = self._last
        if buffer.follows != number or not number:
            begin_ns = anchored_ns - last_ns
            self._first_anchored_ns, self._device_ns = None, 0
        window_end_ns = max(begin_ns, self._corrected_ns(begin_ns + last_ns, anchored_ns, anchor))
        self._measure_drift(last_ns, anchored_ns)
        self._last = (buffer.number, window_end_ns)
        buffer.known = IterationTimes(
            begin_mono_ns=begin_ns,
            end_mono_ns=min(begin_ns + closing_ns, window_end_ns),
            next_begin_mono_ns=window_end_ns if buffer.has_following else 0,
            instructions=tuple((*keys[slot], begin_ns + b, begin_ns + e) for slot, b, e in spans_ns or ()),
        )
        return spans_ns is not None

    def _corrected_ns(self, expected_ns: int, anchored_ns: int, anchor: Anchor) -> int:
        """Return the host time of an event from its time by summed durations and its time by the newest anchor."""
        difference_ns = anchored_ns - expected_ns
        if abs(difference_ns) > _JUMP_NS + anchor.bracket_ns:
            return anchored_ns
        return expected_ns + (round(_CORRECTION_SHARE * difference_ns) if anchor.bracket_ns <= _MAX_BRACKET_NS else 0)

    def _measure_drift(self, passed_ns: int, anchored_ns: int) -> None:
        if self._first_anchored_ns is None:
            self._first_anchored_ns = anchored_ns
            return
        self._device_ns += passed_ns
        if self._device_ns >= _DRIFT_AFTER_NS:
            self.drift_ppm = (self._device_ns / (anchored_ns - self._first_anchored_ns) - 1.0) * 1e6


def _do_nothing() -> None:
    """Act at an event that matters for what is read until then."""


def _elapsed_ns(device: EventDevice, first: Any, second: Any) -> int:
    return round(device.elapsed_ms(first, second) * _NS_PER_MS)
