"""Times of iterations on a device that runs behind the program, from events in virtual time."""

import queue
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from gpuenergyd.client.timing.recorder import IterationTimes, RecordedIteration
from tests.support.examples import examples
from tests.support.virtual_device import NS_PER_MS, CalledRequest, VirtualDevice, when_known
from tests.support.waiting import LIMIT_S

WAIT_LIMIT_S = LIMIT_S
ROUNDING_NS = 100_000
CORRECTION_NS = 100_000
"""By which an anchor may shift the end of an iteration."""


class Program:
    """A program that launches iterations on a virtual device and receives their times."""

    def __init__(self, device: VirtualDevice, *, capacity: int = 16, num_buffers: int = 16) -> None:
        self.device = device
        self.recorder = DeviceRecorder(
            device, capacity, num_buffers=num_buffers, sleep=device.sleep, mono_s=lambda: 0.0
        )
        self._previous: RecordedIteration | None = None
        self._known: queue.Queue[IterationTimes] = queue.Queue()

    def launch(self, *instructions_ms: tuple[float, float], then_ms: float = 0.0) -> None:
        """Launch an iteration: pairs of a wait and an instruction, then work outside of the step."""
        self.begin_iteration()
        for microbatch, (wait_ms, work_ms) in enumerate(instructions_ms):
            self.device.work(wait_ms)
            slot = self.recorder.begin(("F", microbatch, 0))
            self.device.work(work_ms)
            self.recorder.end(slot)
        self._previous = self.recorder.end_iteration()
        self.device.work(then_ms)

    def end_iteration(self) -> None:
        """End an iteration that the test launches by itself."""
        self._previous = self.recorder.end_iteration()

    def begin_iteration(self) -> None:
        """Begin an iteration; the one before is reported when the device reaches it."""
        previous, self._previous = self._previous, None
        self.recorder.begin_iteration(previous)
        if previous is not None:
            when_known(self.recorder, previous, self._known.put)

    def pause(self) -> None:
        """Have the last iteration reported at its end."""
        previous, self._previous = self._previous, None
        assert previous is not None
        when_known(self.recorder, previous, self._known.put)

    def next_times(self) -> IterationTimes:
        """Return the times of the next iteration that the recorder has reported."""
        while self._known.empty():
            assert self.recorder._unread
            self.device.sleep(0.001)
            self.recorder.read_late()
        return self._known.get()


@pytest.fixture
def device() -> VirtualDevice:
    return VirtualDevice()


@pytest.fixture
def program(device: VirtualDevice) -> Iterator[Program]:
    running = Program(device)
    yield running
    running.recorder.close(WAIT_LIMIT_S)


def begins_ms(times: IterationTimes) -> list[float]:
    return [(begin - times.begin_mono_ns) / NS_PER_MS for *_, begin, _ in times.instructions]


def worked_ms(times: IterationTimes) -> list[float]:
    """Return the duration of each instruction in ms."""
    return [(end - begin) / NS_PER_MS for *_, begin, end in times.instructions]


def test_an_iteration_is_timed_on_the_device_however_far_the_program_is_ahead(program: Program) -> None:
    for _ in range(5):  # launched at once: the program is four iterations ahead
        program.launch((0.0, 300.0), (100.0, 520.0), then_ms=80.0)
    program.pause()

    for _ in range(4):
        times = program.next_times()
        assert begins_ms(times) == pytest.approx([0.0, 400.0])
        assert worked_ms(times) == pytest.approx([300.0, 520.0])
        assert (times.end_mono_ns - times.begin_mono_ns) / NS_PER_MS == pytest.approx(920.0)
        assert (times.next_begin_mono_ns - times.begin_mono_ns) / NS_PER_MS == pytest.approx(1000.0)
    last = program.next_times()
    assert last.next_begin_mono_ns == 0
    assert (last.end_mono_ns - last.begin_mono_ns) / NS_PER_MS == pytest.approx(920.0)


def test_the_windows_of_consecutive_iterations_touch(program: Program) -> None:
    for k in range(6):
        program.launch((1.0, 7.0 + k), (0.5, 3.0), then_ms=2.0)

    times = [program.next_times() for _ in range(5)]

    assert [t.next_begin_mono_ns for t in times[:-1]] == [t.begin_mono_ns for t in times[1:]]


