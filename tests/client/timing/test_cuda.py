"""The CUDA device of the recorder, on a double of torch: events, anchors, and captures of graphs."""

import inspect
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
from tests.support.waiting import LIMIT_S

WAIT_LIMIT_S = LIMIT_S


class _Event:
    """The methods of torch.cuda.Event that the recorder uses; a stream without work completes it at once."""

    calls: ClassVar[list[tuple[str, bool]]] = []
    num_made = 0

    def __init__(self, *, enable_timing: bool, external: bool = False) -> None:
        assert enable_timing
        type(self).num_made += 1
        self.is_external = external
        self.at_s: float | None = None

    def record(self, stream: object) -> None:
        """Complete the event now."""
        self._log(f"record on {stream}")
        self.at_s = time.monotonic()

    def query(self) -> bool:
        self._log("query")
        return True if self.is_external else self.at_s is not None

    def synchronize(self) -> None:
        """Do nothing: the event has completed."""
        self._log("synchronize")

    def elapsed_time(self, other: "_Event") -> float:
        """Return the milliseconds to another event."""
        self._log("elapsed_time")
        assert self.at_s is not None
        if other.at_s is None:
            raise RuntimeError("CUDA error: invalid resource handle")
        return (other.at_s - self.at_s) * 1000.0

    @classmethod
    def _log(cls, call: str) -> None:
        cls.calls.append((call, threading.current_thread() is threading.main_thread()))


