"""Times of captured graphs' instructions: of the replay that they are reported for, or not reported at all."""

import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.event_device import EventDevice
from gpuenergyd.client.timing.recorder import IterationTimes, RecordedIteration
from gpuenergyd.client.timing.replays import CapturedInstructions, ReplayReading
from tests.support.examples import examples
from tests.support.virtual_device import NS_PER_MS, VirtualDevice, VirtualGraph, when_known
from tests.support.waiting import LIMIT_S

WAIT_LIMIT_S = LIMIT_S


class Program:
    """A program that captures a step of (wait, work) pairs in ms, and replays it."""

    def __init__(self, device: VirtualDevice, *steps_ms: tuple[float, float]) -> None:
        self.device = device
        self.recorder = DeviceRecorder(device, 16, sleep=device.sleep, mono_s=lambda: 0.0)
        self.known: queue.Queue[IterationTimes] = queue.Queue()
        self._previous: RecordedIteration | None = None
        self.graph = VirtualGraph()
        self.captured = self.capture(*steps_ms)

    def capture(self, *steps_ms: tuple[float, float]) -> CapturedInstructions:
        """Capture a step in the graph."""
        with self.device.capture(self.graph):
            assert self.recorder.begin_capture()
            for microbatch, (wait_ms, work_ms) in enumerate(steps_ms):
                self.device.work(wait_ms)
                slot = self.recorder.begin(("F", microbatch, 0))
                self.device.work(work_ms)
                self.recorder.end(slot)
            captured = self.recorder.end_capture()
        assert captured is not None
        return captured

    def replay(self, *, is_timed: bool = True) -> None:
        """Replay the step as an iteration."""
        previous, self._previous = self._previous, None
        with self.device.launching():
            self.recorder.begin_iteration(previous, is_timed=is_timed)
            if previous is not None:
                when_known(self.recorder, previous, self.known.put)
            self.recorder.replay(self.captured)
            self.device.replay(self.graph)
            self._previous = self.recorder.end_iteration()

    def pause(self) -> None:
        """Have the last replay reported at its end."""
        previous, self._previous = self._previous, None
        assert previous is not None
        when_known(self.recorder, previous, self.known.put)

    def close(self) -> list[IterationTimes]:
        """End the recorder once the device has run everything; return the reported times."""
        self.recorder.close(WAIT_LIMIT_S)
        return [self.known.get_nowait() for _ in range(self.known.qsize())]


def spans_ms(times: IterationTimes) -> list[tuple[float, float]]:
    """Return begin and end of each instruction in ms after the begin of the iteration."""
    origin = times.begin_mono_ns
    return [((begin - origin) / NS_PER_MS, (end - origin) / NS_PER_MS) for *_, begin, end in times.instructions]


@pytest.fixture
def device() -> VirtualDevice:
    return VirtualDevice()


