"""Recorder of instruction begins and ends in preallocated memory: three list items are set per instruction."""

import itertools
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from gpuenergyd.wire.messages import InstructionRow, OrderRow

DEFAULT_CAPACITY = 4096
NOT_RECORDED = -1
"""Slot of an instruction that is not recorded; its end is ignored."""


_UNUSED: OrderRow = ("", -1, -1)


class RecordedIteration(Protocol):
    """Records of one iteration, passed from the training thread to the reporter."""

    def rows(self) -> tuple[InstructionRow, ...] | None:
        """Return the finished instructions in order of begin; None while their times are not known yet."""
        ...

    def free(self) -> None:
        """Return the memory to the recorder."""
        ...


class InstructionTimer(Protocol):
    """Timer of instructions, called by the training thread; may be called from several threads at once."""

    def begin(self, key: OrderRow) -> int:
        """Mark the begin of an instruction and return its slot."""
        ...

    def end(self, slot: int) -> None:
        """Mark the end of an instruction; a later call with the same slot overwrites it."""
        ...

    def call_at_begin(self, slot: int, act: Callable[[], None]) -> None:
        """Call `act` when the instruction begins on its device: at once, or later from another thread."""
        ...

    def order(self) -> tuple[OrderRow, ...]:
        """Return the instructions of the current iteration in order of begin."""
        ...

    def finish_iteration(self) -> RecordedIteration | None:
        """Return the current records and start new ones; None if all other memory is still being read."""
        ...

    def close(self) -> None:
        """End the timer's threads, if it has any."""
        ...


class _Buffer:
    __slots__ = ("begin_ns", "capacity", "end_ns", "is_free", "keys", "next_slot")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys = [_UNUSED] * (capacity + 1)  # the last item stays unused, so that `index(_UNUSED)` always finds one
        self.begin_ns = [0] * capacity  # lists, since an array's items are converted at each access
        self.end_ns = [0] * capacity
        self.next_slot = itertools.count().__next__
        self.is_free = True

    def order(self) -> tuple[OrderRow, ...]:
        return tuple(self.keys[: self.keys.index(_UNUSED)])

    def rows(self) -> tuple[InstructionRow, ...]:
        marks = zip(self.keys[: self.keys.index(_UNUSED)], self.begin_ns, self.end_ns, strict=False)
        return tuple([(*key, begin_ns, end_ns) for key, begin_ns, end_ns in marks if end_ns >= begin_ns])

    def free(self) -> None:
        num_used = self.keys.index(_UNUSED)
        self.keys[:num_used] = [_UNUSED] * num_used
        self.next_slot = itertools.count().__next__
        self.is_free = True


class HostRecorder:
    """Timer of instructions on the host, with its monotonic clock.

    Several buffers are used in turn: the training thread writes one while the reporter reads the others. Slots come
    from a counter with an atomic step, so that overlapped forwards and backwards may be marked from two threads.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, *, num_buffers: int = 3) -> None:
        self._buffers = [_Buffer(capacity) for _ in range(num_buffers)]
        self._current = self._buffers[0]
        self._current.is_free = False

    def begin(self, key: OrderRow) -> int:
        """Mark the begin of an instruction and return its slot."""
        current = self._current
        slot = current.next_slot()
        if slot >= current.capacity:
            return NOT_RECORDED
        current.keys[slot] = key
        current.begin_ns[slot] = monotonic_ns()
        return slot

    def end(self, slot: int) -> None:
        """Mark the end of an instruction; a later call with the same slot overwrites it."""
        if slot >= 0:
            self._current.end_ns[slot] = monotonic_ns()

    def call_at_begin(self, slot: int, act: Callable[[], None]) -> None:  # noqa: ARG002  the Protocol's signature
        """Call `act` at once: on the host an instruction begins when it is marked."""
        act()

    def order(self) -> tuple[OrderRow, ...]:
        """Return the instructions of the current iteration in order of begin."""
        return self._current.order()

    def close(self) -> None:
        """Do nothing: this recorder has no threads."""

    def finish_iteration(self) -> RecordedIteration | None:
        """Return the current records and start new ones; None if all other memory is still being read."""
        for buffer in self._buffers:
            if buffer.is_free:
                finished, self._current = self._current, buffer
                buffer.is_free = False
                return finished
        self._current.free()
        self._current.is_free = False
        return None
