"""Events of one iteration on a device's stream, allocated once and used again."""

from functools import partial
from typing import Any

from gpuenergyd.client.timing.event_device import EventDevice
from gpuenergyd.client.timing.recorder import UNTIL_NEXT_BEGIN, IterationTimes, Marks
from gpuenergyd.client.timing.replays import ReplayReading
from gpuenergyd.wire.messages import OrderRow


class EventBuffer:
    """Events of one iteration."""

    def __init__(self, device: EventDevice, capacity: int, unused: "list[EventBuffer]") -> None:
        """Make the events; `unused` gets the buffer when it is freed."""
        self._unused, self._record = unused, device.record
        self.opening, self.closing = device.make_event(), device.make_event()
        self.following: Any = None
        """The event at which the next iteration begins: usually that one's opening."""
        self.own_following: Any = None
        """Where the next iteration may be read before this one, or is not recorded."""
        self.begins = [device.make_event() for _ in range(capacity)]
        self.ends = [device.make_event() for _ in range(capacity)]
        self.has_ended = bytearray(capacity)
        self.keys: dict[int, OrderRow] = {}
        """By slot; two threads may begin instructions at once."""
        self.number = 0
        self.follows = 0
        """Number of the iteration whose next begin is this one's begin; 0 for the first one and after a pause."""
        self.reading: ReplayReading | None = None
        """Where the iteration is the replay of a captured graph: then `begins` and `ends` are not used."""
        self.known: IterationTimes | None = None
        self.is_timed = True
        self._marks: tuple[Marks, Marks] = [], []

    def marks(self, num: int) -> tuple[Marks, Marks]:
        """Return functions that record the starts and ends of `num` instructions."""
        if len(self._marks[0]) < num:
            begins, ends = ([partial(self._record, e) for e in events[:num]] for events in (self.begins, self.ends))
            self._marks = begins, ends
        return self._marks

    @property
    def last(self) -> Any:
        """The event at the end of the iteration's window."""
        return self.closing if self.following is None else self.following

    def timed_slots(self) -> list[int]:
        """Return the instructions that have ended, or that last until the end of the window."""
        has_ended = self.has_ended
        return [slot for slot, key in sorted(self.keys.items()) if has_ended[slot] or key[0] == UNTIL_NEXT_BEGIN]

    def times(self) -> IterationTimes:
        if self.known is None:
            raise RuntimeError("the times of this iteration are not known yet")
        return self.known

    def free(self) -> None:
        if self.is_timed:
            self.has_ended[:] = bytes(len(self.has_ended))
        self.following = None
        self.reading = None
        self.known = None
        self._unused.append(self)
