"""When each instruction began and ended: three list items set per instruction, in memory allocated beforehand."""

import itertools
from collections.abc import Callable
from time import monotonic_ns
from typing import Protocol

from gpuenergyd.wire.messages import InstructionRow, OrderRow

DEFAULT_CAPACITY = 4096
NOT_RECORDED = -1
"""The slot of an instruction that is not recorded; ending it does nothing."""


_UNUSED: OrderRow = ("", -1, -1)


class RecordedIteration(Protocol):
    """One iteration's marks, handed from the training thread to the reporter."""

    def rows(self) -> tuple[InstructionRow, ...] | None:
        """Return the instructions that ended, in order of begin; None while their times are not known yet."""
        ...

    def free(self) -> None:
        """Give the memory back to the recorder."""
        ...


class InstructionTimer(Protocol):
    """What the training thread calls at every instruction; may be called from several threads at once."""

    def begin(self, key: OrderRow) -> int:
        """Mark the begin of an instruction and return its slot."""
        ...

    def end(self, slot: int) -> None:
        """Mark the end; a later call for the same slot moves it."""
        ...

    def when_begun(self, slot: int, act: Callable[[], None]) -> None:
        """Call `act` when the instruction has begun where it runs: at once, or from another thread a little later."""
        ...

    def order(self) -> tuple[OrderRow, ...]:
        """Return what has begun since the last `take`, in order."""
        ...

    def take(self) -> RecordedIteration | None:
        """Hand over what was recorded and start afresh; None when all other memory is still being read."""
        ...


class _Generation:
    __slots__ = ("begin_ns", "capacity", "end_ns", "is_free", "keys", "next_slot")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys = [_UNUSED] * (capacity + 1)  # the last one stays unused, so that a search for the first finds one
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
    """Marks instructions with the host's monotonic clock.

    Generations of memory take turns: the training thread writes one while the reporter reads the others. Slots
    come from a counter whose step is atomic, so overlapped forwards and backwards may mark from two threads.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, *, num_generations: int = 3) -> None:
        self._generations = [_Generation(capacity) for _ in range(num_generations)]
        self._current = self._generations[0]
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
        """Mark the end; a later call for the same slot moves it."""
        if slot >= 0:
            self._current.end_ns[slot] = monotonic_ns()

    def when_begun(self, slot: int, act: Callable[[], None]) -> None:  # noqa: ARG002  the Protocol's signature
        """Call `act` at once: on the host, what is marked has begun."""
        act()

    def order(self) -> tuple[OrderRow, ...]:
        """Return what has begun since the last `take`, in order."""
        return self._current.order()

    def take(self) -> RecordedIteration | None:
        """Hand over what was recorded and start afresh; None when all other memory is still being read."""
        for generation in self._generations:
            if generation.is_free:
                taken, self._current = self._current, generation
                generation.is_free = False
                return taken
        self._current.free()
        self._current.is_free = False
        return None
