"""A stream of a simulated GPU, as with CUDA: the program launches work ahead, and the GPU executes it in order.

Theory of operation. A program queues operations without waiting for them: instructions, events, signals to the stream
of another GPU, and waits for its signals. One thread executes the queue in order. It launches each instruction while
the previous one runs, so that the GPU starts it exactly when the previous one ends, even if the thread wakes up late.
An event has the time at which the GPU reached it, even if the thread notices later.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from gpuenergyd.errors import UsageError
from gpuenergyd_sim.driver.device_model import InstructionWork
from gpuenergyd_sim.driver.host import LaunchedWork, SimulatedHost
from gpuenergyd_sim.driver.stream_signals import StreamSignals

_SHORTEST_SLEEP_S = 0.0003
_LONGEST_SLEEP_S = 0.05
_CLOSE_LIMIT_S = 5.0


@dataclass(slots=True, eq=False)
class StreamEvent:
    """An event of a stream; `mono_ns` is the time at which the GPU reached it, 0 before that."""

    mono_ns: int = 0


@dataclass(slots=True, eq=False)
class GraphEvent(StreamEvent):
    """An event recorded by a node of a captured graph: each time the GPU reaches the node, `mono_ns` is updated."""


@dataclass(frozen=True, slots=True)
class _Wait:
    signals: StreamSignals
    channel: int
    number: int


@dataclass(frozen=True, slots=True)
class _Send:
    signals: StreamSignals
    channel: int


@dataclass(frozen=True, slots=True)
class _Record:
    event: StreamEvent
    number: int


@dataclass(frozen=True, slots=True)
class _Call:
    act: Callable[[], None]


_Operation: TypeAlias = InstructionWork | _Wait | _Send | _Record | _Call


@dataclass(slots=True)
class _Progress:
    """Progress of the GPU, as known to the stream's thread."""

    num_launched: int = 0
    num_ended: int = 0
    reached_ns: int = 0
    """The end of the last instruction or wait."""
    pending: deque[tuple[int, _Send | _Record | _Call]] = field(default_factory=deque)
    """Operations to complete once this many instructions have ended; the instruction before them still runs."""