@pytest.fixture
def program(device: VirtualDevice) -> Iterator[Program]:
    running = Program(device, (5.0, 20.0), (10.0, 40.0))
    yield running
    running.recorder.close(WAIT_LIMIT_S)


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_replay_is_timed_by_the_events_in_its_graph_whether_or_not_others_are(
    program: Program,
    is_timed: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    for _ in range(4):  # launched at once: the program is three replays ahead
        program.replay(is_timed=is_timed)
    program.pause()

    reported = program.close()
    assert len(reported) == 4
    for times in reported:
        assert [row[:3] for row in times.instructions] == [("F", 0, 0), ("F", 1, 0)]
        assert [value for span in spans_ms(times) for value in span] == pytest.approx([5.0, 25.0, 35.0, 75.0])
        assert (times.end_mono_ns - times.begin_mono_ns) / NS_PER_MS == pytest.approx(75.0)
    assert program.recorder.num_unread_replays == 0


def test_a_capture_holds_event_nodes_and_work_alone_and_no_thread_calls_the_device_in_it(device: VirtualDevice) -> None:
    program = Program(device, (0.0, 5.0))
    program.replay()
    program.pause()  # the recorder's thread has something to wait for
    program.capture((0.0, 7.0), (1.0, 2.0))

    assert device.forbidden_calls == []
    kinds = [type(node).__name__ for node in program.graph.nodes]
    assert kinds == ["float", "VirtualNodeEvent", "float", "VirtualNodeEvent"] * 2
    program.close()


def test_a_loss_computed_after_the_forward_moves_its_end(device: VirtualDevice) -> None:
    program = Program(device, (0.0, 5.0))
    with device.capture(program.graph):
        program.recorder.begin_capture()
        slot = program.recorder.begin(("F", 0, 0))
        device.work(5.0)
        program.recorder.end(slot)
        device.work(1.0)
        program.recorder.end(slot)
        captured = program.recorder.end_capture()
    assert captured is not None
    program.captured = captured
    program.replay()
    program.pause()

    (times,) = program.close()
    assert spans_ms(times) == [pytest.approx((0.0, 6.0))]


def test_a_replay_whose_times_were_overwritten_before_they_were_read_is_not_reported(device: VirtualDevice) -> None:
    program = Program(device, (0.0, 5.0), (0.0, 5.0))
    with device.calls():  # the recorder's thread stands still until the second replay is under way
        program.replay()
        device.replay(program.graph)
        device.sleep(0.017)
        program.pause()

    assert program.close() == []
    assert program.recorder.num_unread_replays == 1


def test_an_instruction_that_does_not_end_in_the_capture_makes_it_incomplete(device: VirtualDevice) -> None:
    program = Program(device, (0.0, 5.0))
    with device.capture():
        program.recorder.begin_capture()
        program.recorder.begin(("F", 0, 0))
        captured = program.recorder.end_capture()

    assert captured is not None
    assert not captured.is_complete
    assert program.captured.is_complete
    program.close()


def test_without_event_nodes_a_capture_is_incomplete() -> None:
    program = Program(VirtualDevice(has_nodes=False), (0.0, 5.0))

    assert program.captured.keys == [("F", 0, 0)]
    assert not program.captured.is_complete
    program.close()


def test_the_begin_of_a_replay_is_known_on_the_hosts_clock(program: Program, device: VirtualDevice) -> None:
    instants: queue.Queue[int] = queue.Queue()
    begin_ns = device.host_ns
    for _ in range(3):
        program.replay()
        program.recorder.call_with_instant(instants.put)
    program.pause()
    program.close()

    # The mark of a call made after the replay is its end.
    ends_ms = [(instants.get_nowait() - begin_ns) / NS_PER_MS for _ in range(3)]
    assert ends_ms == pytest.approx([75.0, 150.0, 225.0], abs=0.1)


@pytest.mark.parametrize(("begin_ms", "is_known"), [(0.25, True), (1.0, False), (1.5, False)])
def test_a_begin_at_the_end_of_a_replay_is_one_of_the_next(
    device: VirtualDevice,
    begin_ms: float,
    is_known: bool,  # noqa: FBT001
) -> None:
    program = Program(device, (0.0, 1.0))
    read_ms = iter((begin_ms, 1.0))
    reading = ReplayReading(program.captured, None)
    reading.read(cast("EventDevice", SimpleNamespace(node_ms=lambda _first, _node: next(read_ms))))

    assert (reading.spans_ns(NS_PER_MS) is not None) == is_known
    program.close()


durations_ms = st.floats(0.0, 20.0)
steps = st.lists(st.tuples(durations_ms, st.floats(0.5, 20.0)), min_size=1, max_size=6)


@settings(max_examples=examples(80), deadline=None)
@given(
    steps,
    st.lists(st.tuples(st.booleans(), st.floats(0.0, 60.0)), min_size=1, max_size=8),
    st.floats(-100.0, 100.0),
    st.booleans(),
)
def test_times_are_those_of_the_reported_replay_or_missing_however_the_program_launches(
    steps_ms: list[tuple[float, float]],
    launches: list[tuple[bool, float]],
    drift_ppm: float,
    hides_pending: bool,  # noqa: FBT001  drawn by hypothesis
) -> None:
    device = VirtualDevice(drift_ppm=drift_ppm, hides_pending=hides_pending)
    program = Program(device, *steps_ms)
    for is_foreign, pause_ms in launches:
        program.replay()
        if is_foreign:
            device.replay(program.graph)
        device.sleep(pause_ms / 1000.0)
    program.pause()
    reported = program.close()

    truth, at_ms = [], 0.0
    for wait_ms, work_ms in steps_ms:
        truth.append((at_ms + wait_ms, at_ms + wait_ms + work_ms))
        at_ms = truth[-1][1]
    assert len(reported) + program.recorder.num_unread_replays == len(launches)
    for times in reported:
        window_ms = (times.end_mono_ns - times.begin_mono_ns) / NS_PER_MS
        assert window_ms == pytest.approx(at_ms, abs=0.01)
        begins_at_ms = spans_ms(times)[0][0] - truth[0][0]
        for found, true in zip(spans_ms(times), truth, strict=True):
            assert found == pytest.approx(tuple(value + begins_at_ms for value in true), abs=1e-5)
        assert abs(begins_at_ms) < 0.01
