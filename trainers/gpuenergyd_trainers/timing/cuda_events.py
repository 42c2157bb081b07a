"""A timer that uses CUDA events, read without synchronising a training step.

The test suite has no GPU; it tests the logic against fake events.

An event is recorded on the current stream when an instruction begins and when it ends. With NCCL the wait for the input
was enqueued before, so the first event completes after it: the pair encloses computation only. The events are allocated
once and reused; the reporter's thread reads them one iteration later.

Events measure durations, not host times. To place them on the host's clock, that thread polls an iteration's closing
event until it completes; the error is one polling interval. If it had completed before the first poll, host times are
derived from the closing event of an earlier iteration. The only synchronisation happens when the recorder is made,
before training.

The hooks run when work is launched, possibly many instructions ahead of its execution on the GPU. Clock requests are
therefore sent by a thread that polls every millisecond whether the instruction's begin event has completed.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from gpuenergyd.client.recorder import NOT_RECORDED
from gpuenergyd.wire.messages import InstructionRow, OrderRow

_POLL_S = 0.0002
_LONGEST_WATCH_S = 0.25
_BEGUN_POLL_S = 0.001
_NS_PER_MS = 1_000_000


class _EventBuffer:
    def __init__(self, recorder: "CudaRecorder", capacity: int) -> None:
        self.recorder = recorder
        self.begins = [_timing_event() for _ in range(capacity)]
        self.ends = [_timing_event() for _ in range(capacity)]
        self.keys: list[OrderRow] = []
        self.has_ended = bytearray(capacity)
        self.slots = itertools.count()
        self.closing: Any = None
        self.is_free = True

    def rows(self) -> tuple[InstructionRow, ...] | None:
        anchor = self.recorder.watch(self.closing)
        if anchor is None:
            return None
        event, mono_ns = anchor
        rows = []
        for slot, key in enumerate(self.keys):
            if self.has_ended[slot]:
                begin_ns = mono_ns + round(event.elapsed_time(self.begins[slot]) * _NS_PER_MS)
                took_ns = round(self.begins[slot].elapsed_time(self.ends[slot]) * _NS_PER_MS)
                rows.append((*key, begin_ns, begin_ns + took_ns))
        return tuple(rows)

    def free(self) -> None:
        self.keys = []
        self.has_ended[:] = bytes(len(self.has_ended))
        self.slots = itertools.count()
        self.closing = None
        self.is_free = True


class CudaRecorder:
    """An InstructionTimer for the current stream of a CUDA device."""

    def __init__(self, device: Any, capacity: int, *, num_buffers: int = 4) -> None:
        self._device = torch.device(device)
        self._capacity = capacity
        self._buffers = [_EventBuffer(self, capacity) for _ in range(num_buffers)]
        self._current = self._buffers[0]
        self._current.is_free = False
        self._to_begin: queue.SimpleQueue[tuple[Any, Callable[[], None]] | None] = queue.SimpleQueue()
        self._poller: threading.Thread | None = None
        self._is_closed = False
        first = _timing_event()
        first.record(torch.cuda.current_stream(self._device))
        first.synchronize()
        self._anchor: tuple[Any, int] = (first, time.monotonic_ns())

    def begin(self, key: OrderRow) -> int:
        """Mark the begin of an instruction, except while a CUDA graph is captured."""
        if torch.cuda.is_current_stream_capturing():
            return NOT_RECORDED
        current = self._current
        slot = next(current.slots)
        if slot >= self._capacity:
            return NOT_RECORDED
        current.keys.append(key)
        current.begins[slot].record(torch.cuda.current_stream(self._device))
        return slot

    def end(self, slot: int) -> None:
        """Mark the end of an instruction; a later call for the same slot moves it."""
        if slot >= 0:
            self._current.ends[slot].record(torch.cuda.current_stream(self._device))
            self._current.has_ended[slot] = 1

    def call_at_begin(self, slot: int, act: Callable[[], None]) -> None:
        """Have the polling thread call `act` when the GPU reaches an instruction; never blocks."""
        if slot < 0 or self._is_closed:
            return
        if self._poller is None:
            self._poller = threading.Thread(target=self._poll, name="gpuenergyd-cuda-poller", daemon=True)
            self._poller.start()
        self._to_begin.put((self._current.begins[slot], act))

    def _poll(self) -> None:
        while (waiting := self._to_begin.get()) is not None:
            event, act = waiting
            with contextlib.suppress(Exception):  # this thread must not print tracebacks into a training run
                while not self._is_closed and not event.query():
                    time.sleep(_BEGUN_POLL_S)
                if not self._is_closed:
                    act()

    def close(self) -> None:
        """End the polling thread; clock requests that still wait for their instruction are dropped."""
        self._is_closed = True
        self._to_begin.put(None)

    def order(self) -> tuple[OrderRow, ...]:
        """Return the instructions begun in the present iteration, in order."""
        return tuple(self._current.keys)

    def finish_iteration(self) -> _EventBuffer | None:
        """Return the recorded iteration and start a new one; None when all other event buffers are still being read."""
        closing = _timing_event()  # not reused: it may be needed as an anchor later
        closing.record(torch.cuda.current_stream(self._device))
        self._current.closing = closing
        for buffer in self._buffers:
            if buffer.is_free:
                taken, self._current = self._current, buffer
                buffer.is_free = False
                return taken
        self._current.free()
        self._current.is_free = False
        return None

    def watch(self, closing: Any) -> tuple[Any, int] | None:
        """Return a completed event and its host time, once `closing` has completed; None after a time limit.

        Runs in the reporter's thread, which may wait.
        """
        if closing.query():
            return self._anchor
        give_up_mono_ns = time.monotonic_ns() + round(_LONGEST_WATCH_S * 1e9)
        while time.monotonic_ns() < give_up_mono_ns:
            time.sleep(_POLL_S)
            if closing.query():
                self._anchor = (closing, time.monotonic_ns())
                return self._anchor
        return None


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
