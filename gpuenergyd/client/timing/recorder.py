"""Timers of instructions: their Protocol, and the recorder on the host's clock, which writes to preallocated memory."""

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic_ns
from typing import NamedTuple, Protocol, TypeAlias

from gpuenergyd.client.timing.stream_requests import PlannedRequest
from gpuenergyd.wire.messages import InstructionRow, OrderRow

DEFAULT_CAPACITY = 4096
NOT_RECORDED = -1
"""Slot of an instruction that is not recorded; its end is ignored."""


UNTIL_NEXT_BEGIN = "D"
"""Kind of instruction that is not ended: it lasts until the next start of an iteration, or until a pause."""
_UNUSED: OrderRow = ("", -1, -1)
Marks: TypeAlias = Sequence[Callable[[], object]]
"""Functions without arguments, one for each instruction."""


class IterationTimes(NamedTuple):
    """The times of an iteration, in ns of the host's monotonic clock; `next_begin_mono_ns` is 0 before a pause."""

    begin_mono_ns: int
    end_mono_ns: int
    next_begin_mono_ns: int
    instructions: tuple[InstructionRow, ...]
    """The finished instructions in order of start."""


class RecordedIteration(Protocol):
    """Records of one iteration, passed from the training thread to the reporter."""

    def times(self) -> IterationTimes:
        """Return the times; to be called once `InstructionTimer.call_when_known` says that they are known."""
        ...

    def free(self) -> None:
        """Return the memory to the timer."""
        ...


class InstructionTimer(Protocol):
    """Timer of iterations and instructions on their device, called by the training thread.

    Instructions may be marked from several threads at once. A device may run behind the program that launches its work:
    then marks are reached later, in the order in which they were made.
    """

    @property
    def reads_late(self) -> bool:
        """Whether times may become known without a further mark, so that `read_late` has to look for them."""
        ...

    def begin_iteration(self, previous: RecordedIteration | None, *, is_timed: bool = True) -> None:
        """Mark the start of an iteration; it directly follows `previous`, if that is not None.

        Of one that is not timed, the times have no instructions; none is marked, but requests are sent.
        """
        ...

    def begin(self, key: OrderRow) -> int:
        """Mark the start of an instruction and return its slot."""
        ...

    def end(self, slot: int) -> None:
        """Mark the end of an instruction; a later call with the same slot overwrites it."""
        ...

    def open_marks(self, keys: Sequence[OrderRow]) -> tuple[Marks, Marks]:
        """Return fast functions that mark the starts and ends of the current iteration's only instructions."""
        ...

    def close_marks(self, num_begun: int, num_ended: int) -> None:
        """Take the instructions that these functions have marked."""
        ...

    def end_iteration(self) -> RecordedIteration | None:
        """Mark the end of the iteration and return its records; None if all other memory is still being read."""
        ...

    def order(self) -> tuple[OrderRow, ...]:
        """Return the instructions of the current iteration in order of start."""
        ...

    def prepare_requests(self) -> None:
        """Prepare what sends requests when the device reaches them; may take its time, on the reporter's thread."""
        ...

    def call_at_begin(self, slot: int, act: PlannedRequest) -> None:
        """Send a request when the device reaches the start of an instruction that has just begun.

        `slot` is that of its mark; in an iteration that is not timed, its position.
        """
        ...

    def call_when_reached(self, act: PlannedRequest) -> None:
        """Send a request when the device reaches what has been launched so far."""
        ...

    def call_when_known(self, recorded: RecordedIteration, act: Callable[[], None]) -> None:
        """Call `act` when the times of a recorded iteration are known: at the next start, else at its end.

        The training thread calls it at a later mark, or `read_late` does.
        """
        ...

    def read_late(self) -> None:
        """Read the times of ended iterations, after no mark was made for a while; on the reporter's thread."""
        ...

    def reserve(self, capacity: int) -> None:
        """Make room for iterations of this many instructions; between two iterations."""
        ...

    def close(self, limit_s: float) -> None:
        """End the timer's threads, if it has any; wait this long for the device to reach what was marked."""
        ...


