"""Timers for simulated GPUs: with the events of an asynchronous stream, or with the end times of simulated work.

Without a stream, the program waits for each instruction. A process that sleeps until a simulated instruction ends wakes
up late, by milliseconds on a busy host. A host timer would add the delay to the instruction; on a real GPU, CUDA events
do not. Here the delay is part of the time between instructions.
"""

import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.event_device import Anchor
from gpuenergyd.client.timing.recorder import DEFAULT_CAPACITY, HostRecorder
from gpuenergyd.client.timing.stream_requests import PlannedRequest, StreamRequests
from gpuenergyd_sim.driver.stream import GraphEvent, SimulatedStream, StreamEvent

_NS_PER_MS = 1e6
_FLOAT = struct.Struct("<f")


class SimulatedTimer(HostRecorder):
    """An InstructionTimer that uses the end time of simulated work, or host time for instructions without any."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        super().__init__(capacity)
        self.work_ended_ns = 0
        """End of the newest simulated work, as returned by `SimulatedHost.finish_work`."""

    def end(self, slot: int) -> None:
        """Mark the end of an instruction; a later call moves it, unless simulated work ended in the instruction."""
        if slot >= 0 and self.work_ended_ns >= self._current.begin_ns[slot]:
            self._current.end_ns[slot] = self.work_ended_ns
        else:
            super().end(slot)


class SimulatedDevice:
    """An EventDevice for the stream of a simulated GPU; elapsed times are single-precision floats, as with CUDA."""

    def __init__(self, stream: SimulatedStream, *, mono_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._stream = stream
        self._mono_ns = mono_ns
        self.graphs = CapturedGraphs()

    def make_event(self) -> StreamEvent:
        """Return a new event."""
        return StreamEvent()

    def record(self, event: StreamEvent) -> None:
        """Record an event on the stream; on the training thread."""
        self._stream.record(event)

    def has_completed(self, event: StreamEvent) -> bool:
        """Return whether the GPU has reached an event."""
        return event.mono_ns > 0

    def elapsed_ms(self, first: StreamEvent, second: StreamEvent) -> float:
        """Return the time between two completed events, negative if the second is earlier."""
        (elapsed_ms,) = _FLOAT.unpack(_FLOAT.pack((second.mono_ns - first.mono_ns) / _NS_PER_MS))
        return float(elapsed_ms)

    def make_anchor(self) -> Anchor:
        """Return an event that completes now, with the host times around it."""
        before_ns = self._mono_ns()
        event = StreamEvent(before_ns)
        return Anchor(event, before_ns, self._mono_ns() - before_ns)

    def open_requests(self) -> StreamRequests:
        """Return a sender of requests, each sent when the stream reaches it."""
        return _RequestsInStream(self._stream)

    def is_capturing(self) -> bool:
        """Return whether a graph of the stream's work is being captured."""
        return self._stream.is_capturing

    def calls(self) -> AbstractContextManager[None]:
        """Return a context in which a thread other than the training thread may call the device."""
        return self.graphs.gate.calls()

    def make_node_event(self) -> GraphEvent:
        """Return a new event that a capture records as a node of its graph."""
        return GraphEvent()

    def node_ms(self, first: StreamEvent, node: GraphEvent) -> float | None:
        """Return the time from a completed event to the newest completion of a node's event; None before the first."""
        return self.elapsed_ms(first, node) if node.mono_ns else None


class _RequestsInStream:
    """Sends requests on the stream's own thread, as a host function in a CUDA stream would."""

    def __init__(self, stream: SimulatedStream) -> None:
        self._stream = stream

    def put(self, request: PlannedRequest) -> bool:
        """Send a request when the GPU has executed what was launched before."""
        self._stream.call(request)
        return True

    def prepare(self, requests: Iterable[PlannedRequest]) -> None:
        """Do nothing: requests are put together at no cost."""

    def pop_num_dropped(self) -> int:
        """Return 0: `put` accepts all requests."""
        return 0

    def close(self) -> None:
        """Do nothing: the stream belongs to the program."""


class SimulatedGraph:
    """A captured graph of a simulated GPU's stream: a replay launches its work without the program that captured it."""

    def __init__(self, device: SimulatedDevice, stream: SimulatedStream) -> None:
        self._graphs = device.graphs
        self._stream = stream
        self._nodes: tuple[Callable[[], None], ...] = ()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture what the block launches, without executing it."""
        self._graphs.begin_capture(self)
        self._stream.begin_capture()
        try:
            yield
        finally:
            self._nodes = self._stream.end_capture()
            self._graphs.end_capture()

    def replay(self) -> None:
        """Launch what was captured."""
        self._graphs.replay(self, self._launch)

    def _launch(self) -> None:
        for launch in self._nodes:
            launch()
