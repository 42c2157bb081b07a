"""What the core may ask of the driver through the worker: who runs on a GPU, and how it is set and reads right now."""

from dataclasses import asdict, dataclass
from typing import Any

from gpuenergyd.gpu.device import GpuDetails, GpuReader

QUESTIONS = frozenset({"users", "look"})


@dataclass(frozen=True, slots=True)
class GpuLook:
    """A fresh look at one GPU; None is what the driver does not tell."""

    power_w: float | None
    total_energy_j: float | None
    details: GpuDetails


def answer(reader: GpuReader, message: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a question, as it travels; blocks as long as the driver does.

    Raises:
        GpuNotFoundError, GpuLostError, DriverError: as named.
    """
    gpu_uuid = message["gpu_uuid"]
    if message["type"] == "users":
        return {"pids": list(reader.process_ids(gpu_uuid))}
    reading, details = reader.read(gpu_uuid), reader.details(gpu_uuid)
    return {"power_w": reading.power_w, "total_energy_j": reading.total_energy_j, "details": asdict(details)}


def look_from_answer(reply: dict[str, Any]) -> GpuLook:
    """Return the look in an answer."""
    return GpuLook(reply["power_w"], reply["total_energy_j"], GpuDetails(**reply["details"]))
