"""Simulated GPUs: the driver for the daemon, and the way for training processes to compute on them."""

import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import DriverError, GpuNotFoundError, GpuUnsupportedError, UsageError
from gpuenergyd.gpu.device import EnergyReading, GpuDetails, GpuIdentity, GpuReading
from gpuenergyd.gpu.drivers.published_figures import published_switch_latency_s
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd_sim.driver.device_model import (
    NO_LOCK,
    NOTHING_PENDING,
    Activity,
    InstructionWork,
    draw_call_latency_s,
    draw_settle_s,
    draw_uniform,
    effective_sm_clock_mhz,
    is_power_capped,
    launch,
    remaining_s,
    reported_sm_clock_mhz,
)
from gpuenergyd_sim.driver.device_parameters import MAX_P, DeviceParameters, device_parameters
from gpuenergyd_sim.driver.world import MAX_PROCESSES, World, create_world
from gpuenergyd_sim.driver.world_kinds import WorldKind, parameters_in

__all__ = ["InstructionWork", "SimulatedHost"]

_LAST_SLEEP_S = 0.0005
_SHORTEST_SLEEP_S = 1e-6
CALLS_PER_READING = 4
"""Calls of the driver in a reading of all values: energy and power, clock, power cap, temperature."""


class LaunchedWork(NamedTuple):
    """What became of the instructions that were launched on a GPU."""

    num_ended: int
    """Instructions that have ended since the world was created."""
    last_ended_mono_ns: int
    before_last_ended_mono_ns: int
    can_launch: bool
    """Whether no launched instruction waits for the running one."""
    remaining_s: float
    """Remaining time of the running instruction at the present clock; 0 without one."""
    least_remaining_s: float
    """The same at the maximum clock."""


