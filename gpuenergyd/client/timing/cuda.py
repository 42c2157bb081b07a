"""CUDA events that time instructions on a device; torch is used if the program has imported it, never imported here.

With NCCL the wait for an instruction's input is enqueued before the instruction, so that its begin event completes
after the wait: a pair of events encloses computation only.

A thread that calls CUDA while the program captures a graph breaks the capture. So captures by `torch.cuda.CUDAGraph`,
the only public way of torch, are announced by two wrapped methods of that class. A third one announces replays.

The test suite has no GPU; it tests the logic against doubles.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.clock_probe import ClockProbe
from gpuenergyd.client.timing.cuda_writes import map_memory
from gpuenergyd.client.timing.event_device import Anchor
from gpuenergyd.client.timing.stream_requests import StreamRequests
from gpuenergyd.client.timing.watched_requests import StreamWrite, WatchedRequests
from gpuenergyd.log_lines import safe_logger

logger = safe_logger("gpuenergyd.client")

_ANCHOR_TRIES = 3
_NARROW_BRACKET_NS = 50_000

PROBE_VARIABLE = "GPUENERGYD_CLOCK_PROBE"

captured_graphs = CapturedGraphs()
"""The graphs captured in this process, on any stream."""
_wrapping = threading.Lock()


class CudaDevice:
    """An EventDevice for the current stream of a CUDA device."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._cuda = torch.cuda
        self._device = torch.device(device)
        self._find_identity = getattr(getattr(torch, "_C", None), "_cuda_getCurrentStream", None)
        self._known: tuple[Any, Any] = None, None
        """The current stream as last seen: its identity, None if torch does not tell it, and torch's object of it."""
        self._side_stream: Any = None
        self._anchor_events: tuple[Any, ...] = ()
        self.graphs = captured_graphs
        _announce_captures(self._cuda.CUDAGraph)

    def make_event(self) -> Any:
        return self._cuda.Event(enable_timing=True)

    def record(self, event: Any) -> None:
        event.record(self._current_stream())

    def _current_stream(self) -> Any:
        """Return the current stream; torch makes an object of it at each call, which is kept while it is the same."""
        index = getattr(self._device, "index", None)
        identity = None if self._find_identity is None or index is None else self._find_identity(index)
        known = self._known
        if identity is None or identity != known[0]:
            known = self._known = identity, self._cuda.current_stream(self._device)
        return known[1]

    def has_completed(self, event: Any) -> bool:
        return bool(event.query())

    def elapsed_ms(self, first: Any, second: Any) -> float:
        return float(first.elapsed_time(second))

    def make_anchor(self) -> Anchor:
        """Complete an event now, on a stream without work; the best of a few tries if the host is busy."""
        if self._side_stream is None:  # not in the constructor: the program may be capturing a graph there
            self._side_stream = self._cuda.Stream(self._device)
            self._anchor_events = tuple(self.make_event() for _ in range(_ANCHOR_TRIES))
        best: Anchor | None = None
        for event in self._anchor_events:
            before_ns = time.monotonic_ns()
            event.record(self._side_stream)
            event.synchronize()
            after_ns = time.monotonic_ns()
            if best is None or after_ns - before_ns < best.bracket_ns:
                best = Anchor(event, (before_ns + after_ns) // 2, after_ns - before_ns)
            if best.bracket_ns <= _NARROW_BRACKET_NS:
                break
        assert best is not None
        return best

    def open_requests(self) -> StreamRequests | None:
        try:
            return WatchedRequests(self._map_memory)
        except OSError as error:
            logger.info("gpuenergyd: no watcher of the GPU's progress (%s); its events are asked instead", error)
            return None

    def _map_memory(self, address: int, size: int) -> StreamWrite:
        return map_memory(address, size, lambda: int(self._current_stream().cuda_stream))

    def open_clock_probe(self) -> ClockProbe | None:
        """Return a probe of the true clock in the current context; None unless GPUENERGYD_CLOCK_PROBE is 1."""
        return ClockProbe() if os.environ.get(PROBE_VARIABLE) == "1" else None

    def is_capturing(self) -> bool:
        return bool(self._cuda.is_current_stream_capturing())

    def calls(self) -> AbstractContextManager[None]:
        return self.graphs.gate.calls()

    def make_node_event(self) -> Any | None:
        """Return a new event that a capture records as a node of its graph; None in versions of torch without them."""
        try:
            return self._cuda.Event(enable_timing=True, external=True)
        except TypeError:
            return None

    def node_ms(self, first: Any, node: Any) -> float | None:
        try:
            return float(first.elapsed_time(node)) if node.query() else None
        except RuntimeError:  # CUDA refuses an event that no replay has reached yet, or that is being recorded
            return None


def loaded_cuda_device() -> CudaDevice | None:
    """Return the CUDA device in use by this process; None unless torch is loaded and has used one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return CudaDevice(torch, torch.device("cuda", torch.cuda.current_device()))


def _announce_captures(graph_class: Any) -> None:
    """Wrap the two methods between which a graph is captured, and the one that replays it; once per process."""
    with _wrapping:
        if getattr(graph_class.capture_begin, "announces_to_gpuenergyd", False):
            return
        graph_class.capture_begin = _announced_begin(graph_class.capture_begin)
        graph_class.capture_end = _announced_end(graph_class.capture_end)
        graph_class.replay = _announced_replay(graph_class.replay)


def _announced_begin(begin: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(begin)
    def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
        captured_graphs.begin_capture(graph)
        try:
            return begin(graph, *args, **kwargs)
        except BaseException:
            captured_graphs.end_capture()
            raise

    capture_begin.announces_to_gpuenergyd = True  # type: ignore[attr-defined]
    return capture_begin


def _announced_end(end: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(end)
    def capture_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return end(*args, **kwargs)
        finally:
            captured_graphs.end_capture()

    return capture_end


def _announced_replay(replay: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(replay)
    def replay_followed(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return captured_graphs.replay(graph, lambda: replay(graph, *args, **kwargs))

    return replay_followed
