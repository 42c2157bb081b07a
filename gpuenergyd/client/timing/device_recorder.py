"""Timer of instructions on a device that runs behind the program: all times come from events on its stream.

Theory of operation. The program launches work, possibly several iterations ahead of the GPU. So events are recorded on
the stream where an iteration begins, where each instruction begins and ends, and where the iteration ends. They are
allocated once and reused. The times of an iteration are read by the training thread at a later mark, once its last
event has completed: one query tells. Those of short iterations are read together, which takes half the time: in
between, a program displaces the code from the processor's caches. No thread asks for events meanwhile, because a thread
that needs the interpreter delays a program that needs it all the time; only a program that makes no marks for a while
has its last times read by the reporter's thread. Replays of captured graphs are different: see `stream_follower`.

Events measure durations, not instants. Within an iteration, all times are durations since its start, added to one
instant, so that they are consistent. That instant is the end of the iteration before, corrected once a second by an
anchor: an event whose instant on the host's clock is known to a few microseconds.

Longer than 400 lines, since marks and the reading of their times share one ring of buffers.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.clock_probe import ClockProbe, TrueClock
from gpuenergyd.client.timing.event_buffer import EventBuffer
from gpuenergyd.client.timing.event_device import Anchor, CountsCycles, EventDevice
from gpuenergyd.client.timing.recorder import NOT_RECORDED, IterationTimes, Marks, RecordedIteration
from gpuenergyd.client.timing.replays import CapturedInstructions, ReplayReading
from gpuenergyd.client.timing.stream_follower import StreamFollower
from gpuenergyd.client.timing.stream_requests import PlannedRequest, StreamRequests
from gpuenergyd.log_lines import safe_logger
from gpuenergyd.wire.messages import OrderRow

_READ_TOGETHER, _READ_TOGETHER_NS = 8, 100_000_000
"""Iterations whose times are read at once, if they take no longer than this together."""
NUM_BUFFERS = 16 + _READ_TOGETHER
"""Iterations that may be recorded and not yet reported; a program runs ahead by a few iterations at most."""
_NS_PER_MS = 1_000_000
_ANCHOR_EVERY_NS = 1_000_000_000
_CORRECTION_SHARE = 0.25
"""Share of the difference to a new anchor that corrects the host times of the next iteration: anchors are noisy."""
_JUMP_NS = 1_000_000
"""A larger difference is corrected at once: the device's clock or the host's was stopped."""
_DRIFT_AFTER_NS = 10_000_000_000
_MAX_BRACKET_NS = 200_000
"""A wider anchor was interrupted by other work of the host and corrects nothing."""
_CLOSE_POLL_S = 0.002

logger = safe_logger("gpuenergyd.client")


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
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._capacity = capacity
        self._num_buffers = num_buffers
        self._sleep = sleep
        self._mono_s = mono_s
        self._unused: list[EventBuffer] = []
        self._num_made = 0
        self._current: EventBuffer | None = None
        self._capture: CapturedInstructions | None = None
        self._newest_mark: Any = None
        self._keys: dict[int, OrderRow] = {}
        self._next_slot = itertools.count().__next__
        self._number = 0
        self._unread: deque[tuple[EventBuffer, Callable[[], None] | None]] = deque()
        self._num_read_together = 1
        self._reading = threading.Lock()
        self._follower = StreamFollower(device, sleep=sleep, mono_s=mono_s)
        self._requests: StreamRequests | None = None
        self._is_request_opened = False
        self._probe: ClockProbe | None = None
        self._is_probe_opened = not isinstance(device, CountsCycles)
        self._first_anchored_ns: int | None = None
        self._device_ns = self._since_anchor_ns = 0
        self._last = (0, 0)  # number of the newest iteration with known times, and the end of its window
        self.drift_ppm: float | None = None
        """Drift of the device's clock against the host's, in parts per million; None in the first seconds."""
        self.num_unread_replays = 0
        """Replays that are not reported, since the next one had overwritten a time before it was read."""

    @property
    def graphs(self) -> CapturedGraphs:
        """The graphs that this process captures and replays."""
        return self._device.graphs

    def begin_iteration(self, previous: RecordedIteration | None, *, is_timed: bool = True) -> None:
        if is_timed:
            self._keys = {}
            self._next_slot = itertools.count().__next__
        self._current = None
        if self._device.is_capturing():
            return
        if len(self._unread) >= self._num_read_together:
            self._read()
        unused = self._unused
        self._current = current = unused.pop() if unused else self._make_buffer()
        before = previous if isinstance(previous, EventBuffer) else None
        if before is not None and (current is None or before.reading is not None):
            if before.own_following is None:
                before.own_following = self._device.make_event()
            self._device.record(before.own_following)
            self._newest_mark = before.following = before.own_following
        if current is None:
            return
        current.is_timed, current.keys = is_timed, self._keys
        self._number = current.number = self._number + 1
        self._newest_mark = opening = current.opening
        self._device.record(opening)
        current.follows = 0
        if before is not None:
            current.follows = before.number
            if before.following is None:
                before.following = opening

    def begin(self, key: OrderRow) -> int:
        """Mark the start of an instruction; while a graph is captured, in the graph if `begin_capture` was called."""
        if self._device.is_capturing():
            return NOT_RECORDED if self._capture is None else self._capture.begin(key)
        slot = self._next_slot()
        if slot >= self._capacity:
            return NOT_RECORDED
        self._keys[slot] = key
        current = self._current
        if current is None:
            return NOT_RECORDED
        if current.is_timed:
            self._device.record(current.begins[slot])
            if self._probe is not None or not self._is_probe_opened:
                self._probe_clock()
        return slot

    def end(self, slot: int) -> None:
        if self._capture is not None:
            self._capture.end(slot)
        elif slot >= 0 and (current := self._current) is not None and not self._device.is_capturing():
            self._device.record(current.ends[slot])
            current.has_ended[slot] = 1
            if len(self._unread) >= self._num_read_together:
                self._read()

    def open_marks(self, keys: Sequence[OrderRow]) -> tuple[Marks, Marks]:
        self._keys = dict(enumerate(keys))
        if self._current is None:
            return (nothing := [_do_nothing] * len(keys)), nothing
        return self._current.marks(len(keys))

    def close_marks(self, num_begun: int, num_ended: int) -> None:
        self._keys = {slot: key for slot, key in self._keys.items() if slot < num_begun}
        if self._current is not None:
            self._current.keys = self._keys
            self._current.has_ended[:num_ended] = bytes([1]) * num_ended

    def end_iteration(self) -> RecordedIteration | None:
        """Mark the end of the iteration; None if its start was not recorded or a graph is being captured."""
        finished, self._current = self._current, None
        if finished is None:
            return None
        if self._device.is_capturing():
            finished.following = finished.opening
            self._unread.append((finished, None))
            return None
        self._device.record(finished.closing)
        self._newest_mark = finished.closing
        if finished.reading is not None:
            self._follower.put(finished.closing, _do_nothing, finished.reading)
        if len(self._unread) >= self._num_read_together:
            self._read()
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
        self._keys = dict(enumerate(captured.keys))
        if self._current is not None:
            self._current.reading = ReplayReading(captured, self._current.opening)

    def order(self) -> tuple[OrderRow, ...]:
        keys = self._keys
        return tuple([keys[slot] for slot in sorted(keys)])

    def prepare_requests(self) -> None:
        """Prepare what sends requests when the device reaches them."""
        if not self._is_request_opened:
            self._is_request_opened = True
            self._requests = self._device.open_requests()

    @property
    def has_requests(self) -> bool:
        """Whether the device itself gives the signal for requests."""
        return self._requests is not None

    def prepare(self, requests: Iterable[PlannedRequest]) -> None:
        """Prepare the requests of the next instructions, in their order."""
        if self._requests is not None:
            self._requests.prepare(requests)

    def _probe_clock(self) -> None:
        """Have the true clock counted, in iterations whose instructions are timed, once there are plans with clocks."""
        try:
            if not self._is_probe_opened and self._is_request_opened and not self._device.graphs.gate.is_capturing:
                self._is_probe_opened = True
                self._probe = self._device.open_clock_probe() if isinstance(self._device, CountsCycles) else None
            if self._probe is not None:
                self._probe.probe()
        except Exception as error:  # noqa: BLE001  whatever went wrong, training goes on without
            self._probe = None
            logger.info("gpuenergyd: the GPU's true clock is not counted: %s", error)

    def pop_true_clocks(self) -> tuple[TrueClock, ...]:
        """Return the clocks counted since the last call."""
        return () if self._probe is None else self._probe.pop_clocks()

    def pop_num_dropped(self) -> int:
        """Return how many requests could not be sent since the last call."""
        return 0 if self._requests is None else self._requests.pop_num_dropped()

    def call_at_begin(self, slot: int, act: PlannedRequest) -> None:
        current = self._current
        if not 0 <= slot < self._capacity or current is None:
            return
        if self._device.is_capturing():
            return
        if self._requests is not None and self._requests.put(act):
            return
        if not current.is_timed:
            self._device.record(current.begins[slot])
        self._follower.put(current.begins[slot], act)

    def call_when_reached(self, act: PlannedRequest) -> None:
        if self._newest_mark is None:
            return
        if self._requests is None or self._device.is_capturing() or not self._requests.put(act):
            self._follower.put(self._newest_mark, act)

    def call_with_instant(self, act: Callable[[int], None]) -> None:
        """Like `call_when_reached`, but pass `act` the instant of the mark, in ns of the host's monotonic clock."""
        event = self._newest_mark

        def find_instant() -> None:
            with self._device.calls():
                anchor = self._device.make_anchor()
                mono_ns = anchor.mono_ns - _elapsed_ns(self._device, event, anchor.event)
            act(mono_ns)

        if event is not None:
            self._follower.put(event, find_instant)

    def call_when_known(self, recorded: RecordedIteration, act: Callable[[], None]) -> None:
        """Call `act` once the times of an iteration are known: at a later mark, or when they are read late."""
        assert isinstance(recorded, EventBuffer)
        buffer = recorded
        if buffer.reading is None:
            self._unread.append((buffer, act))
            return

        def finish() -> None:
            with self._device.calls(), self._reading:
                self._finish(buffer, act)

        self._follower.put(buffer.last, finish)

    @property
    def reads_late(self) -> bool:
        """Return True: the device goes on while the program makes no mark."""
        return True

    def read_late(self) -> None:
        """Read the times of all iterations that have ended."""
        with self._device.calls():
            self._read()

    def _read(self) -> None:
        """Read the times of the iterations that have ended, in order, unless another thread does."""
        if not self._unread or not self._reading.acquire(blocking=False):
            return
        try:
            num_completed = len(self._unread)  # the training thread may add more
            if not self._device.has_completed(self._unread[num_completed - 1][0].last):
                num_completed = 0
            while self._unread and (num_completed > 0 or self._device.has_completed(self._unread[0][0].last)):
                num_completed -= 1
                buffer, act = self._unread.popleft()
                self._finish(buffer, act)
        finally:
            self._reading.release()

    def _finish(self, buffer: EventBuffer, act: Callable[[], None] | None) -> None:
        if act is None:  # it is left out
            buffer.free()
            return
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

    def reserve(self, capacity: int) -> None:
        """Make room for iterations of this many instructions; buffers that are still read keep theirs."""
        if capacity > self._capacity:
            self._capacity = capacity
            self._unused, self._num_made = [], 0

    def close(self, limit_s: float) -> None:
        """End the threads once the device has reached all that was marked, or after `limit_s`."""
        give_up_s = self._mono_s() + limit_s
        while self._unread and not self._device.graphs.gate.is_capturing:
            self._read()
            if not self._unread or self._mono_s() >= give_up_s:
                break
            self._sleep(_CLOSE_POLL_S)
        self._follower.close(max(0.0, give_up_s - self._mono_s()))
        if self._requests is not None:
            self._requests.close()

    def _make_buffer(self) -> EventBuffer | None:
        if self._num_made == self._num_buffers:
            return None
        self._num_made += 1
        return EventBuffer(self._device, self._capacity, self._unused)

    def _compute_times(self, buffer: EventBuffer) -> bool:
        """Compute the times of an iteration whose last event has completed; False if an instruction's are lost."""
        keys: Mapping[int, OrderRow] = buffer.keys
        elapsed_ms, opening = self._device.elapsed_ms, buffer.opening
        closing_ns = round(elapsed_ms(opening, buffer.closing) * _NS_PER_MS)
        last = buffer.last
        last_ns = closing_ns if last is buffer.closing else round(elapsed_ms(opening, last) * _NS_PER_MS)
        self._num_read_together = min(1 + _READ_TOGETHER_NS // max(1, last_ns), _READ_TOGETHER)
        if buffer.reading is not None:
            spans_ns = buffer.reading.spans_ns(closing_ns)
            keys = dict(enumerate(buffer.reading.keys))
        elif not buffer.is_timed:
            spans_ns = []
        else:
            begins, ends = buffer.begins, buffer.ends
            spans_ns = [
                (
                    slot,
                    round(elapsed_ms(opening, begins[slot]) * _NS_PER_MS),
                    round(elapsed_ms(opening, ends[slot]) * _NS_PER_MS) if buffer.has_ended[slot] else last_ns,
                )
                for slot in buffer.timed_slots()
            ]
        begin_ns, window_end_ns = self._find_window(buffer, last_ns)
        self._last = (buffer.number, window_end_ns)
        rows = tuple([(*keys[slot], begin_ns + b, begin_ns + e) for slot, b, e in spans_ns]) if spans_ns else ()
        end_ns = min(begin_ns + closing_ns, window_end_ns)
        buffer.known = IterationTimes(begin_ns, end_ns, 0 if buffer.following is None else window_end_ns, rows)
        return spans_ns is not None

    def _find_window(self, buffer: EventBuffer, last_ns: int) -> tuple[int, int]:
        """Return the start and end of an iteration's window of this length on the host's clock."""
        number, begin_ns = self._last
        is_first = buffer.follows != number or not number
        self._since_anchor_ns += last_ns
        if not is_first and self._since_anchor_ns < _ANCHOR_EVERY_NS:
            self._device_ns += last_ns
            return begin_ns, begin_ns + last_ns
        self._since_anchor_ns = 0
        anchor = self._device.make_anchor()
        anchored_ns = anchor.mono_ns - _elapsed_ns(self._device, buffer.last, anchor.event)
        if is_first:
            begin_ns = anchored_ns - last_ns
            self._first_anchored_ns, self._device_ns = None, 0
        window_end_ns = max(begin_ns, self._corrected_ns(begin_ns + last_ns, anchored_ns, anchor))
        self._measure_drift(last_ns, anchored_ns)
        return begin_ns, window_end_ns

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
