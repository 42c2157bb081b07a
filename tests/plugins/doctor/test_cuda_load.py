"""The load on a real GPU, by the calls that it makes to the CUDA driver library."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpuenergyd.errors import DriverError, GpuNotFoundError
from gpuenergyd_doctor import load
from gpuenergyd_doctor.load import SPIN_PTX, CudaLoad
from tests.support.fake_nvml.library import compiler
from tests.support.processes import finished

SECOND_GPU = "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the calls to the fake library, which is in use."""
    command = compiler()
    if command is None:
        pytest.skip("no C compiler: the fake driver library cannot be built")
    library, log = tmp_path / "libcuda.so.1", tmp_path / "calls"
    source = Path(__file__).with_name("fake_cuda.c")
    subprocess.run([command, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(load, "_LIBRARY", str(library))
    monkeypatch.setenv("FAKE_CUDA_LOG", str(log))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    return log


def test_a_gpu_computes_inside_the_context_and_is_released_after_it(calls: Path) -> None:
    load = CudaLoad()

    with load.on(SECOND_GPU):
        inside = calls.read_text().split()

    assert inside == ["cuInit", "retain", "cuModuleLoadData", "cuLaunchKernel"]
    assert calls.read_text().split() == [*inside, "release"]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ  # it would hide the second GPU


def test_a_gpu_that_cuda_does_not_list_is_an_error(calls: Path) -> None:
    del calls
    with pytest.raises(GpuNotFoundError, match="CUDA has no GPU GPU-none among its 2"), CudaLoad().on("GPU-none"):
        pass


@pytest.mark.parametrize("function", ["cuModuleLoadData", "cuLaunchKernel"])
def test_a_failure_of_cuda_is_one_error_and_leaves_no_context(
    calls: Path, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", function)

    with pytest.raises(DriverError, match=f"CUDA: {function} failed: CUDA_ERROR_UNKNOWN"), CudaLoad().on(SECOND_GPU):
        pass

    assert calls.read_text().split()[-1] == "release"


def test_a_host_without_cuda_is_an_error_before_anything_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "_LIBRARY", "libcuda-absent.so.1")

    with pytest.raises(DriverError, match=r"cannot load libcuda-absent\.so\.1, which keeps a GPU busy"):
        CudaLoad()


def test_the_kernel_assembles(tmp_path: Path) -> None:
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        pytest.skip("no ptxas")
    source = tmp_path / "spin.ptx"
    source.write_bytes(SPIN_PTX)

    done = finished([ptxas, "-v", "-arch=sm_90", str(source), "-o", str(tmp_path / "spin.cubin")])

    assert done.returncode == 0, done.stderr
    assert re.search(r"Used \d+ registers", done.stderr)
