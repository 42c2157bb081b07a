"""What the daemon needs of a GPU driver: reading and controlling are two rights, so they are two Protocols."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """A GPU, known by its UUID; the index is for people. Supported clocks are descending."""

    gpu_uuid: str
    index: int
    model_name: str
    supported_sm_clocks_mhz: tuple[int, ...]
    is_simulated: bool
    default_power_limit_w: float | None = None
    blocking_power_w: float | None = None
    """Published power while waiting for a peer at the maximum clock, where there is a figure for this model."""
    switch_latency_s: float | None = None
    """Published time from asking for a clock until it is effective, where there is a figure for this model."""


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at a GPU; what the driver cannot tell is None, never zero.

    `total_energy_j` counts since the driver was loaded and moves in steps; a decrease means a new count.
    """

    gpu_uuid: str
    read_mono_ns: int
    power_w: float | None = None
    total_energy_j: float | None = None
    sm_clock_mhz: int | None = None
    temperature_celsius: float | None = None
    is_power_capped: bool | None = None


@dataclass(frozen=True, slots=True)
class GpuDetails:
    """What is worth knowing of a GPU once in a while; None is what the driver does not tell."""

    power_limit_w: float | None = None
    min_power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    is_persistent: bool | None = None
    pci_address: str | None = None
    """Domain, bus, device, function: 0000:01:00.0."""


class GpuReader(Protocol):
    """Reading: needs no privilege."""

    def identities(self) -> tuple[GpuIdentity, ...]:
        """Return the GPUs of this host, by index."""
        ...

    def read(self, gpu_uuid: str) -> GpuReading:
        """Return what the GPU says now.

        Raises:
            GpuNotFoundError, GpuLostError, DriverError: as named.
        """
        ...

    def details(self, gpu_uuid: str) -> GpuDetails:
        """Return limits, modes and other things that change rarely.

        Raises:
            GpuNotFoundError, GpuLostError, DriverError: as named.
        """
        ...

    def observe_only_reasons(self) -> Mapping[str, str]:
        """Return the GPUs that must not be controlled, and why."""
        ...

    def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of the processes that compute on the GPU."""
        ...

    def close(self) -> None:
        """Let go of the driver."""
        ...


class GpuController(GpuReader, Protocol):
    """Changing clocks: needs privilege on real hardware. Success is not believed: read the clock back."""

    def lock_sm_clock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        """Cap the SM clock at a supported value; outlives this process.

        Raises:
            GpuPermissionError, GpuUnsupportedError, GpuNotFoundError, GpuLostError, DriverError: as named.
        """
        ...

    def reset_sm_clock(self, gpu_uuid: str) -> None:
        """Remove the lock.

        Raises:
            GpuPermissionError, GpuUnsupportedError, GpuNotFoundError, GpuLostError, DriverError: as named.
        """
        ...

    def power_limit_w(self, gpu_uuid: str) -> float:
        """Return the power limit that is set.

        Raises:
            GpuUnsupportedError, GpuNotFoundError, GpuLostError, DriverError: as named.
        """
        ...

    def set_power_limit(self, gpu_uuid: str, power_limit_w: float) -> None:
        """Set the power limit within the GPU's range; outlives this process.

        Raises:
            GpuPermissionError, GpuUnsupportedError, GpuNotFoundError, GpuLostError, DriverError: as named.
        """
        ...