class _Graph:
    """The methods of torch.cuda.CUDAGraph: two between which work is captured, and its replay."""

    is_capturing = False

    def capture_begin(self, *, fails: bool = False) -> None:
        if fails:
            raise RuntimeError("no memory pool")
        type(self).is_capturing = True

    def capture_end(self) -> None:
        type(self).is_capturing = False

    def replay(self, suffix: str = "") -> str:
        """Replay what was captured; a later torch may take arguments here."""
        return f"replayed{suffix}"


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    graph: Any = type(
        "CUDAGraph", (_Graph,), {name: vars(_Graph)[name] for name in ("capture_begin", "capture_end", "replay")}
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


@pytest.mark.parametrize("index", [0, None])
def test_an_event_is_recorded_on_the_stream_that_is_current_then(torch: Any, index: int | None) -> None:
    current, made = "first", list[str]()

    def make_object(_device: object) -> str:
        made.append(current)
        return current

    torch._C = SimpleNamespace(_cuda_getCurrentStream=lambda index: (current, index, 1))
    torch.device = lambda name: SimpleNamespace(name=name, index=index)
    torch.cuda.current_stream = make_object
    device = CudaDevice(torch, "cuda:0")
    for current in ("first", "first", "side", "side", "first"):  # noqa: B007  the lambdas return it
        device.record(device.make_event())

    recorded = [call for call, _ in torch.cuda.Event.calls]
    assert recorded == [f"record on {stream}" for stream in ("first", "first", "side", "side", "first")]
    assert len(made) == (5 if index is None else 3)


def run_iteration(recorder: DeviceRecorder, previous: Any, known: list[Any]) -> Any:
    """Run an iteration of one instruction; have the one before reported."""
    recorder.begin_iteration(previous)
    if previous is not None:

        def keep() -> None:
            known.append(previous.times())
            previous.free()

        recorder.call_when_known(previous, keep)
    recorder.end(recorder.begin(("F", 0, 0)))
    recorded = recorder.end_iteration()
    assert recorded is not None
    return recorded


def test_steps_are_timed_without_another_thread_and_wait_for_the_device_once_a_second_at_most(torch: Any) -> None:
    recorder, known = DeviceRecorder(CudaDevice(torch, "cuda:0"), 4), list[Any]()
    recorded = run_iteration(recorder, None, known)
    recorded = run_iteration(recorder, recorded, known)
    of_first = [call for call, _ in torch.cuda.Event.calls]
    for _ in range(12):  # their times are read together
        recorded = run_iteration(recorder, recorded, known)
    num_events = torch.cuda.Event.num_made
    for _ in range(8):
        recorded = run_iteration(recorder, recorded, known)
    recorder.close(WAIT_LIMIT_S)

    later = [call for call, _ in torch.cuda.Event.calls[len(of_first) :]]
    assert of_first.count("synchronize") == 1
    assert "synchronize" not in later
    assert all(is_main for _, is_main in torch.cuda.Event.calls)
    assert torch.cuda.Event.num_made == num_events  # they are used again
    assert [len(times.instructions) for times in known] == [1] * 21


def test_a_late_reading_waits_until_the_program_has_captured_its_graph(torch: Any) -> None:
    recorder, known = DeviceRecorder(CudaDevice(torch, "cuda:0"), 4), list[Any]()
    recorded = run_iteration(recorder, None, known)
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    recorder.begin_iteration(recorded)
    recorder.call_when_known(recorded, lambda: known.append(recorded.times()))
    num_calls = len(torch.cuda.Event.calls)
    late = threading.Thread(target=recorder.read_late)
    late.start()
    late.join(0.05)

    assert late.is_alive()
    assert len(torch.cuda.Event.calls) == num_calls
    graph.capture_end()
    late.join(WAIT_LIMIT_S)
    assert len(known) == 1
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


def test_events_of_a_graph_are_external_and_have_no_time_before_a_replay_reaches_them(torch: Any) -> None:
    device = CudaDevice(torch, "cuda:0")
    first, node = device.make_event(), device.make_node_event()
    device.record(first)

    assert node is not None
    assert node.is_external
    assert not first.is_external
    assert device.node_ms(first, node) is None
    device.record(node)
    after_ms = device.node_ms(first, node)
    assert after_ms is not None
    assert after_ms >= 0.0


def test_a_version_of_torch_without_external_events_has_no_events_of_a_graph(torch: Any) -> None:
    torch.cuda.Event = lambda *, enable_timing: _Event(enable_timing=enable_timing)

    assert CudaDevice(torch, "cuda:0").make_node_event() is None


def test_replays_are_announced_and_their_results_returned(torch: Any) -> None:
    device, graph = CudaDevice(torch, "cuda:0"), torch.cuda.CUDAGraph()
    followed: list[Any] = []

    def follow(replay: Any) -> Any:
        followed.append(graph)
        return replay()

    device.graphs.follow(graph, follow)
    assert graph.replay() == "replayed"
    assert torch.cuda.CUDAGraph().replay(suffix=" twice") == "replayed twice"
    assert followed == [graph]


def test_the_graph_that_is_captured_is_known_to_its_thread_and_its_follower_ends_with_the_next_capture(
    torch: Any,
) -> None:
    device, graph = CudaDevice(torch, "cuda:0"), torch.cuda.CUDAGraph()
    graph.capture_begin()
    assert device.graphs.being_captured == graph
    device.graphs.follow(graph, lambda replay: replay(), until_next_capture=True)
    graph.capture_end()

    assert device.graphs.being_captured is None
    assert device.graphs.is_followed(graph)
    graph.capture_begin()
    assert not device.graphs.is_followed(graph)
    graph.capture_end()


@pytest.mark.parametrize(
    ("owner", "method", "parameters"),
    [
        ("Event", "__new__", {"enable_timing", "external"}),
        ("Event", "record", {"stream"}),
        ("Event", "query", set()),
        ("Event", "elapsed_time", {"end_event"}),
        ("CUDAGraph", "capture_begin", set()),
        ("CUDAGraph", "capture_end", set()),
        ("CUDAGraph", "replay", set()),
    ],
)
def test_torch_has_the_methods_that_are_used(owner: str, method: str, parameters: set[str]) -> None:
    real = pytest.importorskip("torch", reason="torch is not installed")

    assert parameters <= set(inspect.signature(getattr(getattr(real.cuda, owner), method)).parameters)


def test_times_of_a_real_captured_graph() -> None:
    real = pytest.importorskip("torch", reason="torch is not installed")
    if not real.cuda.is_available():
        pytest.skip("no CUDA device")
    device = CudaDevice(real, "cuda:0")
    recorder, known = DeviceRecorder(device, 4), threading.Event()
    matrix, graph = real.randn(2048, 2048, device="cuda"), real.cuda.CUDAGraph()
    real.mm(matrix, matrix)
    with real.cuda.graph(graph):
        assert recorder.begin_capture()
        slot = recorder.begin(("F", 0, 0))
        for _ in range(50):
            matrix = matrix @ matrix
        recorder.end(slot)
        captured = recorder.end_capture()
    assert captured is not None
    assert captured.is_complete
    recorder.begin_iteration(None)
    recorder.replay(captured)
    graph.replay()
    recorded = recorder.end_iteration()
    assert recorded is not None
    recorder.call_when_known(recorded, known.set)

    assert known.wait(WAIT_LIMIT_S)
    recorder.close(WAIT_LIMIT_S)
    times = recorded.times()
    ((*_, begin_ns, end_ns),) = times.instructions
    assert times.begin_mono_ns <= begin_ns < end_ns <= times.end_mono_ns
    assert end_ns - begin_ns > 0.5 * (times.end_mono_ns - times.begin_mono_ns)
