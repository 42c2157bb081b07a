"""Reading gate: every value of the driver passes it; one that cannot be right is unknown from here on, and counted."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuenergyd.gpu.device import (
    EnergyReading,
    GpuDetails,
    GpuDriver,
    GpuIdentity,
    GpuReading,
    HasEnergyCounter,
    HasReadingWithoutEnergy,
    HasSettings,
    RefusedValues,
)
from gpuenergyd.gpu.plausible import is_possible_rise, max_power_w, plausible, refusals
from gpuenergyd.gpu.worker.daemon_connection import log

_NS_PER_S = 1_000_000_000


@dataclass(slots=True)
class _Gated:
    """One GPU: the counter as it was last read, and what was refused since the last complete reading."""

    identity: GpuIdentity
    energy_j: float | None = None
    energy_mono_ns: int = 0
    refused: dict[str, RefusedValues] = field(default_factory=dict)
    logged: set[str] = field(default_factory=set)


class ReadingGate:
    """Reads GPUs by a driver; methods may be called on any thread, and raise what the driver's own raise.

    What the driver cannot read by itself, the energy counter or settings, is taken from a whole reading or unknown.
    """

    def __init__(self, driver: GpuDriver, identities: Sequence[GpuIdentity]) -> None:
        self._driver = driver
        self._counter = driver if isinstance(driver, HasEnergyCounter) else None
        self._without_energy = driver if isinstance(driver, HasReadingWithoutEnergy) else None
        self._settings = driver if isinstance(driver, HasSettings) else None
        self._gpus = {identity.gpu_uuid: _Gated(identity) for identity in identities}
        self._guard = threading.Lock()

    def refresh(self, identity: GpuIdentity) -> None:
        """Use what the driver says of a GPU now."""
        self._gpus[identity.gpu_uuid].identity = identity

    def read(self, gpu_uuid: str) -> GpuReading:
        """Return a reading without values that cannot be right, and what was refused since the last one."""
        return self._admit(gpu_uuid, self._driver.read(gpu_uuid))

    def read_without_energy(self, gpu_uuid: str) -> GpuReading:
        """Return a reading of all values but the energy; of all where the driver can't leave it out."""
        if self._without_energy is None:
            return self.read(gpu_uuid)
        return self._admit(gpu_uuid, self._without_energy.read_without_energy(gpu_uuid))

    def _admit(self, gpu_uuid: str, reading: GpuReading) -> GpuReading:
        with self._guard:
            gpu = self._gpus[gpu_uuid]
            checked = self._checked(gpu, reading)
            refused, gpu.refused = tuple(gpu.refused.values()), {}
        return replace(checked, refused=refused) if refused else checked

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Return the energy counter, unknown if it cannot be right."""
        if self._counter is None:
            called_ns = time.monotonic_ns()
            whole = self.read(gpu_uuid)
            return EnergyReading(whole.read_mono_ns, time.monotonic_ns() - called_ns, whole.total_energy_j)
        energy = self._counter.read_energy(gpu_uuid)
        reading = GpuReading(gpu_uuid, energy.read_mono_ns, total_energy_j=energy.total_energy_j)
        with self._guard:
            return replace(energy, total_energy_j=self._checked(self._gpus[gpu_uuid], reading).total_energy_j)

    def details(self, gpu_uuid: str) -> GpuDetails:
        """Return settings, unknown where they cannot be right."""
        return GpuDetails() if self._settings is None else plausible(self._settings.details(gpu_uuid))

    def _checked(self, gpu: _Gated, reading: GpuReading) -> GpuReading:
        """Return a reading without values that cannot be right; the caller holds the guard."""
        unknown: dict[str, Any] = {}
        for name, reason in refusals(reading, gpu.identity):
            unknown[name] = None
            self._refuse(gpu, name, reason)
        energy_j = None if "total_energy_j" in unknown else reading.total_energy_j
        if energy_j is not None:
            before_j, elapsed_s = gpu.energy_j, (reading.read_mono_ns - gpu.energy_mono_ns) / _NS_PER_S
            gpu.energy_j, gpu.energy_mono_ns = energy_j, reading.read_mono_ns
            most_w = max_power_w(gpu.identity)
            if before_j is not None and not is_possible_rise(energy_j - before_j, max(0.0, elapsed_s), most_w):
                # Unknown once: what is read from now on belongs to a new count.
                unknown["total_energy_j"] = None
                self._refuse(gpu, "total_energy_j", f"it rose by {energy_j - before_j:g} J in {elapsed_s:.3g} s")
        return replace(reading, **unknown) if unknown else reading

    @staticmethod
    def _refuse(gpu: _Gated, name: str, reason: str) -> None:
        known = gpu.refused.get(name)
        gpu.refused[name] = RefusedValues(name, 1 if known is None else known.num + 1, reason)
        if name not in gpu.logged:
            gpu.logged.add(name)
            log(f"{gpu.identity.gpu_uuid}: refused {name} of the driver, which cannot be right: {reason}")
