"""Energy counters by an installed pynvml, for hosts without a daemon; needs nothing else and no rights."""

from collections.abc import Collection
from functools import cache
from typing import Any

_MJ_PER_J = 1e3


@cache
def _library() -> Any:
    """Return pynvml, with NVML opened for the rest of the process."""
    import pynvml  # noqa: PLC0415  hosts with a daemon need not have it

    pynvml.nvmlInit()
    return pynvml


def energy_counters_j(gpu_uuids: Collection[str]) -> dict[str, float | None]:
    """Return the counters of GPUs by UUID, all if none is named, None if one fails; raises what pynvml raises."""
    pynvml = _library()
    found: dict[str, float | None] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        gpu_uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        if not gpu_uuids or gpu_uuid in gpu_uuids:
            try:
                found[gpu_uuid] = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / _MJ_PER_J
            except pynvml.NVMLError:
                found[gpu_uuid] = None
    return found
