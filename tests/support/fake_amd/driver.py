"""AMD driver: finds and reads GPUs, and has clocks, power limits and the energy counter. Nothing else."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from gpuenergyd.errors import DriverError, GpuNotFoundError, GpuUnsupportedError
from gpuenergyd.gpu.device import EnergyReading, GpuIdentity, GpuReading
from tests.support.fake_amd.library import AmdSmi, AmdSmiLibraryError

_HZ_PER_MHZ = 1_000_000
_UW_PER_W = 1_000_000


def open_driver(path: Path | None) -> "AmdHost":
    """Open the library; the fake one needs the world of its GPUs."""
    if path is None:
        raise DriverError("the fake AMD driver needs --world PATH")
    return AmdHost(AmdSmi(path))


class AmdHost:
    """The AMD GPUs of this host."""

    def __init__(self, smi: AmdSmi) -> None:
        self._smi = smi
        self._handles = {
            smi.amdsmi_get_gpu_device_uuid(handle): handle for handle in smi.amdsmi_get_processor_handles()
        }
        self._identities = tuple(
            self._identity(index, gpu_uuid) for index, gpu_uuid in enumerate(sorted(self._handles, key=self._handle))
        )

    def identities(self) -> tuple[GpuIdentity, ...]:
        return self._identities

    def observe_only_reasons(self) -> Mapping[str, str]:
        """Return no GPU: all can be controlled."""
        return {}

    def read(self, gpu_uuid: str) -> GpuReading:
        metrics = self._smi.amdsmi_get_gpu_metrics_info(self._handle(gpu_uuid))
        return GpuReading(
            gpu_uuid,
            time.monotonic_ns(),
            power_w=metrics["current_socket_power"],
            total_energy_j=self.read_energy(gpu_uuid).total_energy_j,
            sm_clock_mhz=metrics["current_gfxclk"],
            temperature_celsius=metrics["temperature_hotspot"],
        )

    def close(self) -> None:
        self._smi.amdsmi_shut_down()

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        called_ns = time.monotonic_ns()
        count = self._smi.amdsmi_get_energy_count(self._handle(gpu_uuid))
        took_ns = time.monotonic_ns() - called_ns
        return EnergyReading(
            called_ns + took_ns // 2, took_ns, count["energy_accumulator"] * count["counter_resolution"] / 1e6
        )

    def lock_sm_clock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        """Limit the graphics clock."""
        handle = self._handle(gpu_uuid)
        if sm_clock_mhz not in self._identities[handle].supported_sm_clocks_mhz:
            raise GpuUnsupportedError(f"{sm_clock_mhz} MHz is not a supported clock of {gpu_uuid}")
        with _typed_errors(gpu_uuid):
            self._smi.amdsmi_set_gpu_clk_limit(handle, "sclk", "max", sm_clock_mhz)

    def reset_sm_clock(self, gpu_uuid: str) -> None:
        with _typed_errors(gpu_uuid):
            self._smi.amdsmi_set_gpu_perf_level(self._handle(gpu_uuid), "AUTO")

    def power_limit_w(self, gpu_uuid: str) -> float:
        return self._smi.amdsmi_get_power_cap_info(self._handle(gpu_uuid))["power_cap"] / _UW_PER_W

    def set_power_limit(self, gpu_uuid: str, power_limit_w: float) -> None:
        handle = self._handle(gpu_uuid)
        gpu = self._identities[handle]
        low_w, high_w = gpu.min_power_limit_w or 0.0, gpu.max_power_limit_w or 0.0
        if not low_w <= power_limit_w <= high_w:
            raise GpuUnsupportedError(
                f"power limit {power_limit_w:g} W of {gpu_uuid} is out of range ({low_w:g}-{high_w:g} W)"
            )
        with _typed_errors(gpu_uuid):
            self._smi.amdsmi_set_power_cap(handle, 0, round(power_limit_w * _UW_PER_W))

    def _handle(self, gpu_uuid: str) -> int:
        try:
            return self._handles[gpu_uuid]
        except KeyError:
            raise GpuNotFoundError(f"no GPU {gpu_uuid!r}; known GPUs: {', '.join(self._handles)}") from None

    def _identity(self, index: int, gpu_uuid: str) -> GpuIdentity:
        handle = self._handles[gpu_uuid]
        caps = self._smi.amdsmi_get_power_cap_info(handle)
        clocks_hz = self._smi.amdsmi_get_clk_freq(handle)["frequency"]
        return GpuIdentity(
            gpu_uuid,
            index,
            self._smi.amdsmi_get_gpu_asic_info(handle)["market_name"],
            tuple(sorted((hz // _HZ_PER_MHZ for hz in clocks_hz), reverse=True)),
            is_simulated=False,
            default_power_limit_w=caps["default_power_cap"] / _UW_PER_W,
            driver_version=self._smi.amdsmi_get_gpu_driver_info(handle)["driver_version"],
            min_power_limit_w=caps["min_power_cap"] / _UW_PER_W,
            max_power_limit_w=caps["max_power_cap"] / _UW_PER_W,
        )


@contextlib.contextmanager
def _typed_errors(gpu_uuid: str) -> Iterator[None]:
    """Turn the library's errors into a DriverError."""
    try:
        yield
    except AmdSmiLibraryError as error:
        raise DriverError(f"{gpu_uuid}: AMD SMI failed with status {error}") from None
