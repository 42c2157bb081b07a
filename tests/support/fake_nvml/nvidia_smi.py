"""The program `nvidia-smi` for the fake driver library: the lists, queries and settings that other tools use.

Names, units and exit codes are those of the real program; what is not simulated is an unknown option. It reads GPUs as
any other client does, through pynvml and the library that the loader finds.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pynvml as typed_pynvml

pynvml: Any = typed_pynvml  # its classes of errors are made at run time

_INVALID_FIELD, _INVALID_OPTION, _NO_PERMISSION, _NO_DRIVER = 2, 2, 4, 9
_NOT_AVAILABLE = "[N/A]"

GPU_FIELDS: Mapping[str, tuple[str, Callable[[Any], object]]] = {
    "timestamp": ("", lambda _: f"{datetime.now():%Y/%m/%d %H:%M:%S.000}"),  # noqa: DTZ005  local, as the program
    "driver_version": ("", lambda _: pynvml.nvmlSystemGetDriverVersion()),
    "count": ("", lambda _: pynvml.nvmlDeviceGetCount()),
    "index": ("", pynvml.nvmlDeviceGetIndex),
    "name": ("", pynvml.nvmlDeviceGetName),
    "uuid": ("", pynvml.nvmlDeviceGetUUID),
    "pci.bus_id": ("", lambda gpu: pynvml.nvmlDeviceGetPciInfo(gpu).busId),
    "persistence_mode": ("", lambda gpu: "Enabled" if pynvml.nvmlDeviceGetPersistenceMode(gpu) else "Disabled"),
    "mig.mode.current": ("", lambda gpu: "Enabled" if pynvml.nvmlDeviceGetMigMode(gpu)[0] else "Disabled"),
    "compute_mode": ("", lambda _: "Default"),
    "pstate": ("", lambda gpu: f"P{pynvml.nvmlDeviceGetPerformanceState(gpu)}"),
    "temperature.gpu": ("", lambda gpu: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
    "utilization.gpu": ("%", lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).gpu),
    "utilization.memory": ("%", lambda gpu: pynvml.nvmlDeviceGetUtilizationRates(gpu).memory),
    "memory.total": ("MiB", lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).total >> 20),
    "memory.used": ("MiB", lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).used >> 20),
    "memory.free": ("MiB", lambda gpu: pynvml.nvmlDeviceGetMemoryInfo(gpu).free >> 20),
    "power.draw": ("W", lambda gpu: _watts(pynvml.nvmlDeviceGetPowerUsage(gpu))),
    "power.limit": ("W", lambda gpu: _watts(pynvml.nvmlDeviceGetPowerManagementLimit(gpu))),
    "enforced.power.limit": ("W", lambda gpu: _watts(pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu))),
    "power.default_limit": ("W", lambda gpu: _watts(pynvml.nvmlDeviceGetPowerManagementDefaultLimit(gpu))),
    "power.min_limit": ("W", lambda gpu: _watts(pynvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[0])),
    "power.max_limit": ("W", lambda gpu: _watts(pynvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu)[1])),
    "clocks.current.graphics": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_GRAPHICS)),
    "clocks.current.sm": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
    "clocks.current.memory": ("MHz", lambda gpu: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
    "clocks.max.graphics": ("MHz", lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_GRAPHICS)),
    "clocks.max.sm": ("MHz", lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM)),
    "clocks.max.memory": ("MHz", lambda gpu: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_MEM)),
    "clocks.applications.graphics": (
        "MHz",
        lambda gpu: pynvml.nvmlDeviceGetApplicationsClock(gpu, pynvml.NVML_CLOCK_GRAPHICS),
    ),
    "clocks.applications.memory": (
        "MHz",
        lambda gpu: pynvml.nvmlDeviceGetApplicationsClock(gpu, pynvml.NVML_CLOCK_MEM),
    ),
}
"""Unit and value of a GPU's fields."""
_OTHER_NAMES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_bus_id": "pci.bus_id",
    "temperature": "temperature.gpu",
    "clocks.gr": "clocks.current.graphics",
    "clocks.sm": "clocks.current.sm",
    "clocks.mem": "clocks.current.memory",
    "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory",
    "clocks.applications.gr": "clocks.applications.graphics",
    "clocks.applications.mem": "clocks.applications.memory",
}
_SHORT_OPTIONS = {
    "-h": "--help",
    "-L": "--list-gpus",
    "-i": "--id",
    "-lgc": "--lock-gpu-clocks",
    "-rgc": "--reset-gpu-clocks",
    "-pl": "--power-limit",
    "-pm": "--persistence-mode",
}
_FLAGS = {"--help", "--list-gpus", "--reset-gpu-clocks"}
_WITH_VALUE = {
    "--id", "--query-gpu", "--query-compute-apps", "--format", "--lock-gpu-clocks", "--power-limit",
    "--persistence-mode",
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the program; return its exit code."""
    options = _parsed(arguments)
    if options is None:
        return _INVALID_OPTION
    if "--help" in options:
        _print_line(
            "NVIDIA System Management Interface, for the fake driver library. Options:", *sorted(_FLAGS | _WITH_VALUE)
        )
        return 0
    try:
        pynvml.nvmlInit()
        return _run(options)
    except pynvml.NVMLError_NoPermission:
        _print_line("The current user does not have permission to change settings of this GPU.")
        return _NO_PERMISSION
    except pynvml.NVMLError as error:
        _print_line(f"NVIDIA-SMI has failed: {error}")
        return _NO_DRIVER


def _parsed(arguments: Sequence[str]) -> dict[str, str] | None:
    """Return the options by their long names; None, after a message, for an unknown one or a missing value."""
    options: dict[str, str] = {}
    remaining = list(arguments)
    while remaining:
        name, _, value = remaining.pop(0).partition("=")
        name = _SHORT_OPTIONS.get(name, name)
        if name not in _FLAGS | _WITH_VALUE:
            _print_line(f"Invalid combination of input arguments. Please run 'nvidia-smi -h' for help. ({name})")
            return None
        if name in _WITH_VALUE and not value:
            if not remaining:
                _print_line(f"Option {name} is missing its value.")
                return None
            value = remaining.pop(0)
        options[name] = value
    return options


def _run(options: Mapping[str, str]) -> int:
    gpus = _chosen(options.get("--id"))
    words = options.get("--format", "csv").split(",")
    if "--list-gpus" in options:
        for gpu in gpus:
            name, uuid = pynvml.nvmlDeviceGetName(gpu), pynvml.nvmlDeviceGetUUID(gpu)
            _print_line(f"GPU {pynvml.nvmlDeviceGetIndex(gpu)}: {name} (UUID: {uuid})")
    elif "--query-gpu" in options:
        return _print_query(gpus, options["--query-gpu"].split(","), words)
    elif "--query-compute-apps" in options:
        return _print_processes(gpus, options["--query-compute-apps"].split(","), words)
    elif not _change(gpus, options):
        _print_table(gpus)
    return 0


def _chosen(ids: str | None) -> list[Any]:
    """Return the GPUs of a list of indices or UUIDs; all without one."""
    if ids is None:
        return [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return [
        pynvml.nvmlDeviceGetHandleByIndex(int(one)) if one.isdecimal() else pynvml.nvmlDeviceGetHandleByUUID(one)
        for one in ids.split(",")
    ]


def _print_query(gpus: Sequence[Any], names: Sequence[str], words: Sequence[str]) -> int:
    fields = []
    for name in (name.strip() for name in names):
        if _OTHER_NAMES.get(name, name) not in GPU_FIELDS:
            _print_line(f'Field "{name}" is not a valid field to query.')
            return _INVALID_FIELD
        fields.append((name, *GPU_FIELDS[_OTHER_NAMES.get(name, name)]))
    if "noheader" not in words:
        _print_line(", ".join(f"{name} [{unit}]" if unit else name for name, unit, _ in fields))
    for gpu in gpus:
        _print_line(", ".join(_text(read, gpu, "" if "nounits" in words else unit) for _, unit, read in fields))
    return 0


def _print_processes(gpus: Sequence[Any], names: Sequence[str], words: Sequence[str]) -> int:
    rows = [
        {
            "pid": str(process.pid),
            "process_name": pynvml.nvmlSystemGetProcessName(process.pid),
            "gpu_uuid": pynvml.nvmlDeviceGetUUID(gpu),
            "used_gpu_memory": f"{process.usedGpuMemory >> 20}{'' if 'nounits' in words else ' MiB'}",
        }
        for gpu in gpus
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)
    ]
    named = {"used_memory": "used_gpu_memory", "name": "process_name"}
    keys = [named.get(name.strip(), name.strip()) for name in names]
    if "noheader" not in words:
        _print_line(", ".join(f"{key} [MiB]" if key == "used_gpu_memory" else key for key in keys))
    for row in rows:
        _print_line(", ".join(row.get(key, _NOT_AVAILABLE) for key in keys))
    return 0


def _change(gpus: Sequence[Any], options: Mapping[str, str]) -> bool:
    """Apply settings to GPUs; return whether there was one."""
    for gpu in gpus:
        if "--lock-gpu-clocks" in options:
            low, _, high = options["--lock-gpu-clocks"].partition(",")
            pynvml.nvmlDeviceSetGpuLockedClocks(gpu, int(low), int(high or low))
        if "--reset-gpu-clocks" in options:
            pynvml.nvmlDeviceResetGpuLockedClocks(gpu)
        if "--power-limit" in options:
            pynvml.nvmlDeviceSetPowerManagementLimit(gpu, round(1000 * float(options["--power-limit"])))
        if "--persistence-mode" in options:
            pynvml.nvmlDeviceSetPersistenceMode(gpu, int(options["--persistence-mode"]))
    return any(
        name in options for name in ("--lock-gpu-clocks", "--reset-gpu-clocks", "--power-limit", "--persistence-mode")
    )


def _print_table(gpus: Sequence[Any]) -> None:
    version = pynvml.nvmlSystemGetDriverVersion()
    _print_line(f"{datetime.now():%c}")  # noqa: DTZ005  local, as the program
    _print_line(f"| NVIDIA-SMI {version}    Driver Version: {version}    CUDA Version: 13.0 |")
    columns = ("index", "name", "temperature.gpu", "pstate", "power.draw", "power.limit", "memory.used", "memory.total",
               "utilization.gpu")  # fmt: skip
    for gpu in gpus:
        _print_line("|", "  ".join(_text(GPU_FIELDS[name][1], gpu, GPU_FIELDS[name][0]) for name in columns), "|")


def _text(read: Callable[[Any], object], gpu: Any, unit: str) -> str:
    try:
        value = read(gpu)
    except pynvml.NVMLError_NotSupported:
        return _NOT_AVAILABLE
    return f"{value} {unit}" if unit else str(value)


def _print_line(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")


def _watts(milliwatts: int) -> str:
    return f"{milliwatts / 1000:.2f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
