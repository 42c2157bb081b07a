"""Instruction times from CUDA events, tested on fake events without a GPU."""

import queue
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from gpuenergyd_trainers.timing import cuda_events as cuda_timing  # noqa: E402  after the skip
from gpuenergyd_trainers.timing.cuda_events import CudaRecorder  # noqa: E402

NS_PER_MS = 1_000_000


class FakeGpu:
    """A device whose stream completes events up to `run_until_ms`; `sleep` advances the host's clock."""

    def __init__(self) -> None:
        self.launched_ms = 0.0
        self.run_until_ms = 0.0
        self.host_ns = 1_000 * NS_PER_MS
        self.gpu_zero_host_ns = self.host_ns
        self.num_synchronized = 0
        self.is_capturing = False

    def work(self, time_ms: float) -> None:
        """Launch work that takes this long on the GPU."""
        self.launched_ms += time_ms

    def sleep(self, time_s: float) -> None:
        """Advance the time of the host and of the GPU."""
        self.host_ns += round(time_s * 1e9)
        self.run_until_ms = (self.host_ns - self.gpu_zero_host_ns) / NS_PER_MS


class FakeEvent:
    """The methods of torch.cuda.Event that the recorder uses."""

    gpu: FakeGpu

    def __init__(self) -> None:
        self.at_ms = -1.0

    def record(self, _stream: object) -> None:
        """Record the event after all launched work."""
        self.at_ms = self.gpu.launched_ms

    def query(self) -> bool:
        """Return whether the GPU has completed the event."""
        return self.at_ms <= self.gpu.run_until_ms

    def synchronize(self) -> None:
        """Count a synchronisation, which no step may do."""
        self.gpu.num_synchronized += 1

    def elapsed_time(self, other: "FakeEvent") -> float:
        """Return the milliseconds between two completed events."""
        assert self.query()
        assert other.query()
        return other.at_ms - self.at_ms


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    monkeypatch.setattr(FakeEvent, "gpu", fake, raising=False)
    monkeypatch.setattr(cuda_timing, "_timing_event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setattr("time.monotonic_ns", lambda: fake.host_ns)
    monkeypatch.setattr("time.sleep", fake.sleep)
    return fake


def run_instruction(recorder: CudaRecorder, gpu: FakeGpu, key: tuple[str, int, int], time_ms: float) -> None:
    slot = recorder.begin(key)
    gpu.work(time_ms)
    recorder.end(slot)


def rows_of(recorded: Any) -> Any:
    assert recorded is not None
    return recorded.rows()


def test_gpu_durations_are_placed_on_the_hosts_clock(gpu: FakeGpu) -> None:
    recorder = CudaRecorder("cuda:0", 8)
    run_instruction(recorder, gpu, ("F", 0, 0), 5.0)
    gpu.work(2.0)  # a wait for the neighbour
    run_instruction(recorder, gpu, ("B", 0, 0), 9.0)
    rows = rows_of(recorder.finish_iteration())

    assert [row[:3] for row in rows] == [("F", 0, 0), ("B", 0, 0)]
    assert [(end - begin) / NS_PER_MS for *_, begin, end in rows] == pytest.approx([5.0, 9.0])
    begins_ms = [(row[3] - gpu.gpu_zero_host_ns) / NS_PER_MS for row in rows]
    assert begins_ms == pytest.approx([0.0, 7.0], abs=0.25)  # one polling gap


def test_only_construction_synchronises_the_device(gpu: FakeGpu) -> None:
    recorder = CudaRecorder("cuda:0", 8)
    assert gpu.num_synchronized == 1
    run_instruction(recorder, gpu, ("F", 0, 0), 5.0)
    rows_of(recorder.finish_iteration())

    assert gpu.num_synchronized == 1


def test_an_unfinished_iteration_is_read_later(gpu: FakeGpu) -> None:
    recorder = CudaRecorder("cuda:0", 8)
    run_instruction(recorder, gpu, ("F", 0, 0), 400.0)
    recorded = recorder.finish_iteration()

    assert rows_of(recorded) is None
    gpu.sleep(1.0)
    assert len(rows_of(recorded)) == 1


def test_an_iteration_complete_before_the_first_poll_is_placed_by_an_earlier_one(gpu: FakeGpu) -> None:
    recorder = CudaRecorder("cuda:0", 8)
    run_instruction(recorder, gpu, ("F", 0, 0), 3.0)
    rows_of(recorder.finish_iteration())
    run_instruction(recorder, gpu, ("F", 1, 0), 4.0)
    recorded = recorder.finish_iteration()
    gpu.sleep(0.5)
    ((*_, begin, end),) = rows_of(recorded)

    assert (begin - gpu.gpu_zero_host_ns) / NS_PER_MS == pytest.approx(3.0, abs=0.25)
    assert (end - begin) / NS_PER_MS == pytest.approx(4.0)


def test_a_later_end_replaces_the_first_one(gpu: FakeGpu) -> None:
    recorder = CudaRecorder("cuda:0", 8)
    slot = recorder.begin(("F", 0, 0))
    gpu.work(5.0)
    recorder.end(slot)
    gpu.work(1.0)  # the loss
    recorder.end(slot)
    ((*_, begin, end),) = rows_of(recorder.finish_iteration())

    assert (end - begin) / NS_PER_MS == pytest.approx(6.0)


def test_nothing_is_recorded_during_graph_capture(gpu: FakeGpu) -> None:
    recorder = CudaRecorder("cuda:0", 8)
    gpu.is_capturing = True
    run_instruction(recorder, gpu, ("F", 0, 0), 5.0)

    assert recorder.order() == ()


def test_event_buffers_are_reused_and_never_overrun(gpu: FakeGpu) -> None:
    recorder = CudaRecorder("cuda:0", 1, num_buffers=2)
    for microbatch in range(2):
        run_instruction(recorder, gpu, ("F", microbatch, 0), 1.0)
    assert recorder.order() == (("F", 0, 0),)
    first = recorder.finish_iteration()
    assert recorder.finish_iteration() is None
    assert first is not None
    first.free()

    assert recorder.finish_iteration() is not None


def test_a_clock_is_requested_when_the_gpu_reaches_the_instruction(gpu: FakeGpu) -> None:
    recorder = CudaRecorder("cuda:0", 4)
    asked_at_ms: queue.Queue[float] = queue.Queue()
    run_instruction(recorder, gpu, ("F", 0, 0), 50.0)
    slot = recorder.begin(("F", 1, 0))
    recorder.call_at_begin(slot, lambda: asked_at_ms.put(gpu.run_until_ms))

    assert 50.0 <= asked_at_ms.get(timeout=20.0) <= 51.1  # launched at 0 ms; one polling gap
    recorder.close()
