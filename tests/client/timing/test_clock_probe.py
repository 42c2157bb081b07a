"""The true clock of a GPU, by a compiled double of the driver's library, and what becomes of it in the recorder."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuenergyd.client.timing.clock_probe import PROBE_PTX, ClockProbe, TrueClock
from gpuenergyd.client.timing.cuda_writes import LIBRARY, CudaCallError
from gpuenergyd.client.timing.device_recorder import DeviceRecorder
from tests.support.fake_nvml.library import compiler
from tests.support.virtual_device import VirtualDevice

MS = 1_000_000


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The double, loaded into this process."""
    command = compiler()
    if command is None:
        pytest.skip("no C compiler: the double of the CUDA library cannot be built")
    path = tmp_path_factory.mktemp("cuda") / LIBRARY
    source = Path(__file__).with_name("fake_cuda_probe.c")
    subprocess.run([command, "-shared", "-fPIC", "-o", str(path), str(source)], check=True)
    return ctypes.PyDLL(str(path))


@pytest.fixture
def load(library: Any) -> Callable[[str], Any]:
    """Return the double by the name of the driver's library."""
    library.fake_set(ctypes.c_int64(1980), ctypes.c_int64(0))
    return {LIBRARY: library}.__getitem__


class Clock:
    """The host's clock, which a test moves ahead of the real one."""

    def __init__(self) -> None:
        self.ahead_ns = 0

    def __call__(self) -> int:
        return time.monotonic_ns() + self.ahead_ns


def next_clock(probe: ClockProbe) -> TrueClock:
    """Return the next clock that is counted and seen soon enough to be dated, which may take several on a busy host."""
    for _ in range(10_000):
        probe.probe()
        time.sleep(0.001)  # it counts for 50 us
        if found := probe.pop_clocks():
            return found[-1]
    raise AssertionError("no clock was counted")


def test_a_probe_shows_the_clock_and_when_it_was_counted(load: Callable[[str], Any], library: Any) -> None:
    probe = ClockProbe(load=load)
    before_ns = time.monotonic_ns()

    first = next_clock(probe)
    library.fake_set(ctypes.c_int64(1200), ctypes.c_int64(0))
    second = next_clock(probe)

    assert (first.sm_clock_mhz, second.sm_clock_mhz) == (1980, 1200)
    assert before_ns <= first.early_mono_ns + MS
    assert first.early_mono_ns + 2 * MS < second.early_mono_ns
    assert 0 < second.late_mono_ns - second.early_mono_ns <= 5 * MS + 50_000
    assert probe.pop_clocks() == ()


def test_a_count_that_was_interrupted_shows_no_clock(load: Callable[[str], Any], library: Any) -> None:
    probe = ClockProbe(load=load)
    library.fake_interrupt(ctypes.c_int64(MS))
    probe.probe()
    time.sleep(0.003)
    library.fake_interrupt(ctypes.c_int64(0))

    assert next_clock(probe).sm_clock_mhz == 1980


def test_probes_do_not_follow_one_another_within_two_milliseconds(load: Callable[[str], Any], library: Any) -> None:
    probe, before = ClockProbe(load=load, mono_ns=lambda: 10**9), ctypes.c_int.in_dll(library, "num_launches").value

    for _ in range(5):
        probe.probe()

    assert ctypes.c_int.in_dll(library, "num_launches").value == before + 1


def test_a_gpu_that_runs_no_probe_gets_no_more_than_there_is_room_for(load: Callable[[str], Any], library: Any) -> None:
    clock = Clock()
    probe, before = ClockProbe(load=load, mono_ns=clock), ctypes.c_int.in_dll(library, "num_launches").value
    library.fake_set(ctypes.c_int64(1980), ctypes.c_int64(1))

    for _ in range(100):
        clock.ahead_ns += 3 * MS
        probe.probe()

    assert ctypes.c_int.in_dll(library, "num_launches").value == before + 32
    assert probe.pop_clocks() == ()


@pytest.mark.parametrize(
    "function", ["cuCtxGetCurrent", "cuMemHostRegister", "cuModuleLoadData", "cuStreamCreate", "cuLaunchKernel"]
)
def test_a_function_that_fails_is_one_error(
    load: Callable[[str], Any], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", function)

    with pytest.raises(CudaCallError, match=rf"^{function}: error 999$"):
        ClockProbe(load=load).probe()


def test_without_a_context_none_is_made(
    load: Callable[[str], Any], library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_CONTEXT", "none")

    with pytest.raises(CudaCallError, match="no CUDA context is current"):
        ClockProbe(load=load)

    assert ctypes.c_int.in_dll(library, "num_contexts_made").value == 0


class ProbedDevice(VirtualDevice):
    """A device with a probe that the test opens."""

    def __init__(self, open_probe: Callable[[], ClockProbe | None]) -> None:
        super().__init__()
        self.open_clock_probe = open_probe


def recorded(device: VirtualDevice, *, num_iterations: int = 3, has_plan: bool = True) -> DeviceRecorder:
    """Return a recorder that has marked iterations of four instructions."""
    recorder = DeviceRecorder(device, 16, sleep=device.sleep)
    if has_plan:
        recorder.prepare_requests()
    previous = None
    for _ in range(num_iterations):
        recorder.begin_iteration(previous)
        for k in range(4):
            slot = recorder.begin(("F", k, 0))
            device.work(1.0)
            recorder.end(slot)
            time.sleep(0.0021)
        previous = recorder.end_iteration()
        assert previous is not None
    return recorder


def test_a_rank_with_a_plan_has_its_clock_counted_at_the_begin_of_instructions(load: Callable[[str], Any]) -> None:
    device = ProbedDevice(lambda: ClockProbe(load=load))

    assert {clock.sm_clock_mhz for clock in recorded(device).pop_true_clocks()} == {1980}
    assert recorded(device, has_plan=False).pop_true_clocks() == ()
    assert recorded(ProbedDevice(lambda: None)).pop_true_clocks() == ()


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuLaunchKernel"])
def test_a_probe_that_fails_is_tried_once_and_never_reaches_the_program(
    load: Callable[[str], Any], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", function)
    opened = []

    def open_probe() -> ClockProbe:
        opened.append(function)
        return ClockProbe(load=load)

    assert recorded(ProbedDevice(open_probe)).pop_true_clocks() == ()
    assert opened == [function]


def test_the_kernel_assembles(tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    source = tmp_path / "probe.ptx"
    source.write_bytes(PROBE_PTX)

    subprocess.run([ptxas, "-arch=sm_90", str(source), "-o", str(tmp_path / "probe.cubin")], check=True)