durations_ms = st.floats(0.0, 50.0)
iterations = st.lists(st.lists(st.tuples(durations_ms, durations_ms), min_size=1, max_size=6), min_size=2, max_size=8)


@settings(max_examples=examples(60))
@given(iterations, st.floats(0.0, 100.0), st.floats(-100.0, 100.0))
def test_times_are_consistent_and_true_for_any_iterations(
    launched: list[list[tuple[float, float]]], host_pause_ms: float, drift_ppm: float
) -> None:
    device = VirtualDevice(drift_ppm=drift_ppm)
    begin_ns = device.host_ns - ROUNDING_NS
    program = Program(device)
    try:
        for instructions in launched:
            program.launch(*instructions)
            device.sleep(host_pause_ms / 1000.0)
        program.pause()
        reported = [program.next_times() for _ in launched]
    finally:
        program.recorder.close(WAIT_LIMIT_S)

    for instructions, times in zip(launched, reported, strict=True):
        window_end_ns = times.next_begin_mono_ns or times.end_mono_ns
        assert begin_ns <= times.begin_mono_ns <= times.end_mono_ns <= window_end_ns
        begin_ns = times.begin_mono_ns
        assert worked_ms(times) == pytest.approx([work_ms for _, work_ms in instructions], abs=1e-5)
        limit_ns = window_end_ns + CORRECTION_NS
        assert all(times.begin_mono_ns <= b <= e <= limit_ns for *_, b, e in times.instructions)


@pytest.mark.parametrize("drift_ppm", [-40.0, 25.0])
def test_host_times_follow_the_devices_drifting_clock(drift_ppm: float) -> None:
    device = VirtualDevice(drift_ppm=drift_ppm)
    program = Program(device)
    first_ns = None
    program.launch((0.0, 900.0), then_ms=100.0)
    for k in range(60):
        program.launch((0.0, 900.0), then_ms=100.0)
        times = program.next_times()
        first_ns = first_ns if first_ns is not None else times.begin_mono_ns
        true_ns = first_ns + k * 1_000 * NS_PER_MS / (1 + drift_ppm * 1e-6)
        assert abs(times.begin_mono_ns - true_ns) < 200_000
    program.recorder.close(WAIT_LIMIT_S)

    assert program.recorder.drift_ppm == pytest.approx(drift_ppm, abs=5.0)


def test_functions_are_called_in_the_order_of_the_stream_when_the_device_reaches_them(
    program: Program, device: VirtualDevice
) -> None:
    reached: queue.Queue[tuple[str, float]] = queue.Queue()
    zero_ns = device.host_ns

    def log_reached(name: str) -> None:
        reached.put((name, (device.host_ns - zero_ns) / NS_PER_MS))

    program.begin_iteration()
    program.recorder.call_when_reached(CalledRequest(lambda: log_reached("full speed")))
    device.work(50.0)
    low = program.recorder.begin(("F", 0, 0))
    program.recorder.call_at_begin(low, CalledRequest(lambda: log_reached("low clock")))
    device.work(20.0)
    program.recorder.end(low)
    program.end_iteration()
    program.recorder.call_when_reached(CalledRequest(lambda: log_reached("highest clock")))

    calls = [reached.get(timeout=WAIT_LIMIT_S) for _ in range(3)]
    assert [name for name, _ in calls] == ["full speed", "low clock", "highest clock"]
    assert [at_ms for _, at_ms in calls] == pytest.approx([0.0, 50.0, 70.0], abs=1.1)  # one polling gap


def test_a_later_end_replaces_the_first_one(program: Program, device: VirtualDevice) -> None:
    program.begin_iteration()
    slot = program.recorder.begin(("F", 0, 0))
    device.work(5.0)
    program.recorder.end(slot)
    device.work(1.0)  # the loss
    program.recorder.end(slot)
    program.end_iteration()
    program.pause()

    assert worked_ms(program.next_times()) == pytest.approx([6.0])