class _Buffer:
    __slots__ = (
        "begin_ns",
        "begun_ns",
        "capacity",
        "end_ns",
        "ended_ns",
        "is_free",
        "is_timed",
        "keys",
        "next_begun_ns",
        "next_slot",
    )

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys = [_UNUSED] * (capacity + 1)  # the last item stays unused, so that `index(_UNUSED)` always finds one
        self.begin_ns = [0] * capacity  # lists, since an array's items are converted at each access
        self.end_ns = [0] * capacity
        self.next_slot = itertools.count().__next__
        self.is_free = self.is_timed = True
        self.begun_ns = self.ended_ns = self.next_begun_ns = 0

    def order(self) -> tuple[OrderRow, ...]:
        return tuple(self.keys[: self.keys.index(_UNUSED)])

    def times(self) -> IterationTimes:
        if not self.is_timed:
            return IterationTimes(self.begun_ns, self.ended_ns, self.next_begun_ns, ())
        marks = zip(self.keys[: self.keys.index(_UNUSED)], self.begin_ns, self.end_ns, strict=False)
        last_ns = self.next_begun_ns or self.ended_ns
        ended = [
            (*key, begin_ns, max(begin_ns, last_ns) if key[0] == UNTIL_NEXT_BEGIN and end_ns < begin_ns else end_ns)
            for key, begin_ns, end_ns in marks
        ]
        rows = tuple([row for row in ended if row[4] >= row[3]])
        return IterationTimes(self.begun_ns, self.ended_ns, self.next_begun_ns, rows)

    def free(self) -> None:
        num_used = self.keys.index(_UNUSED)
        self.keys[:num_used] = [_UNUSED] * num_used
        self.next_slot = itertools.count().__next__
        self.next_begun_ns = 0
        self.is_free = True


class HostRecorder:
    """Timer of instructions on the host, with its monotonic clock: whatever is marked is reached at once.

    Several buffers are used in turn: the training thread writes one while the reporter reads the others. Slots come
    from a counter with an atomic step, so that overlapped forwards and backwards may be marked from two threads.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY, *, num_buffers: int = 3) -> None:
        self._num_buffers = num_buffers
        self._buffers: list[_Buffer] = []
        self._current = self._next_of_new_buffers(capacity)

    def begin_iteration(self, previous: RecordedIteration | None, *, is_timed: bool = True) -> None:
        self._current.begun_ns = now_ns = monotonic_ns()
        self._current.is_timed = is_timed
        if isinstance(previous, _Buffer):
            previous.next_begun_ns = now_ns

    def begin(self, key: OrderRow) -> int:
        current = self._current
        slot = current.next_slot()
        if slot >= current.capacity:
            return NOT_RECORDED
        current.keys[slot] = key
        current.begin_ns[slot] = monotonic_ns()
        return slot

    def end(self, slot: int) -> None:
        if slot >= 0:
            self._current.end_ns[slot] = monotonic_ns()

    def open_marks(self, keys: Sequence[OrderRow]) -> tuple[Marks, Marks]:
        return [partial(self.begin, key) for key in keys], [partial(self.end, slot) for slot in range(len(keys))]

    def close_marks(self, num_begun: int, num_ended: int) -> None:
        """Do nothing: instructions are taken when they are marked."""

    def end_iteration(self) -> RecordedIteration | None:
        self._current.ended_ns = monotonic_ns()
        for buffer in self._buffers:
            if buffer.is_free:
                finished, self._current = self._current, buffer
                buffer.is_free = False
                return finished
        self._current.free()
        self._current.is_free = False
        return None

    def order(self) -> tuple[OrderRow, ...]:
        return self._current.order()

    @property
    def reads_late(self) -> bool:
        """Return False: times are known at once."""
        return False

    def prepare_requests(self) -> None:
        """Do nothing: requests are sent at once."""

    def read_late(self) -> None:
        """Do nothing: times are known at once."""

    def call_at_begin(self, slot: int, act: PlannedRequest) -> None:  # noqa: ARG002  the Protocol's signature
        """Send a request at once."""
        act()

    def call_when_reached(self, act: PlannedRequest) -> None:
        """Send a request at once."""
        act()

    def call_when_known(self, recorded: RecordedIteration, act: Callable[[], None]) -> None:  # noqa: ARG002  as above
        act()

    def reserve(self, capacity: int) -> None:
        if capacity > self._current.capacity:
            self._current = self._next_of_new_buffers(capacity)

    def close(self, limit_s: float) -> None:
        """Do nothing: this recorder has no threads."""

    def _next_of_new_buffers(self, capacity: int) -> _Buffer:
        self._buffers = [_Buffer(capacity) for _ in range(self._num_buffers)]
        self._buffers[0].is_free = False
        return self._buffers[0]
