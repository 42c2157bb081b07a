"""Instructions of a captured graph: events recorded as nodes of the graph, and their times in each replay.

A graph records the same events in every replay, so a time must be read after its instruction and before the next
replay comes to the same node. The thread that follows the stream therefore reads each event once while the replay runs.
An event's completion belongs to the replay if it lies between the replay's own start and end, which are events outside
of the graph; with any other, no instruction of that replay counts.
"""

from typing import Any

from gpuenergyd.client.timing.event_device import EventDevice
from gpuenergyd.client.timing.recorder import NOT_RECORDED
from gpuenergyd.wire.messages import OrderRow

_NS_PER_MS = 1_000_000
_SHORTEST_NS = 1000
"""A begin that is as near to the end of the replay is one of the next replay, which follows at once."""


class CapturedInstructions:
    """The instructions of one step that a graph holds; recorded on the training thread during the capture."""

    def __init__(self, device: EventDevice, capacity: int) -> None:
        self._device = device
        self._capacity = capacity
        self._ends: list[Any | None] = []
        self.keys: list[OrderRow] = []
        self.marks: list[tuple[int, bool, Any]] = []
        """Slot, whether it is the end, and event, in order of capture."""
        self.is_timed = True
        """Whether every start and end has an event in the graph."""

    def begin(self, key: OrderRow) -> int:
        slot = len(self.keys)
        if slot >= self._capacity:
            self.is_timed = False
            return NOT_RECORDED
        self.keys.append(key)
        self._ends.append(None)
        self._capture(slot, is_end=False)
        return slot

    def end(self, slot: int) -> None:
        """Capture the end of an instruction; a later call with the same slot replaces it."""
        if 0 <= slot < len(self.keys):
            self.marks = [mark for mark in self.marks if mark[:2] != (slot, True)]
            self._ends[slot] = self._capture(slot, is_end=True)

    @property
    def is_complete(self) -> bool:
        """Whether all instructions have ended, with events for all."""
        return self.is_timed and bool(self.keys) and None not in self._ends

    def _capture(self, slot: int, *, is_end: bool) -> Any | None:
        event = self._device.make_node_event()
        if event is None:
            self.is_timed = False
            return None
        self._device.record(event)
        self.marks.append((slot, is_end, event))
        return event


class ReplayReading:
    """The times of one replay's instructions, read one after another while it runs."""

    def __init__(self, captured: CapturedInstructions, opening: Any) -> None:
        self._captured = captured
        self._opening = opening
        self._times_ns: list[int] = []

    @property
    def keys(self) -> list[OrderRow]:
        """The instructions in order of capture."""
        return self._captured.keys

    def read(self, device: EventDevice) -> None:
        """Read the events that the device has reached since the last call."""
        marks = self._captured.marks
        while len(self._times_ns) < len(marks):
            after_ms = device.node_ms(self._opening, marks[len(self._times_ns)][2])
            if after_ms is None or after_ms < 0.0 or (after_ms == 0.0 and self._times_ns):
                return  # not reached yet: at 0 may be the end of the replay before, which this one follows at once
            self._times_ns.append(round(after_ms * _NS_PER_MS))

    def spans_ns(self, closing_ns: int) -> list[tuple[int, int, int]] | None:
        """Return slot, start and end of each instruction in ns after the opening; None if a time is of another replay.

        Args:
            closing_ns: the end of the replay, after the opening.
        """
        marks = self._captured.marks
        if len(self._times_ns) < len(marks):
            return None
        for (_, is_end, _), at_ns in zip(marks, self._times_ns, strict=True):
            if at_ns > (closing_ns if is_end else closing_ns - _SHORTEST_NS):
                return None
        begins, ends = [0] * len(self.keys), [0] * len(self.keys)
        for (slot, is_end, _), at_ns in zip(marks, self._times_ns, strict=True):
            (ends if is_end else begins)[slot] = at_ns
        if any(end < begin for begin, end in zip(begins, ends, strict=True)):
            return None
        return [(slot, begin, end) for slot, (begin, end) in enumerate(zip(begins, ends, strict=True))]