def test_an_instruction_that_never_ended_is_left_out(program: Program, device: VirtualDevice) -> None:
    program.begin_iteration()
    program.recorder.begin(("F", 0, 0))
    device.work(5.0)
    slot = program.recorder.begin(("F", 1, 0))
    device.work(4.0)
    program.recorder.end(slot)
    program.end_iteration()
    program.pause()

    times = program.next_times()
    assert [row[:3] for row in times.instructions] == [("F", 1, 0)]
    assert begins_ms(times) == pytest.approx([5.0])
    assert worked_ms(times) == pytest.approx([4.0])


def test_a_wait_for_data_lasts_until_the_next_begin_or_a_pause(program: Program, device: VirtualDevice) -> None:
    for _ in range(2):
        program.begin_iteration()
        slot = program.recorder.begin(("F", 0, 0))
        device.work(5.0)
        program.recorder.end(slot)
        program.recorder.begin(("D", 0, 0))
        program.end_iteration()
        device.work(3.0)
    program.pause()

    assert worked_ms(program.next_times()) == pytest.approx([5.0, 3.0])
    assert worked_ms(program.next_times()) == pytest.approx([5.0, 0.0])


def test_nothing_is_recorded_and_no_other_thread_calls_the_device_while_a_graph_is_captured(
    program: Program, device: VirtualDevice
) -> None:
    program.launch((0.0, 5.0))
    program.launch((0.0, 5.0))  # the thread of the recorder has something to wait for
    with device.capture():
        program.begin_iteration()
        program.recorder.end(program.recorder.begin(("F", 0, 0)))
        assert program.recorder.order() == ()
        assert program.recorder.end_iteration() is None
    program.launch((0.0, 7.0))
    program.pause()

    assert [worked_ms(program.next_times())[0] for _ in range(3)] == pytest.approx([5.0, 5.0, 7.0])
    assert device.forbidden_calls == []


def test_an_iteration_is_left_out_while_all_events_are_in_use_and_its_order_is_known(device: VirtualDevice) -> None:
    program = Program(device, num_buffers=2)
    first = program.recorder
    first.begin_iteration(None)
    held = first.end_iteration()
    first.begin_iteration(None)
    held_too = first.end_iteration()
    assert held is not None
    assert held_too is not None

    first.begin_iteration(None)
    first.end(first.begin(("F", 0, 0)))
    assert first.order() == (("F", 0, 0),)
    assert first.end_iteration() is None
    held.free()
    first.begin_iteration(None)
    assert first.end_iteration() is not None


def test_instructions_beyond_the_capacity_are_left_out(device: VirtualDevice) -> None:
    recorder = DeviceRecorder(device, 2)
    recorder.begin_iteration(None)

    assert [recorder.begin(("F", m, 0)) for m in range(4)] == [0, 1, -1, -1]
    assert recorder.order() == (("F", 0, 0), ("F", 1, 0))


def test_closing_waits_for_what_the_device_has_not_reached_and_ends_the_thread(program: Program) -> None:
    program.launch((0.0, 40.0))
    program.pause()
    program.recorder.close(WAIT_LIMIT_S)

    assert worked_ms(program.next_times()) == pytest.approx([40.0])
    program.recorder.call_when_reached(CalledRequest(lambda: pytest.fail("called after the end")))


def test_room_for_longer_iterations_is_made_while_earlier_ones_are_read() -> None:
    program = Program(VirtualDevice(), capacity=2)
    program.launch((0.0, 1.0), (0.0, 2.0), (0.0, 3.0))

    program.recorder.reserve(4)
    program.launch((0.0, 1.0), (0.0, 2.0), (0.0, 3.0))
    program.pause()

    counts = [len(program.next_times().instructions) for _ in range(2)]
    program.recorder.close(WAIT_LIMIT_S)
    assert counts == [2, 3]


def test_times_of_short_iterations_are_read_together_and_those_of_long_ones_at_the_next_mark(
    device: VirtualDevice, program: Program
) -> None:
    def unread_after(work_ms: float, num_iterations: int) -> list[int]:
        unread = []
        for _ in range(num_iterations):
            program.launch((0.0, work_ms))
            device.sleep(work_ms / 1000.0)
            unread.append(len(program.recorder._unread))
        return unread

    unread_after(1.0, 20)
    assert max(unread_after(1.0, 20)) == 7
    unread_after(300.0, 10)
    assert max(unread_after(300.0, 20)) <= 1
    program.pause()
    assert program._known.qsize() >= 60
