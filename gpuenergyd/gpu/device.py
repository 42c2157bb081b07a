"""What a GPU driver is, and the capabilities that it may have: a new vendor is a `GpuDriver` with some of them."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from gpuenergyd.core.host.energy_scope import EnergyScope
from gpuenergyd.errors import GpuUnsupportedError

SAME_CLOCK_MHZ = 16
"""About one clock step: clocks that differ by no more are taken as the same one."""
MIG_ENABLED = "MIG is enabled: clocks apply to the whole GPU, but its instances may belong to several users"


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """Identity and fixed properties of a GPU; its UUID is the key, the index is for display.

    Supported clocks are in descending order.
    """

    gpu_uuid: str
    index: int
    model_name: str
    supported_sm_clocks_mhz: tuple[int, ...]
    is_simulated: bool
    default_power_limit_w: float | None = None
    blocking_power_w: float | None = None
    """Published power while waiting for a peer at the maximum clock; None where no figure exists for the model."""
    switch_latency_s: float | None = None
    """Published time from a clock request until its effect; None where no figure exists for the model."""
    driver_version: str | None = None
    """Version of the driver, which switch latencies depend on; None where it is not reported."""
    min_power_limit_w: float | None = None
    """Lowest power limit; None where the driver does not report it."""
    power_profiles: tuple[int, ...] = ()
    """Numbers of the workload power profiles that the GPU offers, ascending."""
    max_power_limit_w: float | None = None
    """Highest power limit; None where the driver does not report it."""
    energy_scope: EnergyScope = EnergyScope.GPU


@dataclass(frozen=True, slots=True)
class RefusedValues:
    """Values of one kind that cannot be right, by the field that is unknown for them; the reason names the last."""

    name: str
    num: int
    reason: str


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One reading of a GPU; a value that the driver does not report is None, never zero.

    `total_energy_j` counts in steps since the driver was loaded; a decrease means that the counter restarted.
    """

    gpu_uuid: str
    read_mono_ns: int
    power_w: float | None = None
    total_energy_j: float | None = None
    sm_clock_mhz: int | None = None
    temperature_celsius: float | None = None
    is_power_capped: bool | None = None
    is_clock_limited: bool | None = None
    """Whether anything but a lock may keep the clock down: an idle GPU, a power cap, heat, a brake."""
    sm_clock_by_mono_ns: int | None = None
    """Instant by which the clock had been read, after `read_mono_ns`; None where all values are of one instant."""
    refused: tuple[RefusedValues, ...] = ()
    """Impossible values that the driver has reported since the last reading."""
    utilization_ratio: float | None = None
    """Part of the driver's last sampling window, 0.1 to 1 s, in which a kernel ran."""


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """The energy counter of a GPU; `read_mono_ns` is the middle of the call, which took `took_ns`."""

    read_mono_ns: int
    took_ns: int
    total_energy_j: float | None
    cpu_ns: int = 0
    """CPU time that the call used; 0 where the driver does not measure it."""


@dataclass(frozen=True, slots=True)
class GpuDetails:
    """Settings and properties that change rarely; None is what the driver does not report."""

    power_limit_w: float | None = None
    min_power_limit_w: float | None = None
    max_power_limit_w: float | None = None
    is_persistent: bool | None = None
    pci_address: str | None = None
    """Domain, bus, device, function: 0000:01:00.0."""
    enforced_power_limit_w: float | None = None
    """The lowest of all limits, those of other limiters included."""
    is_mig_enabled: bool | None = None
    application_sm_clock_mhz: int | None = None
    application_memory_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    """Last reading at full performance; below the maximum a program has locked it, which NVML cannot read back."""
    max_memory_clock_mhz: int | None = None
    is_power_smoothing_on: bool | None = None
    power_smoothing_profile: int | None = None
    """Number of the active preset profile."""
    power_floor_w: float | None = None
    """Least power that power smoothing keeps up."""
    secondary_power_floor_w: float | None = None
    requested_power_profiles: str | None = None
    """Numbers of the workload power profiles that programs have requested, e.g. `2,20`; empty if none."""
    enforced_power_profiles: str | None = None
    is_display_active: bool | None = None
    foreign_sm_clock_mhz: int | None = None
    """Clock at which another program has locked the GPU; no driver reads it, the worker adds what the GPU has shown."""


class GpuDriver(Protocol):
    """What each driver has: it finds the GPUs of this host and reads them, without privilege.

    What else it can do are capabilities, the `Has...` below: a driver has those whose methods it has.
    """

    def identities(self) -> tuple[GpuIdentity, ...]:
        """Return the GPUs of this host, in order of their index."""
        ...

    def observe_only_reasons(self) -> Mapping[str, str]:
        """Return the GPUs that must not be controlled, each with the reason."""
        ...

    def read(self, gpu_uuid: str) -> GpuReading:
        """Return a reading.

        Raises:
            GpuNotFoundError, GpuLostError, DriverError: as named; so do the methods of all capabilities.
        """
        ...

    def close(self) -> None:
        """Close the driver."""
        ...


