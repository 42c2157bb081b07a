"""A daemon whose driver library is a fake one, which zeus's own package loads, too."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from gpuenergyd_sim.driver.host import SimulatedHost
from tests.gpu.conftest import fake_nvml_library
from tests.support.daemon_process import DaemonProcess
from tests.support.fake_nvml.control import FakeNvmlControl

__all__ = ["fake_nvml_library"]


@contextmanager
def nvml_daemon(folder: Path, library: Path, *, num_gpus: int, limit_w: float | None = None) -> Iterator[DaemonProcess]:
    """Run a daemon with the NVML driver, whose GPUs the site may have limited to less than their default power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_LIBRARY_PATH", str(library))
        patch.setenv("GPUENERGYD_FAKE_NVML_WORLD", str(folder / "world"))
        made = DaemonProcess(folder, num_gpus=num_gpus, overrides={"driver": "nvml", "mode": "control"})
        with FakeNvmlControl(made.world_path) as control:
            control.set_privileged(True)
            with closing(SimulatedHost.open(made.world_path)) as host:
                if limit_w is not None:
                    for gpu in host.identities():
                        host.set_power_limit(gpu.gpu_uuid, limit_w)
            made.start()
            yield made
            made.stop()


def environment_of_zeus(daemon: DaemonProcess, library: Path) -> dict[str, str]:
    """Return the variables with which the package reaches the GPUs through the daemon's socket."""
    return {
        "PATH": f"{library / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": str(library),
        "GPUENERGYD_FAKE_NVML_WORLD": str(daemon.world_path),
        "ZEUSD_SOCK_PATH": str(daemon.socket_path),
    }


def limits_w(daemon: DaemonProcess) -> list[float]:
    with closing(SimulatedHost.open(daemon.world_path)) as host:
        return [host.power_limit_w(gpu.gpu_uuid) for gpu in host.identities()]
