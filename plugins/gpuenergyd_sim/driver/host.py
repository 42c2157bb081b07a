"""Simulated GPUs: the driver for the daemon, and the interface with which training processes compute on them."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from gpuenergyd.errors import DriverError, GpuNotFoundError, GpuUnsupportedError, UsageError
from gpuenergyd.gpu.process_identity import process_start_ticks
from gpuenergyd_sim.driver.controller import SimulatedGpus
from gpuenergyd_sim.driver.device_model import (
    NO_LOCK,
    NOTHING_PENDING,
    InstructionWork,
    effective_sm_clock_mhz,
    launch,
    remaining_s,
)
from gpuenergyd_sim.driver.device_parameters import device_parameters
from gpuenergyd_sim.driver.world import MAX_PROCESSES, create_world
from gpuenergyd_sim.driver.world_kinds import WorldKind, parameters_in

__all__ = ["InstructionWork", "SimulatedHost"]

_LAST_SLEEP_S = 0.0005
_SHORTEST_SLEEP_S = 1e-6


class LaunchedWork(NamedTuple):
    """State of the instructions launched on a GPU."""

    num_ended: int
    """Number of instructions that have ended since the world was created."""
    last_ended_mono_ns: int
    before_last_ended_mono_ns: int
    can_launch: bool
    """Whether no launched instruction waits for the running one."""
    remaining_s: float
    """Remaining time of the running instruction at the present clock; 0 without one."""
    least_remaining_s: float
    """Remaining time of the running instruction at the maximum clock; 0 without one."""


class SimulatedHost(SimulatedGpus):
    """The simulated GPUs of one world file, opened by one process.

    Several processes open the same file and see the same GPUs. A clock lock outlives the process that set it.
    """

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
            DriverError: the file does not exist or is not a world file.
        """
        if path is None:
            raise UsageError("the simulated driver needs the world file of its GPUs: --world PATH")
        return cls(path)

    def reload_driver(self) -> None:
        """Simulate a driver reload, which removes clock locks and power limits and resets counters to zero."""
        self._world.reset()

    # What no real driver reports

    def locked_sm_clock_mhz(self, gpu_uuid: str) -> int | None:
        """Return the installed clock lock, if any."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            state = record.state
            installed = state.locked_mhz if state.pending_mhz == NOTHING_PENDING else state.pending_mhz
            return None if installed == NO_LOCK else installed

    def num_clock_sets(self, gpu_uuid: str) -> int:
        """Return the number of clock locks and resets of this GPU since the world was created."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            return record.state.num_clock_sets

    def exact_energy_j(self, gpu_uuid: str) -> float:
        """Return the exact energy consumed up to now, without the counter's steps."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            return record.state.energy_j

    # Computing

    def attach_process(self, gpu_uuid: str, pid: int) -> None:
        """Attach a process; until it detaches or dies, the GPU draws at least blocking power."""
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
        """Detach a process; without any process, the GPU is idle."""
        with self._world.gpu(self._at(gpu_uuid)) as record:
            record.processes = [p for p in record.processes if p[0] != pid]
            record.state.is_occupied = int(bool(record.processes))

    def begin_work(self, gpu_uuid: str, work: InstructionWork) -> None:
        """Start an instruction, whose duration varies slightly with the world's random seed."""
        index = self._at(gpu_uuid)
        model = self._world.models[index]
        with self._world.gpu(index) as record:
            record.state.is_working = 0
            launch(model, record.state, work)

    def launch_work(self, gpu_uuid: str, work: InstructionWork) -> None:
        """Launch an instruction, which begins when the running one ends, or at once if there is none.

        Raises:
            DriverError: another instruction waits already.
        """
        index = self._at(gpu_uuid)
        with self._world.gpu(index) as record:
            if record.state.has_next_work:
                raise DriverError(f"{gpu_uuid}: an instruction waits already for the end of the running one")
            launch(self._world.models[index], record.state, work)

    def launched_work(self, gpu_uuid: str) -> LaunchedWork:
        """Return the state of the launched instructions."""
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

        The clock may change during the work. Even at the maximum clock, the work cannot end before
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
