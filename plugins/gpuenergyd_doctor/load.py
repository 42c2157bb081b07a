"""The loads that calibrations and `doctor --measure` need, as an idle GPU does not show the clock that is set."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from gpuenergyd.gpu.device import AttachesProcesses
from gpuenergyd.gpu.drivers.opening import DRIVERS, open_driver


class GpuLoad(Protocol):
    """Keeps GPUs busy."""

    def on(self, gpu_uuid: str) -> AbstractContextManager[Mapping[str, float] | None]:
        """Compute on a GPU inside the context; it yields what the load measured itself, by names of `MeasuredGpu`.

        Raises:
            GpuError: the GPU cannot be used. `DriverError` also at the end of the context, if computing failed.
        """
        ...


class AttachedLoad:
    """Attaches this process to simulated GPUs, so that they show their clocks as busy GPUs do."""

    def __init__(self, host: AttachesProcesses) -> None:
        self._host = host

    @contextmanager
    def on(self, gpu_uuid: str) -> Iterator[None]:
        """Attach this process to a GPU inside the context."""
        self._host.attach_process(gpu_uuid, os.getpid())
        try:
            yield
        finally:
            self._host.detach_process(gpu_uuid, os.getpid())


def open_load(driver: str, world_path: str | None) -> GpuLoad:
    """Return the load for the daemon's GPUs; `world_path` is the file that describes them to a driver without NVML.

    Raises:
        DriverError: CUDA or the driver cannot be opened.
    """
    if driver not in DRIVERS:
        host = open_driver(driver, None if world_path is None else Path(world_path))
        if isinstance(host, AttachesProcesses):
            return AttachedLoad(host)
    from gpuenergyd_doctor.cuda_load import CudaLoad  # noqa: PLC0415  only for real GPUs

    return CudaLoad()
