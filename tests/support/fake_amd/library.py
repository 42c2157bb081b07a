"""A fake of AMD's management library: simulated GPUs behind a few of its functions, with their names and units."""

from pathlib import Path
from typing import Any

from gpuenergyd.errors import GpuUnsupportedError
from gpuenergyd_sim.driver.host import SimulatedHost

COUNTER_RESOLUTION_UJ = 15.259
_HZ_PER_MHZ = 1_000_000
_UW_PER_W = 1_000_000
_STATUS_INVAL = 1


class AmdSmiLibraryError(Exception):
    """A call that failed, with its status code."""


class AmdSmi:
    """The library, opened by one process; a handle is the index of a GPU."""

    def __init__(self, world: Path) -> None:
        self._host = SimulatedHost(world)
        self._gpus = self._host.identities()

    def amdsmi_shut_down(self) -> None:
        """Close the library."""
        self._host.close()

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [gpu.index for gpu in self._gpus]

    def amdsmi_get_gpu_device_uuid(self, handle: int) -> str:
        return self._uuid(handle)

    def amdsmi_get_gpu_asic_info(self, handle: int) -> dict[str, Any]:
        return {"market_name": self._gpus[handle].model_name}

    def amdsmi_get_gpu_driver_info(self, handle: int) -> dict[str, str]:
        """Return the version of the kernel driver."""
        return {"driver_version": str(self._gpus[handle].driver_version)}

    def amdsmi_get_clk_freq(self, handle: int) -> dict[str, Any]:
        """Return the supported clocks of a GPU in Hz, ascending."""
        clocks_mhz = self._gpus[handle].supported_sm_clocks_mhz
        return {"frequency": [mhz * _HZ_PER_MHZ for mhz in reversed(clocks_mhz)]}

    def amdsmi_get_gpu_metrics_info(self, handle: int) -> dict[str, Any]:
        """Return the sensors of a GPU in MHz, W and degrees; N/A where there is none."""
        reading = self._host.read(self._uuid(handle))
        return {
            "current_gfxclk": reading.sm_clock_mhz,
            "current_socket_power": reading.power_w,
            "temperature_hotspot": reading.temperature_celsius,
            "average_mm_activity": "N/A",
        }

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, float]:
        """Return the energy counter of a GPU in steps, with their size in microjoules."""
        energy_j = self._host.read_energy(self._uuid(handle)).total_energy_j or 0.0
        steps = round(energy_j * 1e6 / COUNTER_RESOLUTION_UJ)
        return {"energy_accumulator": steps, "counter_resolution": COUNTER_RESOLUTION_UJ}

    def amdsmi_set_gpu_clk_limit(self, handle: int, clk_type: str, limit_type: str, value: int) -> None:
        """Set the highest graphics clock of a GPU in MHz."""
        assert (clk_type, limit_type) == ("sclk", "max")
        self._host.lock_sm_clock(self._uuid(handle), value)

    def amdsmi_set_gpu_perf_level(self, handle: int, perf_level: str) -> None:
        """Return a GPU to automatic clocks."""
        assert perf_level == "AUTO"
        self._host.reset_sm_clock(self._uuid(handle))

    def amdsmi_get_power_cap_info(self, handle: int) -> dict[str, int]:
        """Return the power cap of a GPU and its range in microwatts."""
        gpu = self._gpus[handle]
        values_w = {
            "power_cap": self._host.power_limit_w(gpu.gpu_uuid),
            "default_power_cap": gpu.default_power_limit_w,
            "min_power_cap": gpu.min_power_limit_w,
            "max_power_cap": gpu.max_power_limit_w,
        }
        return {name: round((watts or 0.0) * _UW_PER_W) for name, watts in values_w.items()}

    def amdsmi_set_power_cap(self, handle: int, sensor_ind: int, cap: int) -> None:
        """Set the power cap of a GPU in microwatts."""
        assert sensor_ind == 0
        try:
            self._host.set_power_limit(self._uuid(handle), cap / _UW_PER_W)
        except GpuUnsupportedError:
            raise AmdSmiLibraryError(_STATUS_INVAL) from None

    def _uuid(self, handle: int) -> str:
        return self._gpus[handle].gpu_uuid