class SimulatedHost:
    """The simulated GPUs of one world file, opened by one process.

    Several processes open the same file and see the same GPUs. A clock lock outlives the process that set it.
    """

    def __init__(
        self,
        path: Path,
        *,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
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

    @classmethod
    def create(
        cls,
        path: Path | str,
        model_names: Sequence[str],
        *,
        seed: int = 0,
        kind: WorldKind = WorldKind.KIND,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> Self:
        """Create a world file with one GPU per model key (`a100-sxm`, `a40`, ...) and open it.

        Raises:
            GpuNotFoundError: unknown model key.
            DriverError: the file exists or cannot be written.
        """
        models = [parameters_in(kind, device_parameters(name)) for name in model_names]
        create_world(Path(path), models, seed=seed, now_ns=mono_ns())
        return cls(Path(path), mono_ns=mono_ns, sleep=sleep)

    @classmethod
    def open(cls, path: Path | None) -> Self:
        """Open an existing world file.

        Raises:
            UsageError: there is no path.
            DriverError: the file does not exist or is no world file.
        """
        if path is None:
            raise UsageError("the simulated driver needs the world file of its GPUs: --world PATH")
        return cls(path)

    @property
    def path(self) -> Path:
        """The path of the world file."""
        return self._world.path

    def release(self, gpu_uuids: Collection[str]) -> None:
        """Do nothing: there are no handles of single GPUs."""

    def reopen(self, gpu_uuids: Collection[str]) -> tuple[GpuIdentity, ...]:
        """Return the GPUs' identities."""
        return tuple(identity for identity in self.identities() if identity.gpu_uuid in gpu_uuids)

    def close(self) -> None:
        """Close the world file; the GPUs keep their state."""
        self._world.close()

    def reload_driver(self) -> None:
        """Simulate a driver reload: clock locks and power limits are gone, counters restart at zero."""
        self._world.reset()

    # Reading

    def identities(self) -> tuple[GpuIdentity, ...]:
        """Return the GPUs in order of their index."""
        return self._identities

    def read(self, gpu_uuid: str) -> GpuReading:
        """Return the present values of the GPU's counters and sensors."""
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
            )

    def read_energy(self, gpu_uuid: str) -> EnergyReading:
        """Return the energy counter alone; the driver looks at it at some instant within the call."""
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
        """Return the power limits and power profiles; a simulated GPU has no other details."""
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
        """Return an empty mapping: every simulated GPU can be controlled."""
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
        """Return the present power limit."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            return record.state.power_limit_w

    def set_power_limit(self, gpu_uuid: str, power_limit_w: float) -> None:
        """Set the power limit; takes as long as setting a clock."""
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        if not model.min_power_limit_w <= power_limit_w <= model.max_power_limit_w:
            raise GpuUnsupportedError(
                f"power limit {power_limit_w:g} W of {gpu_uuid} is out of range"
                f" ({model.min_power_limit_w:g}-{model.max_power_limit_w:g} W)"
            )
        with self._world.driver_call():
            with self._world.gpu(index) as record:
                latency_s = draw_call_latency_s(model, record.state)
            self._sleep(latency_s)
            with self._world.gpu(index) as record:
                record.state.power_limit_w = power_limit_w

    def requested_power_profiles(self, gpu_uuid: str) -> frozenset[int]:
        """Return the workload power profiles that all programs together have requested."""
        self._require_profiles(gpu_uuid)
        with self._world.gpu(self._at(gpu_uuid)) as record:
            return _numbers(record.state.power_profiles)

    def request_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        """Add a workload power profile to the requested ones; takes as long as setting a clock."""
        self._require_profiles(gpu_uuid, power_profile)
        self._update_power_profiles(gpu_uuid, added=1 << power_profile)

    def clear_power_profile(self, gpu_uuid: str, power_profile: int) -> None:
        """Remove one workload power profile from the requested ones."""
        self._require_profiles(gpu_uuid, power_profile)
        self._update_power_profiles(gpu_uuid, removed=1 << power_profile)

    def _require_profiles(self, gpu_uuid: str, power_profile: int = MAX_P) -> None:
        offered = self._world.models[self._at(gpu_uuid)].power_profiles
        if power_profile not in offered:
            known = ", ".join(map(str, offered)) or "none"
            raise GpuUnsupportedError(f"no workload power profile {power_profile} of {gpu_uuid}; offered: {known}")

    def _update_power_profiles(self, gpu_uuid: str, *, added: int = 0, removed: int = 0) -> None:
        index = self._at(gpu_uuid)
        with self._world.driver_call():
            with self._world.gpu(index) as record:
                latency_s = draw_call_latency_s(self._world.models[index], record.state)
            self._sleep(latency_s)
            with self._world.gpu(index) as record:
                record.state.power_profiles = (record.state.power_profiles | added) & ~removed

    def locked_sm_clock_mhz(self, gpu_uuid: str) -> int | None:
        """Return the installed clock lock, which a real driver does not report."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            state = record.state
            installed = state.locked_mhz if state.pending_mhz == NOTHING_PENDING else state.pending_mhz
            return None if installed == NO_LOCK else installed

    def num_clock_sets(self, gpu_uuid: str) -> int:
        """Return the number of clock locks and resets of this GPU since the world was created."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            return record.state.num_clock_sets

    def exact_energy_j(self, gpu_uuid: str) -> float:
        """Return the energy consumed up to now, exactly instead of in the counter's steps."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            return record.state.energy_j

    # Computing

    def attach_process(self, gpu_uuid: str, pid: int) -> None:
        """Attach a process: until it detaches or dies, the GPU draws at least blocking power."""
        start_ticks = process_start_ticks(pid)
        if start_ticks is None:
            raise GpuNotFoundError(f"cannot attach process {pid} to {gpu_uuid}: it does not exist")
        with self._world.gpu(self._at(gpu_uuid)) as record:
            record.drop_dead_processes(record.state.updated_ns)
            if (pid, start_ticks) not in record.processes:
                if len(record.processes) == MAX_PROCESSES:
                    raise GpuUnsupportedError(f"{gpu_uuid} already has {MAX_PROCESSES} processes, the maximum")
                record.processes.append((pid, start_ticks))
            record.state.is_occupied = 1

    def detach_process(self, gpu_uuid: str, pid: int) -> None:
        """Detach a process; without any process the GPU is idle."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            record.processes = [p for p in record.processes if p[0] != pid]
            record.state.is_occupied = int(bool(record.processes))

    def begin_work(self, gpu_uuid: str, work: InstructionWork) -> None:
        """Start an instruction; its duration varies slightly, by the random seed of the world."""
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        with self._world.gpu(index) as record:
            record.state.is_working = 0
            launch(model, record.state, work)

    def launch_work(self, gpu_uuid: str, work: InstructionWork) -> None:
        """Launch an instruction: it begins when the running one ends, at once if there is none.

        Raises:
            DriverError: another instruction waits already.
        """
        index = self._at(gpu_uuid)
        with self._world.gpu(index) as record:
            if record.state.has_next_work:
                raise DriverError(f"{gpu_uuid}: an instruction waits already for the end of the running one")
            launch(self._world.models[index], record.state, work)

    def launched_work(self, gpu_uuid: str) -> LaunchedWork:
        """Return what became of the instructions that were launched."""
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        with self._world.gpu(index) as record:
            state = record.state
            at_max = effective_sm_clock_mhz(model, state) / model.max_sm_clock_mhz if state.has_work else 1.0
            return LaunchedWork(
                num_ended=state.num_works_ended,
                last_ended_mono_ns=state.last_ended_ns,
                before_last_ended_mono_ns=state.before_last_ended_ns,
                can_launch=not state.has_next_work,
                remaining_s=remaining_s(model, state),
                least_remaining_s=remaining_s(model, state) * at_max,
            )

    def remaining_s(self, gpu_uuid: str) -> float:
        """Return the remaining time of the running instruction at the present clock."""
        index = self._at(gpu_uuid)
        with self._world.gpu(index) as record:
            return remaining_s(self._world.models[index], record.state)

    def finish_work(self, gpu_uuid: str) -> int:
        """End the running instruction, complete or not; the GPU then waits.

        Returns:
            The instant at which it ended on the GPU, as a CUDA event would report it, which is before the process
            that waited for it woke up.
        """
        with self._world.gpu(self._at(gpu_uuid)) as record:
            state = record.state
            state.is_working = state.has_next_work = 0
            state.work_left_ratio = 0.0
            return state.work_ended_ns or state.updated_ns

    def hold(self, gpu_uuid: str, *, poll_s: float = 0.002, sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait until the running instruction has ended.

        The clock may change meanwhile. Even at the maximum clock, the work cannot end before
        remaining * clock / maximum, so the method sleeps that long at once: a few checks per instruction.
        """
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        while True:
            with self._world.gpu(index) as record:
                left_s = remaining_s(model, record.state)
                share = effective_sm_clock_mhz(model, record.state) / model.max_sm_clock_mhz
            if left_s <= 0.0:
                return
            slice_s = max(left_s * share, poll_s)
            if slice_s >= left_s:  # near the end: long sleeps overshoot more than short ones
                slice_s = left_s if left_s < 2 * _LAST_SLEEP_S else left_s - _LAST_SLEEP_S
            sleep(max(slice_s, _SHORTEST_SLEEP_S))

    def _install(self, gpu_uuid: str, sm_clock_mhz: int) -> None:
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        with self._world.driver_call():
            with self._world.gpu(index) as record:
                latency_s = draw_call_latency_s(model, record.state)
                settle_s = draw_settle_s(model, record.state, sm_clock_mhz)
            self._sleep(latency_s)
            with self._world.gpu(index) as record:
                state = record.state
                state.stalled_until_ns = state.updated_ns + round(model.set_stall_s * 1e9)
                state.pending_mhz = sm_clock_mhz
                state.pending_at_ns = state.updated_ns + round(settle_s * 1e9)
                state.num_clock_sets += 1

    def _occupy_driver(self, time_s: float) -> None:
        """Spend the time of a call that reads; the driver serialises its calls."""
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
    """Return the numbers of the bits that are set."""
    return frozenset(number for number in range(mask.bit_length()) if mask >> number & 1)


def _driver_version(model: DeviceParameters) -> str:
    """Return a version that differs between GPUs with different parameters, such as those of two kinds of world."""
    return f"simulated-{zlib.crc32(repr(model).encode()):08x}"
