"""Opens a GPU driver by name: one of this package, or an entry point of the group `gpuenergyd.drivers`.

An entry point is a function that takes the path of the driver's file, or None, and returns a `GpuDriver`.
"""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

from gpuenergyd.errors import UsageError
from gpuenergyd.gpu.device import GpuDriver

OpenDriver = Callable[[Path | None], GpuDriver]

DRIVERS = {"nvml": "NvmlHost"}
"""Classes of this package's drivers by name, opened without a search for entry points so that restores are fast."""


def installed_drivers() -> dict[str, Callable[[], OpenDriver]]:
    """Return, by name, the functions that load the drivers of other packages."""
    from importlib.metadata import entry_points  # noqa: PLC0415  slow, and rarely needed

    return {point.name: point.load for point in entry_points(group="gpuenergyd.drivers")}


def check_driver(driver: str) -> None:
    """Check that a driver is installed, without importing it.

    Raises:
        UsageError: it is not installed; the message names the drivers that are.
    """
    if driver not in DRIVERS and driver not in (installed := installed_drivers()):
        raise UsageError(f"unknown driver {driver!r}; available: {', '.join(sorted({*DRIVERS, *installed}))}")


@cache  # a restore after a kill must not search for packages
def preload(driver: str) -> OpenDriver:
    """Import the modules of a driver, so that opening it later is fast; return the function that opens it.

    Raises:
        UsageError: unknown driver.
    """
    if driver in DRIVERS:
        opener: OpenDriver = getattr(import_module(f"gpuenergyd.gpu.drivers.{driver}"), DRIVERS[driver]).open
        return opener
    check_driver(driver)
    return installed_drivers()[driver]()


def open_driver(driver: str, path: Path | None) -> GpuDriver:
    """Open a driver by its name; `path` is its file, such as the commands file.

    Raises:
        UsageError: unknown driver, or it needs a file and none is named.
        DriverError: the driver cannot be opened.
    """
    return preload(driver)(path)
