"""The load that a calibration needs: this process computes on a GPU, since an idle one does not show the clocks set."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from gpuenergyd.gpu.drivers.simulated import SimulatedHost


class GpuLoad(Protocol):
    """Keeps GPUs busy."""

    def on(self, gpu_uuid: str) -> AbstractContextManager[None]:
        """Compute on a GPU inside the context.

        Raises:
            GpuError: the GPU cannot be used; `DriverError` also at the end of the context, if computing failed.
        """
        ...


class SimulatedLoad:
    """A process attached to simulated GPUs, which show their clocks then."""

    def __init__(self, world_path: Path) -> None:
        self._host = SimulatedHost.open(world_path)

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[None]:
        """Attach this process inside the context."""
        self._host.attach_process(gpu_uuid, os.getpid())
        try:
            yield
        finally:
            self._host.detach_process(gpu_uuid, os.getpid())


def open_load(driver: str, world_path: str | None) -> GpuLoad:
    """Return the load for the daemon's GPUs; `world_path` is the file of simulated ones.

    Raises:
        DriverError: CUDA, or the file, cannot be opened.
    """
    if driver == "simulated" and world_path is not None:
        return SimulatedLoad(Path(world_path))
    from gpuenergyd.cli.calibrate.cuda_load import CudaLoad  # noqa: PLC0415  only for real GPUs

    return CudaLoad()
