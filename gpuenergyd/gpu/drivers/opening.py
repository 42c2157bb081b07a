"""Selection of a GPU driver by name; imports only the driver that is used."""

import importlib
from pathlib import Path

from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.device import GpuController

DRIVERS = ("simulated", "nvml", "command")


def preload(driver: str) -> None:
    """Import the modules of a driver, so that opening it later is fast.

    Raises:
        UsageError: unknown driver.
    """
    if driver not in DRIVERS:
        raise UsageError(f"unknown driver {driver!r}; available: {', '.join(DRIVERS)}")
    importlib.import_module(f"gpuenergyd.gpu.drivers.{driver}")


def open_driver(driver: str, world_path: Path | None) -> GpuController:
    """Open a driver by its name; `world_path` is the world file of simulated GPUs, or the commands file.

    Raises:
        UsageError: unknown driver, or no such file is named.
        DriverError: the driver cannot be opened.
    """
    match driver:
        case "simulated":
            from gpuenergyd.gpu.drivers.simulated import SimulatedHost  # noqa: PLC0415 - imports only the driver in use, for a fast start

            if world_path is None:
                raise UsageError("the simulated driver needs the world file of its GPUs: --world PATH")
            return SimulatedHost(world_path)
        case "nvml":
            from gpuenergyd.gpu.drivers.nvml import NvmlHost  # noqa: PLC0415 - the binding may be absent

            return NvmlHost()
        case "command":
            from gpuenergyd.gpu.drivers.command import CommandHost  # noqa: PLC0415 - imports only the driver in use

            if world_path is None:
                raise UsageError("the command driver needs its commands file: --world PATH")
            return CommandHost.open(world_path)
        case _:
            raise UsageError(f"unknown driver {driver!r}; available: {', '.join(DRIVERS)}")
