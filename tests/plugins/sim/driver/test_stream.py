"""Streams of simulated GPUs in virtual time: order, instants, signals and the launch queue."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from gpuenergyd_sim.driver.device_model import InstructionWork
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.stream import SimulatedStream, StreamEvent
from gpuenergyd_sim.driver.stream_signals import StreamSignals
from tests.support.waiting import LIMIT_S

MS = 1_000_000
WAIT_LIMIT_S = LIMIT_S
NOISE = 0.02
"""Simulated durations vary by 0.2 %; ten times that is not chance."""


class Clock:
    """Virtual time, which passes while a stream's thread sleeps."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000 * MS
        self._lock = threading.Lock()

    def mono_ns(self) -> int:
        return self.now_ns

    def sleep(self, time_s: float) -> None:
        with self._lock:
            self.now_ns += round(time_s * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def host(tmp_path: Path, clock: Clock) -> Iterator[SimulatedHost]:
    created = SimulatedHost.create(tmp_path / "world", ["a100-sxm"] * 2, mono_ns=clock.mono_ns, sleep=clock.sleep)
    yield created
    created.close()


def stream_on(host: SimulatedHost, clock: Clock, index: int = 0, *, max_launched: int = 100) -> SimulatedStream:
    gpu_uuid = host.identities()[index].gpu_uuid
    return SimulatedStream(host, gpu_uuid, max_launched=max_launched, mono_ns=clock.mono_ns, sleep=clock.sleep)


def work(time_ms: float) -> InstructionWork:
    return InstructionWork(memory_time_s=time_ms / 1000, compute_time_s=0.0, power_coefficient_w_per_mhz=0.2)


def recorded(stream: SimulatedStream) -> StreamEvent:
    event = StreamEvent()
    stream.record(event)
    return event


def test_work_that_was_launched_ahead_runs_without_gaps(host: SimulatedHost, clock: Clock) -> None:
    stream = stream_on(host, clock)
    events = [recorded(stream)]
    for time_ms in (5.0, 40.0, 3.0, 20.0):
        stream.launch(work(time_ms))
        events.append(recorded(stream))
    stream.synchronize()
    stream.close()

    spans_ms = [(b.mono_ns - a.mono_ns) / MS for a, b in pairwise(events)]
    assert spans_ms == pytest.approx([5.0, 40.0, 3.0, 20.0], rel=NOISE, abs=0.5)
    assert spans_ms[1:] == pytest.approx([40.0, 3.0, 20.0], rel=NOISE)  # the first one waits for the thread


def test_launching_returns_at_once_until_the_launch_queue_is_full(
    host: SimulatedHost, clock: Clock, tmp_path: Path
) -> None:
    signals = StreamSignals(tmp_path / "signals", 1)
    stream = stream_on(host, clock, max_launched=3)
    stream.wait_for(signals, 0)  # nothing begins before this signal
    for _ in range(3):
        stream.launch(work(10.0))
    fourth = threading.Thread(target=stream.launch, args=(work(10.0),), daemon=True)
    fourth.start()
    fourth.join(0.05)
    assert fourth.is_alive()

    signals.send(0, clock.now_ns)
    fourth.join(WAIT_LIMIT_S)
    assert not fourth.is_alive()
    stream.synchronize()
    stream.close()
    signals.close()


def test_a_stream_waits_for_the_signal_of_another_one_and_its_program_does_not(
    host: SimulatedHost, clock: Clock, tmp_path: Path
) -> None:
    signals = StreamSignals(tmp_path / "signals", 2)
    sender, receiver = stream_on(host, clock, 0), stream_on(host, clock, 1)
    begun = []
    for _ in range(3):
        receiver.wait_for(signals, 1)
        begun.append(recorded(receiver))
        receiver.launch(work(1.0))
    given = []
    for _ in range(3):
        sender.launch(work(30.0))
        sender.send(signals, 1)
        given.append(recorded(sender))
    for stream in (sender, receiver):
        stream.synchronize()
        stream.close()
    signals.close()

    for sent, received in zip(given, begun, strict=True):
        assert received.mono_ns >= sent.mono_ns


def test_a_signal_given_long_ago_delays_nothing(host: SimulatedHost, clock: Clock, tmp_path: Path) -> None:
    signals = StreamSignals(tmp_path / "signals", 1)
    signals.send(0, clock.now_ns)
    stream = stream_on(host, clock)
    stream.launch(work(20.0))
    before = recorded(stream)
    stream.wait_for(signals, 0)
    after = recorded(stream)
    stream.synchronize()
    stream.close()
    signals.close()

    assert after.mono_ns == before.mono_ns


def test_an_event_recorded_again_forgets_its_earlier_instant(host: SimulatedHost, clock: Clock) -> None:
    stream = stream_on(host, clock)
    event = recorded(stream)
    stream.launch(work(25.0))
    stream.record(event)
    last = recorded(stream)
    stream.synchronize()
    stream.close()

    assert event.mono_ns == last.mono_ns > 0


def test_closing_drops_what_has_not_begun(host: SimulatedHost, clock: Clock, tmp_path: Path) -> None:
    signals = StreamSignals(tmp_path / "signals", 1)
    stream = stream_on(host, clock)
    stream.wait_for(signals, 0)  # nobody gives it
    event = recorded(stream)
    stream.close()
    signals.close()

    assert event.mono_ns == 0


def test_signals_are_seen_through_another_mapping_of_the_file(tmp_path: Path) -> None:
    sender, receiver = (StreamSignals(tmp_path / "signals", 3) for _ in range(2))
    for number in range(600):
        assert receiver.instant_ns(2, number) is None
        sender.send(2, 1_000 + number)
        assert receiver.instant_ns(2, number) == 1_000 + number
    assert receiver.instant_ns(1, 0) is None
    sender.close()
    receiver.close()
