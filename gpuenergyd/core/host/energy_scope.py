"""What the power and the energy counter of a GPU cover."""

from enum import StrEnum


class EnergyScope(StrEnum):
    """What power and energy counter of a GPU cover."""

    GPU = "gpu"
    MODULE = "module"
    """On a superchip such as GH200 the GPU, its processor and their memory: never to be called the GPU's."""
    UNKNOWN = "unknown"
    """The driver could not be asked."""
