"""The CUDA device of the recorder, on a double of torch: events, anchors, and captures of graphs."""

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from gpuenergyd.client.timing import cuda
from gpuenergyd.client.timing.captured_graphs import CapturedGraphs
from gpuenergyd.client.timing.cuda import CudaDevice, loaded_cuda_device
from gpuenergyd.client.timing.device_recorder import DeviceRecorder

WAIT_LIMIT_S = 30.0


class _Event:
    """The methods of torch.cuda.Event that the recorder uses; a stream without work completes it at once."""

    calls: ClassVar[list[tuple[str, bool]]] = []

    def __init__(self, *, enable_timing: bool, external: bool = False) -> None:
        assert enable_timing
        self.is_external = external
        self.at_s: float | None = None

    def record(self, stream: object) -> None:
        """Complete the event now."""
        self._log(f"record on {stream}")
        self.at_s = time.monotonic()

    def query(self) -> bool:
        """Return whether the event has completed."""
        self._log("query")
        return self.at_s is not None

    def synchronize(self) -> None:
        """Do nothing: the event has completed."""
        self._log("synchronize")

    def elapsed_time(self, other: "_Event") -> float:
        """Return the milliseconds to another event."""
        self._log("elapsed_time")
        assert self.at_s is not None
        assert other.at_s is not None
        return (other.at_s - self.at_s) * 1000.0

    @classmethod
    def _log(cls, call: str) -> None:
        cls.calls.append((call, threading.current_thread() is threading.main_thread()))


class _Graph:
    """The methods of torch.cuda.CUDAGraph: two between which work is captured, and its replay."""

    is_capturing = False

    def capture_begin(self, *, fails: bool = False) -> None:
        """Begin a capture."""
        if fails:
            raise RuntimeError("no memory pool")
        type(self).is_capturing = True

    def capture_end(self) -> None:
        """End a capture."""
        type(self).is_capturing = False

    def replay(self) -> str:
        """Replay what was captured."""
        return "replayed"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    graph: Any = type(
        "CUDAGraph",
        (_Graph,),
        {name: vars(_Graph)[name] for name in ("capture_begin", "capture_end", "replay")},
    )
    event = type("Event", (_Event,), {"calls": []})
    monkeypatch.setattr(cuda, "captured_graphs", CapturedGraphs())
    return SimpleNamespace(
        device=lambda *parts: parts,
        cuda=SimpleNamespace(
            Event=event,
            CUDAGraph=graph,
            Stream=lambda _device: "side stream",
            current_stream=lambda _device: "current stream",
            current_device=lambda: 0,
            is_initialized=lambda: True,
            is_current_stream_capturing=lambda: graph.is_capturing,
        ),
    )


def test_an_anchor_is_an_event_on_a_side_stream_between_two_instants_of_the_host(torch: Any) -> None:
    before_ns = time.monotonic_ns()
    anchor = CudaDevice(torch, "cuda:0").make_anchor()

    assert before_ns <= anchor.mono_ns <= time.monotonic_ns()
    assert anchor.bracket_ns >= 0
    assert torch.cuda.Event.calls[0][0] == "record on side stream"


def test_a_step_never_synchronizes_the_device_on_the_training_thread(torch: Any) -> None:
    recorder = DeviceRecorder(CudaDevice(torch, "cuda:0"), 4)
    known = threading.Event()
    recorder.begin_iteration(None)
    recorder.end(recorder.begin(("F", 0, 0)))
    recorded = recorder.end_iteration()
    assert recorded is not None
    recorder.begin_iteration(recorded)
    recorder.call_when_known(recorded, known.set)

    assert known.wait(WAIT_LIMIT_S)
    recorder.close(WAIT_LIMIT_S)
    of_training = {call for call, is_main in torch.cuda.Event.calls if is_main}
    assert of_training == {"record on current stream"}
    assert len(recorded.times().instructions) == 1


def test_no_thread_calls_cuda_while_the_program_captures_a_graph(torch: Any) -> None:
    recorder = DeviceRecorder(CudaDevice(torch, "cuda:0"), 4)
    reached = threading.Event()
    graph = torch.cuda.CUDAGraph()
    recorder.begin_iteration(None)
    recorded = recorder.end_iteration()
    assert recorded is not None
    graph.capture_begin()
    recorder.begin_iteration(recorded)
    recorder.call_when_known(recorded, reached.set)
    num_calls = len(torch.cuda.Event.calls)

    assert not reached.wait(0.05)
    assert len(torch.cuda.Event.calls) == num_calls
    graph.capture_end()
    assert reached.wait(WAIT_LIMIT_S)
    recorder.close(WAIT_LIMIT_S)


def test_a_capture_that_fails_to_begin_blocks_no_calls(torch: Any) -> None:
    device = CudaDevice(torch, "cuda:0")
    with pytest.raises(RuntimeError, match="no memory pool"):
        torch.cuda.CUDAGraph().capture_begin(fails=True)

    with device.calls():
        pass


def test_captures_are_announced_once_however_many_devices_are_opened(torch: Any) -> None:
    for _ in range(3):
        CudaDevice(torch, "cuda:0")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    graph.capture_end()

    assert not cuda.captured_graphs.gate.is_capturing


def test_without_torch_or_a_device_in_use_there_is_no_cuda_device(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert loaded_cuda_device() is None
    torch.cuda.is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert loaded_cuda_device() is None
    torch.cuda.is_initialized = lambda: True
    assert isinstance(loaded_cuda_device(), CudaDevice)
