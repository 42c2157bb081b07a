import ctypes
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pynvml
import pytest

from gpuenergyd.gpu.drivers.nvml import NvmlHost
from gpuenergyd_sim.driver.host import SimulatedHost
from gpuenergyd_sim.driver.world_kinds import WorldKind
from tests.support.daemon_process import DaemonProcess
from tests.support.fake_nvml.control import FakeNvmlControl
from tests.support.fake_nvml.library import build_library, compiler
from tests.support.virtual_time import VirtualTime
from tests.support.worker_site import Site, simulated_site


@pytest.fixture
def gpu_models() -> tuple[str, ...]:
    """The models of the GPUs where the usual ones do not do: a test module overrides it."""
    return ()


@pytest.fixture
def virtual_time() -> VirtualTime:
    """A clock that only the test advances."""
    return VirtualTime()


@pytest.fixture
def host(tmp_path: Path, virtual_time: VirtualTime, gpu_models: tuple[str, ...]) -> Iterator[SimulatedHost]:
    """Two simulated A100s in virtual time, held by this process."""
    models = gpu_models or ("a100-sxm", "a100-sxm")
    made = SimulatedHost.create(
        tmp_path / "world", models, seed=7, mono_ns=virtual_time.mono_ns, sleep=virtual_time.sleep
    )
    for identity in made.identities():
        made.attach_process(identity.gpu_uuid, os.getpid())
    yield made
    made.close()


@pytest.fixture
def real_time_host(tmp_path: Path) -> Iterator[SimulatedHost]:
    """Two simulated A100s in real time, idle."""
    made = SimulatedHost.create(tmp_path / "real-time-world", ["a100-sxm", "a100-sxm"], seed=5)
    yield made
    made.close()


@dataclass(frozen=True, slots=True)
class NvmlWorld:
    """Simulated GPUs that this process also opens through NVML."""

    simulated: SimulatedHost
    control: FakeNvmlControl
    library_folder: Path

    @property
    def gpus(self) -> list[str]:
        """The GPUs' UUIDs in order of their index."""
        return [i.gpu_uuid for i in self.simulated.identities()]

    def environment(self) -> dict[str, str]:
        """Environment variables with which another process opens the same world through NVML."""
        return {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.library_folder),
            "GPUENERGYD_FAKE_NVML_WORLD": str(self.simulated.path),
        }


@pytest.fixture(scope="session")
def fake_nvml_library() -> Path:
    """The folder with the fake driver library, compiled once."""
    if compiler() is None:
        pytest.skip("no C compiler: the fake driver library cannot be built")
    return build_library()


@pytest.fixture
def nvml_world(
    tmp_path: Path, fake_nvml_library: Path, monkeypatch: pytest.MonkeyPatch, gpu_models: tuple[str, ...]
) -> Iterator[NvmlWorld]:
    """Three simulated GPUs behind the unmodified NVML binding, in real time."""
    models = gpu_models or ("a100-sxm", "a40", "v100-sxm2")
    simulated = SimulatedHost.create(tmp_path / "nvml-world", models, seed=4)
    with FakeNvmlControl(simulated.path) as control:
        control.set_privileged(True)
        monkeypatch.setenv("GPUENERGYD_FAKE_NVML_WORLD", str(simulated.path))
        # Each copy of the library has its own state, so one left open by an earlier test keeps its own world.
        library = shutil.copy(fake_nvml_library / "libnvidia-ml.so.1", tmp_path / "own-libnvidia-ml.so.1")
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(library)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        yield NvmlWorld(simulated, control, fake_nvml_library)
        control.clear_faults()
    simulated.close()


@pytest.fixture
def nvml_host(nvml_world: NvmlWorld) -> Iterator[NvmlHost]:
    """The GPUs of that world through NVML."""
    del nvml_world
    made = NvmlHost()
    yield made
    made.close()


@pytest.fixture
def daemon(tmp_path: Path, fake_nvml_library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DaemonProcess]:
    """A daemon with the NVML driver, not started."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fake_nvml_library))
    monkeypatch.setenv("GPUENERGYD_FAKE_NVML_WORLD", str(tmp_path / "world"))
    made = DaemonProcess(tmp_path, overrides={"driver": "nvml", "mode": "control"}, kind=WorldKind.KIND)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.stop()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two simulated A100s held by this process; workers are ended afterwards."""
    with simulated_site(tmp_path, 2) as made:
        yield made
