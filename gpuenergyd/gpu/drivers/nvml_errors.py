"""NVML return codes as errors of this project, with remedies; needs no NVML binding."""

from gpuenergyd.errors import DriverError, GpuError, GpuLostError, GpuPermissionError, GpuUnsupportedError

UNINITIALIZED = 1

TRANSIENT = frozenset({10, 19, 999})
"""Codes after which a few retries may succeed."""

NEVER_HERE = frozenset({3, 13})
"""Codes that are permanent while this driver runs, so that the call is not repeated."""

_MEANING: dict[int, tuple[type[GpuError], str]] = {
    1: (DriverError, "the driver was not initialised or was reloaded"),
    2: (GpuUnsupportedError, "the driver refused the value"),
    3: (GpuUnsupportedError, "this GPU does not support it"),
    4: (GpuPermissionError, "no permission; run the GPU worker with CAP_SYS_ADMIN"),
    5: (DriverError, "already initialised"),
    6: (DriverError, "not found"),
    7: (DriverError, "the driver needs a larger buffer than it reported"),
    8: (DriverError, "external power cables are not attached; check the GPU's cables"),
    9: (DriverError, "the driver is not loaded; load the nvidia kernel module"),
    10: (DriverError, "the driver did not respond in time"),
    11: (DriverError, "an interrupt of the GPU does not work; restart the host"),
    12: (DriverError, "libnvidia-ml.so.1 was not found; install the NVIDIA driver"),
    13: (GpuUnsupportedError, "this driver lacks the function; install a newer one"),
    14: (DriverError, "the GPU's stored settings are damaged"),
    15: (GpuLostError, "the GPU fell off the bus; restart the host"),
    16: (GpuLostError, "the GPU needs a reset"),
    17: (GpuPermissionError, "the operating system blocks the device; allow it in the cgroup of the unit or container"),
    18: (DriverError, "driver and library have different versions; reload the driver"),
    19: (DriverError, "the GPU is in use by another client"),
    20: (DriverError, "the driver is out of memory"),
    21: (DriverError, "the GPU has no data"),
    22: (DriverError, "the GPU's video link does not respond"),
    23: (DriverError, "the GPU's present state does not allow it"),
    24: (GpuUnsupportedError, "the clock is not supported"),
    25: (GpuUnsupportedError, "the version of the argument is not supported"),
    26: (DriverError, "deprecated"),
    27: (DriverError, "the GPU is not ready yet"),
    28: (DriverError, "the GPU was not found"),
    29: (DriverError, "the GPU is in an invalid state"),
    30: (GpuLostError, "the GPU needs a reset"),
    999: (DriverError, "unknown driver error"),
}


def nvml_error(code: int, what: str, gpu_uuid: str | None = None) -> GpuError:
    kind, meaning = _MEANING.get(code, (DriverError, "unknown NVML return code"))
    where = f" of {gpu_uuid}" if gpu_uuid else ""
    return kind(f"{what}{where}: {meaning} (NVML error {code})")
