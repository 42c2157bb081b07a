"""The daemon's driver for simulated GPUs, with all capabilities except error events."""

import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import GpuNotFoundError, GpuUnsupportedError
from gpuenergyd.gpu.device import EnergyReading, GpuDetails, GpuIdentity, GpuReading
from gpuenergyd.gpu.drivers.published_figures import published_switch_latency_s
from gpuenergyd_sim.driver.device_model import (
    NO_LOCK,
    Activity,
    GpuState,
    draw_call_latency_s,
    draw_settle_s,
    draw_uniform,
    has_worked_lately,
    is_power_capped,
    reported_sm_clock_mhz,
)
from gpuenergyd_sim.driver.device_parameters import MAX_P, DeviceParameters
from gpuenergyd_sim.driver.world import World

CALLS_PER_READING = 4
"""Driver calls in a reading of all values: energy and power, clock, power cap, temperature."""


class SimulatedGpus:
    """The GPUs of one world file, which this process reads and controls."""

    def __init__(
        self, path: Path, *, mono_ns: Callable[[], int] = time.monotonic_ns, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.path = path
        self._world = World(path, mono_ns=mono_ns)
        self._mono_ns = mono_ns
        self._sleep = sleep
        self._index = {uuid: index for index, uuid in enumerate(self._world.uuids)}
        self._identities = tuple(
            GpuIdentity(
                gpu_uuid=uuid,
                index=index,
                model_name=model.model_name,
                supported_sm_clocks_mhz=model.supported_sm_clocks_mhz,
                is_simulated=True,
                default_power_limit_w=model.default_power_limit_w,
                blocking_power_w=model.blocking_power_w if model.is_blocking_power_published else None,
                switch_latency_s=published_switch_latency_s(model.model_name),
                driver_version=_driver_version(model),
                min_power_limit_w=model.min_power_limit_w,
                power_profiles=model.power_profiles,
                max_power_limit_w=model.max_power_limit_w,
            )
            for index, (uuid, model) in enumerate(zip(self._world.uuids, self._world.models, strict=True))
        )

    def release(self, gpu_uuids: Collection[str]) -> None:
        """Do nothing, since there are no handles of single GPUs."""

    def reopen(self, gpu_uuids: Collection[str]) -> tuple[GpuIdentity, ...]:
        return tuple(identity for identity in self.identities() if identity.gpu_uuid in gpu_uuids)

    def close(self) -> None:
        """Close the world file; the GPUs keep their state."""
        self._world.close()

    # Reading

    def identities(self) -> tuple[GpuIdentity, ...]:
        return self._identities

    def read(self, gpu_uuid: str) -> GpuReading:
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        energy = self.read_energy(gpu_uuid) if model.read_s else None
        self._occupy_driver((CALLS_PER_READING - 1) * model.read_s)
        with self._world.gpu(index) as record:
            state = record.state
            return GpuReading(
                gpu_uuid=gpu_uuid,
                read_mono_ns=state.updated_ns if energy is None else energy.read_mono_ns,
                sm_clock_by_mono_ns=None if energy is None else state.updated_ns,
                power_w=state.shown_power_w,
                total_energy_j=state.shown_energy_j if energy is None else energy.total_energy_j,
                sm_clock_mhz=round(reported_sm_clock_mhz(model, state)),
                temperature_celsius=round(state.celsius, 1),
                is_power_capped=is_power_capped(model, state),
                is_clock_limited=state.activity is Activity.IDLE or is_power_capped(model, state),
                utilization_ratio=float(has_worked_lately(state)),
            )

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Return only the energy counter, whose value is taken at a random instant within the call."""
        index = self._at(gpu_uuid)
        read_s = self._world.models[index].read_s
        with self._world.gpu(index) as record:
            called_ns = record.state.updated_ns
            until_seen_s = read_s * draw_uniform(record.state) if read_s else 0.0
            energy_j = record.state.shown_energy_j
        if not read_s:
            return EnergyReading(called_ns, 0, energy_j)
        self._occupy_driver(until_seen_s)
        with self._world.gpu(index) as record:
            energy_j = record.state.shown_energy_j
        self._occupy_driver(read_s - until_seen_s)
        returned_ns = self._mono_ns()
        return EnergyReading((called_ns + returned_ns) // 2, returned_ns - called_ns, energy_j)

    def details(self, gpu_uuid: str) -> GpuDetails:
        """Return power limits and power profiles, the only details of a simulated GPU."""
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        with self._world.gpu(index) as record:
            requested = sorted(_numbers(record.state.power_profiles))
            return GpuDetails(
                power_limit_w=record.state.power_limit_w,
                min_power_limit_w=model.min_power_limit_w,
                max_power_limit_w=model.max_power_limit_w,
                requested_power_profiles=",".join(map(str, requested)) if model.power_profiles else None,
                enforced_power_profiles=",".join(map(str, requested[-1:])) if model.power_profiles else None,
            )

    def observe_only_reasons(self) -> Mapping[str, str]:
        """Return an empty mapping, since every simulated GPU can be controlled."""
        return {}

    def process_ids(self, gpu_uuid: str) -> tuple[int, ...]:
        """Return the pids of the living processes attached to the GPU."""
        index = self._at(gpu_uuid)
        self._occupy_driver(self._world.models[index].process_list_s)
        with self._world.gpu(index) as record:
            record.drop_dead_processes(record.state.updated_ns)
            return tuple(pid for pid, _ in record.processes)

    # Controlling

    def lock_sm_clock(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        """Lock the SM clock; takes as long as a driver call, and takes effect shortly afterwards."""
        clocks = self._identities[self._at(gpu_uuid)].supported_sm_clocks_mhz
        if sm_clock_mhz not in clocks:
            nearest = sorted(sorted(clocks, key=lambda c: abs(c - sm_clock_mhz))[:2])
            raise GpuUnsupportedError(
                f"{sm_clock_mhz} MHz is not a supported SM clock of {gpu_uuid}; supported:"
                f" {count_text(len(clocks), 'clock')} from"
                f" {clocks[-1]} to {clocks[0]} MHz, nearest: {', '.join(map(str, nearest))} MHz"
            )
        self._install(gpu_uuid, sm_clock_mhz)

    def reset_sm_clock(self, gpu_uuid: str) -> None:
        """Remove the clock lock; takes as long as setting one."""
        self._install(gpu_uuid, NO_LOCK)

    def power_limit_w(self, gpu_uuid: str) -> float:
        with self._world.gpu(self._at(gpu_uuid)) as record:
            return record.state.power_limit_w

    def set_power_limit(self, gpu_uuid: str, power_limit_w: float) -> None:
        """Set the power limit; takes as long as setting a clock."""
        model = self._world.models[self._at(gpu_uuid)]
        if not model.min_power_limit_w <= power_limit_w <= model.max_power_limit_w:
            raise GpuUnsupportedError(
                f"power limit {power_limit_w:g} W of {gpu_uuid} is out of range"
                f" ({model.min_power_limit_w:g}-{model.max_power_limit_w:g} W)"
            )
        with self._setting(gpu_uuid) as (state, _):
            state.power_limit_w = power_limit_w

    def requested_power_profiles(self, gpu_uuid: str) -> frozenset[int]:
        self._require_profiles(gpu_uuid)
        with self._world.gpu(self._at(gpu_uuid)) as record:
            return _numbers(record.state.power_profiles)

    def request_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        """Add a workload power profile to the requested ones; takes as long as setting a clock."""
        self._require_profiles(gpu_uuid, power_profile)
        with self._setting(gpu_uuid) as (state, _):
            state.power_profiles |= 1 << power_profile

    def clear_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        self._require_profiles(gpu_uuid, power_profile)
        with self._setting(gpu_uuid) as (state, _):
            state.power_profiles &= ~(1 << power_profile)

    def _require_profiles(self, gpu_uuid: str, power_profile: int = MAX_P) -> None:
        offered = self._world.models[self._at(gpu_uuid)].power_profiles
        if power_profile not in offered:
            known = ", ".join(map(str, offered)) or "none"
            raise GpuUnsupportedError(f"no workload power profile {power_profile} of {gpu_uuid}; offered: {known}")

    def _install(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        stall_s = self._world.models[self._at(gpu_uuid)].set_stall_s
        with self._setting(gpu_uuid, sm_clock_mhz) as (state, settle_s):
            state.stalled_until_ns = state.updated_ns + round(stall_s * 1e9)
            state.pending_mhz = sm_clock_mhz
            state.pending_at_ns = state.updated_ns + round(settle_s * 1e9)
            state.num_clock_sets += 1

    @contextmanager
    def _setting(self, gpu_uuid: str, sm_clock_mhz: int | None = None) -> Iterator[tuple[GpuState, float]]:
        """Spend the time of a call that changes the GPU; yield the state to change, and how long a clock settles."""
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        with self._world.driver_call():
            with self._world.gpu(index) as record:
                latency_s = draw_call_latency_s(model, record.state)
                settle_s = 0.0 if sm_clock_mhz is None else draw_settle_s(model, record.state, sm_clock_mhz)
            self._sleep(latency_s)
            with self._world.gpu(index) as record:
                yield record.state, settle_s

    def _occupy_driver(self, time_s: float) -> None:
        """Spend the time of a reading call; the driver serializes its calls."""
        if time_s > 0.0:
            with self._world.driver_call():
                self._sleep(time_s)

    def _at(self, gpu_uuid: str) -> int:
        try:
            return self._index[gpu_uuid]
        except KeyError:
            known = ", ".join(self._index)
            raise GpuNotFoundError(f"no GPU {gpu_uuid!r}; known GPUs: {known}") from None


def _numbers(mask: int) -> frozenset[int]:
    """Return the positions of the set bits."""
    return frozenset(number for number in range(mask.bit_length()) if mask >> number & 1)


def _driver_version(model: DeviceParameters) -> str:
    """Return a version that differs between GPUs with different parameters, such as those of two kinds of world."""
    return f"simulated-{zlib.crc32(repr(model).encode()):08x}"
