"""A device with a stream in virtual time, behind the program that launches work: an EventDevice for the recorder."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from gpuenergyd.client.timing.capture_gate import CaptureGate
from gpuenergyd.client.timing.device_recorder import Anchor

NS_PER_MS = 1_000_000


class VirtualEvent:
    """An event; `at_ns` is the instant on the device's clock at which its stream reaches it, -1 if not recorded."""

    def __init__(self) -> None:
        self.at_ns = -1


class VirtualDevice:
    """A device whose clock may drift against the host's and whose stream is filled ahead of time.

    `sleep` advances the host's clock; nothing else does. A call from another thread while a graph is captured is
    recorded in `forbidden_calls`: on a GPU it would break the capture.
    """

    def __init__(self, *, drift_ppm: float = 0.0, bracket_ns: int = 10_000) -> None:
        self.host_ns = 1_000_000 * NS_PER_MS
        self.capture_gate = CaptureGate()
        self.forbidden_calls: list[str] = []
        self.num_events = 0
        self._rate = 1.0 + drift_ppm * 1e-6
        self._bracket_ns = bracket_ns
        self._zero_ns = self.host_ns
        self._stream_ns = 0
        self._training_thread = threading.get_ident()

    # The program's side

    def work(self, time_ms: float) -> None:
        """Launch work that takes this long on the device, after what was launched before."""
        self._stream_ns = max(self._stream_ns, self._now_ns()) + round(time_ms * NS_PER_MS)

    def host_instant_ns(self, event: VirtualEvent) -> float:
        """Return the true instant of an event on the host's clock."""
        return self._zero_ns + event.at_ns / self._rate

    def sleep(self, time_s: float) -> None:
        """Let time pass."""
        self.host_ns += round(time_s * 1e9)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture a graph of what the block launches."""
        self.capture_gate.begin_capture()
        try:
            yield
        finally:
            self.capture_gate.end_capture()

    # EventDevice

    def make_event(self) -> VirtualEvent:
        """Return a new event."""
        self.num_events += 1
        return VirtualEvent()

    def record(self, event: VirtualEvent) -> None:
        """Record an event after all launched work."""
        self._check("record")
        self._stream_ns = max(self._stream_ns, self._now_ns())
        event.at_ns = self._stream_ns

    def has_completed(self, event: VirtualEvent) -> bool:
        """Return whether the device has reached an event."""
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
        event.at_ns = self._now_ns()
        return Anchor(event, self.host_ns, self._bracket_ns)

    def is_capturing(self) -> bool:
        """Return whether a graph is being captured."""
        return self.capture_gate.is_capturing

    def calls(self) -> AbstractContextManager[None]:
        """Return a context in which other threads may call the device."""
        return self.capture_gate.calls()

    def _now_ns(self) -> int:
        return round((self.host_ns - self._zero_ns) * self._rate)

    def _check(self, call: str) -> None:
        if threading.get_ident() != self._training_thread and self.capture_gate.is_capturing:
            self.forbidden_calls.append(call)