@runtime_checkable
class HasEnergyCounter(Protocol):
    """Reads the energy counter alone; without, it is read with all other values."""

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Return the energy counter, by one call of the driver."""
        ...


@runtime_checkable
class HasReadingWithoutEnergy(Protocol):
    """Reads all values but the energy counter, where that costs much more than the others."""

    def read_without_energy(self, gpu_uuid: str) -> GpuReading:
        """Return a reading whose energy is unknown."""
        ...


@runtime_checkable
class HasSettings(Protocol):
    """Reads the settings of a GPU, including those made by other programs."""

    def details(self, gpu_uuid: str) -> GpuDetails:
        """Return power limits, modes and the PCI address."""
        ...


@runtime_checkable
class HasProcesses(Protocol):
    """Knows which processes compute on a GPU; without, no job can prove that it uses one."""

    def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the host pids of the processes that compute on the GPU."""
        ...


@runtime_checkable
class HasClocks(Protocol):
    """Locks clocks; needs privilege on real hardware. Success does not prove the effect: read the clock back.

    Its methods also raise GpuPermissionError and GpuUnsupportedError, like those of the next two capabilities.
    """

    def lock_sm_clock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        """Lock the SM clock at a supported value; outlives this process."""
        ...

    def reset_sm_clock(self, gpu_uuid: str) -> None:
        """Remove the clock lock."""
        ...


@runtime_checkable
class HasPowerLimit(Protocol):
    """Limits the power of a GPU; needs privilege on real hardware."""

    def power_limit_w(self, gpu_uuid: str) -> float:
        """Return the present power limit."""
        ...

    def set_power_limit(self, gpu_uuid: str, power_limit_w: float) -> None:
        """Set the power limit within the GPU's range; outlives this process."""
        ...


@runtime_checkable
class HasPowerProfiles(Protocol):
    """Requests workload power profiles, which the vendor has prepared; needs privilege on real hardware."""

    def requested_power_profiles(self, gpu_uuid: str) -> frozenset[int]:
        """Return the workload power profiles that all programs together have requested."""
        ...

    def request_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        """Add a workload power profile to the requested ones; outlives this process."""
        ...

    def clear_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        """Remove one workload power profile from the requested ones; the others stay."""
        ...


@runtime_checkable
class HasErrorEvents(Protocol):
    """Reports critical errors of GPUs as they occur."""

    def await_xid(self, timeout_s: float) -> tuple[str, int] | None:
        """Return the UUID and Xid number of the next error, None when none occurs in time."""
        ...


@runtime_checkable
class HasRelease(Protocol):
    """Lets go of single GPUs, for a reset, a MIG change or a driver upgrade; the others go on."""

    def release(self, gpu_uuids: Collection[str]) -> None:
        """Close all driver handles of GPUs."""
        ...

    def reopen(self, gpu_uuids: Collection[str]) -> tuple[GpuIdentity, ...]:
        """Open released GPUs again; return their identities, which may have changed.

        Raises:
            GpuLostError: a GPU is not there; the ones that are there are open.
            DriverError: the driver cannot be opened.
        """
        ...


class MeasuresGpus(HasEnergyCounter, HasReadingWithoutEnergy, HasSettings, Protocol):
    """Reads values of GPUs that change."""

    def read(self, gpu_uuid: str) -> GpuReading:
        """Return a reading."""
        ...


@runtime_checkable
class GpuController(
    GpuDriver,
    HasEnergyCounter,
    HasSettings,
    HasProcesses,
    HasClocks,
    HasPowerLimit,
    HasPowerProfiles,
    HasRelease,
    Protocol,
):
    """A driver with all capabilities but error events."""


@runtime_checkable
class RecallsLocks(Protocol):
    """A driver whose success proves nothing: locks are journalled, and a reset must be seen to have an effect."""

    def recall_lock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        """Learn which lock an earlier process may have left: `reset_sm_clock` fails if a busy GPU stays there."""
        ...


@runtime_checkable
class AttachesProcesses(Protocol):
    """A driver of simulated GPUs: a process computes on one by being attached to it, and the GPU shows its clocks."""

    def attach_process(self, gpu_uuid: str, pid: int) -> None:
        """Attach a process, which computes from now on."""
        ...

    def detach_process(self, gpu_uuid: str, pid: int) -> None:
        """Detach a process."""
        ...


CAPABILITIES: Mapping[type, str] = {
    HasClocks: "clock locks",
    HasPowerLimit: "power limits",
    HasPowerProfiles: "workload power profiles",
    HasEnergyCounter: "an energy counter",
    HasSettings: "reading of settings",
    HasProcesses: "a list of processes",
    HasErrorEvents: "error events",
    HasRelease: "release of single GPUs",
}

_CapabilityT = TypeVar("_CapabilityT")


def require_capability(driver: GpuDriver, capability: type[_CapabilityT]) -> _CapabilityT:
    """Return a driver as one that has a capability; raise GpuUnsupportedError if it has not."""
    if not isinstance(driver, capability):
        raise GpuUnsupportedError(f"the driver does not offer {CAPABILITIES[capability]}")
    return driver


def missing_capabilities(driver: GpuDriver) -> tuple[str, ...]:
    """Return the capabilities that a driver lacks, in words."""
    return tuple(name for capability, name in CAPABILITIES.items() if not isinstance(driver, capability))
