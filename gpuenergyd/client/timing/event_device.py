"""Events of a device's streams, as the recorder uses them: the Protocol that CUDA and simulated GPUs implement."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.clock_probe import ClockProbe
from gpuenergyd.client.timing.stream_requests import StreamRequests


@dataclass(frozen=True, slots=True)
class Anchor:
    """An event that has completed, at an instant of the host's clock."""

    event: Any
    mono_ns: int
    bracket_ns: int
    """Time within which the event completed; the instant is its middle."""


class EventDevice(Protocol):
    """Events of a device's current stream; `Any` is the device's event type."""

    graphs: CapturedGraphs
    """The graphs of the device's work that this process captures and replays."""

    def make_event(self) -> Any: ...

    def record(self, event: Any) -> None:
        """Record an event on the current stream; on the training thread."""
        ...

    def has_completed(self, event: Any) -> bool: ...

    def elapsed_ms(self, first: Any, second: Any) -> float:
        """Return the time between two completed events, negative if the second is earlier."""
        ...

    def make_anchor(self) -> Anchor:
        """Complete an event now, on a stream without work."""
        ...

    def open_requests(self) -> StreamRequests | None:
        """Return the sender of requests that the current stream reaches; None if events have to be polled instead.

        May take its time; not on the training thread.
        """
        ...

    def is_capturing(self) -> bool:
        """Return whether the training thread captures a graph now: work is then recorded, not run."""
        ...

    def calls(self) -> AbstractContextManager[None]:
        """Return a context in which a thread other than the training thread may call the device."""
        ...

    def make_node_event(self) -> Any | None:
        """Return a new event that a capture records as a node of its graph; None if the device has none."""
        ...

    def node_ms(self, first: Any, node: Any) -> float | None:
        """Return the time from a completed event to the newest completion of a node's event.

        It is negative while the newest completion is one of an earlier replay; None before the first one, or where the
        device does not say, because the next replay is under way.
        """
        ...


@runtime_checkable
class CountsCycles(Protocol):
    """A device that can show its true clock."""

    def open_clock_probe(self) -> ClockProbe | None:
        """Return a probe of the clock, on the training thread; None unless the user wants it. May raise anything."""
        ...
