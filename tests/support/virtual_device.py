"""A device with a stream in virtual time, behind the program that launches work: an EventDevice for the recorder."""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.event_device import Anchor
from gpuenergyd.client.timing.recorder import IterationTimes, RecordedIteration

NS_PER_MS = 1_000_000


class CalledRequest(NamedTuple):
    """A request that calls a function of the test when it is due."""

    act: Callable[[], object]

    def __call__(self) -> None:
        self.act()

    def datagram(self) -> None:
        """Return None: nothing can be sent in place of the call."""

    def give_up_socket(self) -> None:
        """Do nothing: there is none."""


def when_known(recorder: DeviceRecorder, recorded: RecordedIteration, use: Callable[[IterationTimes], object]) -> None:
    """Use an iteration's times once they are known, after its events have been freed."""

    def freed() -> None:
        times = recorded.times()
        recorded.free()
        use(times)

    recorder.call_when_known(recorded, freed)


class VirtualEvent:
    """An event; `at_ns` is the instant on the device's clock at which its stream reaches it, -1 if not recorded."""

    def __init__(self) -> None:
        self.at_ns = -1


class VirtualNodeEvent:
    """An event of a graph; `instants_ns` has one for each replay launched so far, of which a query sees the newest."""

    def __init__(self) -> None:
        self.instants_ns: list[int] = []


class VirtualGraph:
    """A captured graph: a list of durations and events, which the stream runs without a call of anybody."""

    def __init__(self) -> None:
        self.nodes: list[float | VirtualNodeEvent] = []


class VirtualDevice:
    """A device whose clock may drift against the host's and whose stream is filled ahead of time.

    `sleep` advances the host's clock; nothing else does. The program and the recorder's thread both sleep: in
    `launching`, the clock does not advance between two calls of the program. A call while a graph is captured that
    would break the capture on a GPU, or become a part of it, is recorded in `forbidden_calls`: any call of another
    thread, and any of the training thread except the event nodes that it captures. With `hides_pending`, a node's
    event has no time from the launch of a replay until the replay comes to it.
    """

    def __init__(
        self,
        *,
        drift_ppm: float = 0.0,
        bracket_ns: int = 10_000,
        has_nodes: bool = True,
        hides_pending: bool = False,
        host_ns: int = 1_000_000 * NS_PER_MS,
    ) -> None:
        self.host_ns = host_ns
        self.graphs = CapturedGraphs()
        self.has_nodes = has_nodes
        self.hides_pending = hides_pending
        self._graph: VirtualGraph | None = None
        self.forbidden_calls: list[str] = []
        self.num_events = 0
        self._rate = 1.0 + drift_ppm * 1e-6
        self._bracket_ns = bracket_ns
        self._zero_ns = self.host_ns
        self._stream_ns = 0
        self._sleeping = threading.RLock()

    # The program's side

    def launching(self) -> AbstractContextManager[object]:
        """Return a context of the program's thread in which no other thread lets time pass."""
        return self._sleeping

    def work(self, time_ms: float) -> None:
        """Launch work that takes this long on the device, after what was launched before."""
        if self._graph is not None:
            self._graph.nodes.append(time_ms)
            return
        self._stream_ns = max(self._stream_ns, self._now_ns()) + round(time_ms * NS_PER_MS)

    def replay(self, graph: VirtualGraph) -> None:
        """Replay a graph, as the program does."""
        self.graphs.replay(graph, lambda: self._launch(graph))

    def _launch(self, graph: VirtualGraph) -> None:
        for node in graph.nodes:
            if isinstance(node, VirtualNodeEvent):
                self._stream_ns = max(self._stream_ns, self._now_ns())
                node.instants_ns.append(self._stream_ns)
            else:
                self.work(node)

    def sleep(self, time_s: float) -> None:
        """Let time pass."""
        with self._sleeping:
            self.host_ns += round(time_s * 1e9)

    @contextmanager
    def capture(self, graph: VirtualGraph | None = None) -> Iterator[VirtualGraph]:
        """Capture a graph of what the block launches."""
        captured = VirtualGraph() if graph is None else graph
        self.graphs.begin_capture(captured)
        self._graph, captured.nodes = captured, []
        try:
            yield captured
        finally:
            self._graph = None
            self.graphs.end_capture()

    # EventDevice

    def make_event(self) -> VirtualEvent:
        self.num_events += 1
        return VirtualEvent()

    def record(self, event: VirtualEvent | VirtualNodeEvent) -> None:
        """Record an event after all launched work."""
        if self._graph is not None and isinstance(event, VirtualNodeEvent):
            self._graph.nodes.append(event)
            return
        self._check("record")
        assert isinstance(event, VirtualEvent)
        self._stream_ns = max(self._stream_ns, self._now_ns())
        event.at_ns = self._stream_ns

    def has_completed(self, event: VirtualEvent) -> bool:
        self._check("has_completed")
        return event.at_ns <= self._now_ns()

    def elapsed_ms(self, first: VirtualEvent, second: VirtualEvent) -> float:
        """Return the milliseconds between two completed events."""
        self._check("elapsed_ms")
        assert 0 <= first.at_ns <= self._now_ns()
        assert 0 <= second.at_ns <= self._now_ns()
        return (second.at_ns - first.at_ns) / NS_PER_MS

    def make_anchor(self) -> Anchor:
        """Complete an event now."""
        self._check("make_anchor")
        event = VirtualEvent()
        host_ns = self.host_ns  # read once: another thread may sleep
        event.at_ns = self._device_ns(host_ns)
        return Anchor(event, host_ns, self._bracket_ns)

    def open_requests(self) -> None:
        """Return None: events are to be asked."""

    def is_capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return self.graphs.gate.is_capturing

    def calls(self) -> AbstractContextManager[None]:
        return self.graphs.gate.calls()

    def make_node_event(self) -> VirtualNodeEvent | None:
        """Return a new event for a graph."""
        return VirtualNodeEvent() if self.has_nodes else None

    def node_ms(self, first: VirtualEvent, node: VirtualNodeEvent) -> float | None:
        self._check("node_ms")
        num_completed = bisect_right(node.instants_ns, self._now_ns())
        if not num_completed or (self.hides_pending and num_completed < len(node.instants_ns)):
            return None
        return (node.instants_ns[num_completed - 1] - first.at_ns) / NS_PER_MS

    def _now_ns(self) -> int:
        return self._device_ns(self.host_ns)

    def _device_ns(self, host_ns: int) -> int:
        return round((host_ns - self._zero_ns) * self._rate)

    def _check(self, call: str) -> None:
        if self.graphs.gate.is_capturing:
            self.forbidden_calls.append(call)
