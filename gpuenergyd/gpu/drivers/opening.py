"""Opening the driver that a worker or a restore is told to use, importing nothing else."""

import importlib
from pathlib import Path

from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.device import GpuController

DRIVERS = ("simulated", "nvml")


def preload(driver: str) -> None:
    """Import what a driver needs, so that opening it later takes no longer than the driver itself.

    Raises:
        UsageError: no such driver.
    """
    if driver not in DRIVERS:
        raise UsageError(f"no driver {driver!r}; there are: {', '.join(DRIVERS)}")
    importlib.import_module(f"gpuenergyd.gpu.drivers.{driver}")


def open_driver(driver: str, world_path: Path | None) -> GpuController:
    """Return the GPUs behind a driver name.

    Raises:
        UsageError: no such driver, or the simulated one without a world.
        DriverError: the driver cannot be opened.
    """
    match driver:
        case "simulated":
            from gpuenergyd.gpu.drivers.simulated import SimulatedHost  # noqa: PLC0415 - only what is used starts in time

            if world_path is None:
                raise UsageError("the simulated driver needs the file its GPUs live in: --world PATH")
            return SimulatedHost(world_path)
        case "nvml":
            from gpuenergyd.gpu.drivers.nvml import NvmlHost  # noqa: PLC0415 - the binding may be absent

            return NvmlHost()
        case _:
            raise UsageError(f"no driver {driver!r}; there are: {', '.join(DRIVERS)}")