class SimulatedStream:
    """The stream of one process on one simulated GPU.

    At most `max_launched` instructions wait to be passed to the GPU. A program that launches more has to wait, as it
    does when a driver's launch queue is full. With `max_launched=0` the program waits until each instruction has been
    passed to the GPU.

    During a capture, operations are not executed but stored as the nodes of a graph.
    """

    def __init__(
        self,
        host: SimulatedHost,
        gpu_uuid: str,
        *,
        max_launched: int,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._host = host
        self._gpu_uuid = gpu_uuid
        self._max_launched = max_launched
        self._mono_ns = mono_ns
        self._sleep = sleep
        self._changed = threading.Condition()
        self._operations: deque[_Operation] = deque()
        self._num_waiting_works = 0
        self._event_numbers: dict[int, int] = {}
        self._num_waits: dict[int, int] = {}
        self._nodes: list[Callable[[], None]] | None = None
        self._is_idle = True
        self._is_closed = False
        self._ended_before = host.launched_work(gpu_uuid).num_ended
        self._progress = _Progress(reached_ns=mono_ns())
        self._thread = threading.Thread(target=self._run, name="simulated-stream", daemon=True)
        self._thread.start()

    # On the training thread

    @property
    def is_capturing(self) -> bool:
        """Whether operations are stored as the nodes of a graph instead of executed."""
        return self._nodes is not None

    def begin_capture(self) -> None:
        """Start to store operations as the nodes of a graph."""
        self._nodes = []

    def end_capture(self) -> tuple[Callable[[], None], ...]:
        """End the capture; return one function per stored operation, which puts it on the stream."""
        nodes, self._nodes = self._nodes, None
        return tuple(nodes or ())

    def launch(self, work: InstructionWork) -> None:
        """Put an instruction on the stream; waits only if too many are queued already."""
        if self._is_stored(partial(self.launch, work)):
            return
        with self._changed:
            self._put(work)
            self._num_waiting_works += 1
            self._changed.wait_for(lambda: self._num_waiting_works <= self._max_launched or self._is_closed)

    def wait_for(self, signals: StreamSignals, channel: int) -> None:
        """Make the stream wait for the next signal of a channel; the program does not wait."""
        if self._is_stored(partial(self.wait_for, signals, channel)):
            return
        number = self._num_waits.get(channel, 0)
        self._num_waits[channel] = number + 1
        with self._changed:
            self._put(_Wait(signals, channel, number))

    def send(self, signals: StreamSignals, channel: int) -> None:
        """Send a signal when the GPU has executed what was launched before."""
        if self._is_stored(partial(self.send, signals, channel)):
            return
        with self._changed:
            self._put(_Send(signals, channel))

    def call(self, act: Callable[[], None]) -> None:
        """Call a function, which must not wait, on the stream's thread when the GPU has executed what came before."""
        with self._changed:
            self._put(_Call(act))

    def record(self, event: StreamEvent) -> None:
        """Record an event after what was launched before; recording it again discards the earlier time.

        Raises:
            UsageError: the stream is being captured, and the event is not one of a graph.
        """
        if self.is_capturing and not isinstance(event, GraphEvent):
            raise UsageError("an event that is recorded during a capture must be a GraphEvent")
        if self._is_stored(partial(self.record, event)):
            return
        with self._changed:
            number = 0
            if not isinstance(event, GraphEvent):
                event.mono_ns = 0
                number = self._event_numbers[id(event)] = self._event_numbers.get(id(event), 0) + 1
            self._put(_Record(event, number))

    def synchronize(self) -> None:
        """Wait until the GPU has executed everything that was launched."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_idle or self._is_closed)

    def close(self) -> None:
        """End the thread; queued operations that have not begun are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_LIMIT_S)

    def _is_stored(self, launch: Callable[[], None]) -> bool:
        """Store an operation as a node if a graph is being captured; return whether it is."""
        if self._nodes is not None:
            self._nodes.append(launch)
        return self._nodes is not None

    def _put(self, operation: _Operation) -> None:
        self._operations.append(operation)
        self._is_idle = False
        self._changed.notify_all()

    # On the stream's thread

    def _run(self) -> None:
        while True:
            launched = self._host.launched_work(self._gpu_uuid)
            with self._changed:
                if self._is_closed:
                    return
                self._update(launched)
                pause_s = self._execute(launched)
                if pause_s is None:
                    self._is_idle = True
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._operations or self._is_closed)
                    continue
                awaited = self._operations[0] if self._operations else None
            if pause_s <= 0.0:
                continue
            pause_s = min(max(pause_s, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S)
            if isinstance(awaited, _Wait):
                awaited.signals.pause(awaited.channel, awaited.number, limit_s=pause_s, sleep=self._sleep)
            else:
                self._sleep(pause_s)

    def _update(self, launched: LaunchedWork) -> None:
        """Complete the events that were waiting for the instructions that have now ended."""
        progress = self._progress
        num_ended = launched.num_ended - self._ended_before
        ends_ns = {num_ended: launched.last_ended_mono_ns, num_ended - 1: launched.before_last_ended_mono_ns}
        while progress.num_ended < num_ended:
            progress.num_ended += 1
            progress.reached_ns = max(progress.reached_ns, ends_ns.get(progress.num_ended, launched.last_ended_mono_ns))
            while progress.pending and progress.pending[0][0] <= progress.num_ended:
                self._complete(progress.pending.popleft()[1])

    def _execute(self, launched: LaunchedWork) -> float | None:
        """Execute operations until one has to wait; return the time to wait, 0 to continue, or None if all are done."""
        progress = self._progress
        while self._operations:
            operation = self._operations[0]
            if isinstance(operation, InstructionWork):
                if not launched.can_launch or progress.num_launched - progress.num_ended >= 2:
                    return launched.least_remaining_s
                self._operations.popleft()
                self._host.launch_work(self._gpu_uuid, operation)
                progress.num_launched += 1
                self._num_waiting_works -= 1
                self._changed.notify_all()
                return 0.0
            if isinstance(operation, _Wait):
                given_ns = operation.signals.instant_ns(operation.channel, operation.number)
                if given_ns is None:
                    is_running = progress.num_launched > progress.num_ended
                    return launched.least_remaining_s if is_running else _LONGEST_SLEEP_S
                self._operations.popleft()
                if progress.num_launched == progress.num_ended:  # the GPU waited
                    progress.reached_ns = max(progress.reached_ns, self._mono_ns())
                continue
            self._operations.popleft()
            if progress.num_launched > progress.num_ended:
                progress.pending.append((progress.num_launched, operation))
            else:
                self._complete(operation)
        if progress.num_launched > progress.num_ended:
            return launched.least_remaining_s
        return None

    def _complete(self, operation: _Send | _Record | _Call) -> None:
        if isinstance(operation, _Call):
            operation.act()
        elif isinstance(operation, _Send):
            operation.signals.send(operation.channel, self._progress.reached_ns)
        elif (
            isinstance(operation.event, GraphEvent) or self._event_numbers.get(id(operation.event)) == operation.number
        ):
            operation.event.mono_ns = self._progress.reached_ns
