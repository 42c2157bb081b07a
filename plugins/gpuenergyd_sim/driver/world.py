"""World file of the simulated GPUs: one record per GPU, shared by the daemon and the training processes.

Theory of operation. The file is mapped by every process. A record holds the parameters of its GPU, written once, and
two copies of its state with a selector byte. A change goes to the copy not in use, then the selector flips: one byte,
so a process killed during a write leaves either the old state or the new. Records are guarded by locks that the kernel
releases when their holder dies (open file description locks, one byte of the file per GPU). All instants are those of
the host's monotonic clock. A reboot restarts that clock and clears the state of a real driver, so the state is reset
when the file was written under another boot.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from gpuenergyd.errors import DriverError
from gpuenergyd.gpu.process_identity import process_start_ticks, read_boot_id
from gpuenergyd_sim.driver.device_model import GpuState, advance, update_phase_ns
from gpuenergyd_sim.driver.device_parameters import DeviceParameters

MAX_PROCESSES = 8
_MAGIC = b"GPUEWLD2"
_HEADER = struct.Struct("<8sIIIIq40s")
_HEADER_BYTES = 256
_RECORD_BYTES = 1536
_IDENTITY = struct.Struct("<64s64s16sq")
_PARAMETERS_OFFSET = 160
_SELECTOR_OFFSET = 504
_SLOT_OFFSETS = (512, 1024)
_SLOT = struct.Struct(f"<8qQ8q14d{2 * MAX_PROCESSES}qq")
_LOCK_HEADER, _LOCK_DRIVER, _LOCK_FIRST_GPU = 0, 1, 16
_LIVENESS_CHECK_NS = 5_000_000
_STRING_FIELDS = 3
_NUMBER_FIELDS = tuple(f.name for f in fields(DeviceParameters))[:-_STRING_FIELDS]
_PARAMETERS = struct.Struct(f"<{len(_NUMBER_FIELDS)}d")
_state_values = attrgetter(*(f.name for f in fields(GpuState)))
_NUM_STATE_VALUES = len(fields(GpuState))


@dataclass(slots=True)
class GpuRecord:
    """The state of one GPU while its lock is held; changes are stored when the lock is released."""

    state: GpuState
    processes: list[tuple[int, int]]
    """Host pid and start time of each process with a context on the GPU."""
    checked_ns: int

    def drop_dead_processes(self, now_ns: int) -> None:
        """Remove processes that have ended; unfinished work ends with the last one."""
        self.checked_ns = now_ns
        if not self.processes:
            return
        self.processes = [(pid, start) for pid, start in self.processes if process_start_ticks(pid) == start]
        if not self.processes:
            self.state.is_occupied = 0
            self.state.is_working = 0
            self.state.has_next_work = 0


class World:
    """An open world file."""

    def __init__(self, path: Path, *, mono_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.path = path
        self._mono_ns = mono_ns
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DriverError(f"cannot open the simulated GPUs in {path}: {error.strerror}") from None
        self._owner_pid = os.getpid()
        head = os.pread(self._fd, _HEADER.size, 0)
        if len(head) < _HEADER.size or head[:8] != _MAGIC:
            os.close(self._fd)
            raise DriverError(f"{path} is not a world file of simulated GPUs; create one with SimulatedHost.create")
        _, self.num_gpus, header_bytes, record_bytes, slot_bytes, self._seed, _ = _HEADER.unpack(head)
        if (header_bytes, record_bytes, slot_bytes) != (_HEADER_BYTES, _RECORD_BYTES, _SLOT.size):
            os.close(self._fd)
            raise DriverError(f"{path} was created by another version of gpuenergyd; delete it and create it again")
        self._map = mmap.mmap(self._fd, _HEADER_BYTES + self.num_gpus * _RECORD_BYTES)
        self._gpu_locks = [threading.Lock() for _ in range(self.num_gpus)]
        self._driver_lock = threading.Lock()
        self.uuids: list[str] = []
        self.models: list[DeviceParameters] = []
        for index in range(self.num_gpus):
            offset = _HEADER_BYTES + index * _RECORD_BYTES
            uuid, name, key, is_published = _IDENTITY.unpack_from(self._map, offset)
            numbers = _PARAMETERS.unpack_from(self._map, offset + _PARAMETERS_OFFSET)
            self.uuids.append(_text(uuid))
            known: dict[str, Any] = dict(zip(_NUMBER_FIELDS, numbers, strict=True))
            known |= {"key": _text(key), "model_name": _text(name), "is_blocking_power_published": bool(is_published)}
            self.models.append(DeviceParameters(**known))
        self._reset_if_rebooted()

    @contextlib.contextmanager
    def gpu(self, index: int) -> Iterator[GpuRecord]:
        """Lock one GPU and advance its state to now; an exception in the block leaves the state unchanged."""
        self._reopen_after_fork()
        with self._gpu_locks[index], self._kernel_lock(_LOCK_FIRST_GPU + index):
            now_ns = self._mono_ns()
            record = self._load(index)
            advance(self.models[index], record.state, now_ns)
            if now_ns - record.checked_ns >= _LIVENESS_CHECK_NS:
                record.drop_dead_processes(now_ns)
            yield record
            self._store(index, record)

    @contextlib.contextmanager
    def driver_call(self) -> Iterator[None]:
        """Hold the host-wide driver lock, which serialises all calls that change a GPU."""
        self._reopen_after_fork()
        with self._driver_lock, self._kernel_lock(_LOCK_DRIVER):
            yield

    def reset(self) -> None:
        """Reset all GPUs as a driver reload does: no locks, default limits, counters at zero."""
        now_ns = self._mono_ns()
        for index, model in enumerate(self.models):
            with self.gpu(index) as record:
                fresh = _new_record(model, index, self._seed, now_ns)
                fresh.state.energy_j = fresh.state.shown_energy_j = 0.0
                fresh.state.is_occupied = record.state.is_occupied
                fresh.state.num_clock_sets = record.state.num_clock_sets
                record.state = fresh.state

    def close(self) -> None:
        """Close the file; the GPUs continue without this process."""
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1

    def _load(self, index: int) -> GpuRecord:
        offset = _HEADER_BYTES + index * _RECORD_BYTES
        slot = _SLOT_OFFSETS[self._map[offset + _SELECTOR_OFFSET] & 1]
        values = _SLOT.unpack_from(self._map, offset + slot)
        table = values[_NUM_STATE_VALUES:-1]
        processes = [(table[k], table[k + 1]) for k in range(0, 2 * MAX_PROCESSES, 2) if table[k]]
        return GpuRecord(GpuState(*values[:_NUM_STATE_VALUES]), processes, values[-1])

    def _store(self, index: int, record: GpuRecord) -> None:
        offset = _HEADER_BYTES + index * _RECORD_BYTES
        unused = 1 - (self._map[offset + _SELECTOR_OFFSET] & 1)
        begin = offset + _SLOT_OFFSETS[unused]
        self._map[begin : begin + _SLOT.size] = _pack(record)
        self._map[offset + _SELECTOR_OFFSET] = unused

    @contextlib.contextmanager
    def _kernel_lock(self, position: int) -> Iterator[None]:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, _flock(fcntl.F_WRLCK, position))
        try:
            yield
        finally:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, position))

    def _reopen_after_fork(self) -> None:
        """Open the file again in a forked child: an inherited file description shares its locks with the parent."""
        if os.getpid() == self._owner_pid:
            return
        self._fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        self._gpu_locks = [threading.Lock() for _ in range(self.num_gpus)]
        self._driver_lock = threading.Lock()
        self._owner_pid = os.getpid()

    def _reset_if_rebooted(self) -> None:
        with self._kernel_lock(_LOCK_HEADER):
            *_, boot_id = _HEADER.unpack_from(self._map, 0)
            if _text(boot_id) == read_boot_id():
                return
            for index, model in enumerate(self.models):
                self._store(index, _new_record(model, index, self._seed, self._mono_ns()))
            _HEADER.pack_into(self._map, 0, *_header_values(self.num_gpus, self._seed))


def create_world(path: Path, models: Sequence[DeviceParameters], *, seed: int, now_ns: int) -> None:
    """Create a world file with one GPU per model, atomically.

    Raises:
        DriverError: the file exists or cannot be written.
    """
    content = bytearray(_HEADER_BYTES + len(models) * _RECORD_BYTES)
    _HEADER.pack_into(content, 0, *_header_values(len(models), seed))
    for index, model in enumerate(models):
        offset = _HEADER_BYTES + index * _RECORD_BYTES
        uuid = f"GPU-51a00000-0000-4000-8000-{seed & 0xFFFFFFFF:08x}{index:04x}"
        _IDENTITY.pack_into(
            content,
            offset,
            uuid.encode(),
            model.model_name.encode(),
            model.key.encode(),
            int(model.is_blocking_power_published),
        )
        _PARAMETERS.pack_into(
            content, offset + _PARAMETERS_OFFSET, *(float(getattr(model, name)) for name in _NUMBER_FIELDS)
        )
        packed = _pack(_new_record(model, index, seed, now_ns))
        begin = offset + _SLOT_OFFSETS[0]
        content[begin : begin + len(packed)] = packed
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        fd = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, content)
        finally:
            os.close(fd)
        try:
            os.link(unfinished, path)
        finally:
            unfinished.unlink()
    except OSError as error:
        raise DriverError(f"cannot create the simulated GPUs in {path}: {error.strerror}") from None


def _new_record(model: DeviceParameters, index: int, seed: int, now_ns: int) -> GpuRecord:
    energy_at_ns = _last_edge(now_ns, model.energy_update_s, index, seed, 1)
    power_at_ns = _last_edge(now_ns, model.power_update_s, index, seed, 2)
    energy_j = 1000.0 * (1 + (seed * 37 + index * 11) % 97)
    state = GpuState(
        updated_ns=now_ns,
        shown_energy_at_ns=energy_at_ns,
        shown_power_at_ns=power_at_ns,
        random_state=(seed * 0x632BE59BD9B4E019 + index * 0x2545F4914F6CDD1D + 1) & ((1 << 64) - 1),
        energy_j=energy_j,
        celsius=model.warm_celsius,
        power_limit_w=model.default_power_limit_w,
        shown_energy_j=energy_j,
        shown_power_w=model.idle_power_w,
        sampled_energy_j=energy_j,
        window_energy_j=energy_j,
    )
    return GpuRecord(state, [], 0)


def _last_edge(now_ns: int, period_s: float, index: int, seed: int, what: int) -> int:
    period_ns = round(period_s * 1e9)
    phase_ns = update_phase_ns(index, seed, period_ns, what)
    return phase_ns + (now_ns - phase_ns) // period_ns * period_ns


def _pack(record: GpuRecord) -> bytes:
    table = [value for process in record.processes for value in process]
    table += [0] * (2 * MAX_PROCESSES - len(table))
    return _SLOT.pack(*_state_values(record.state), *table, record.checked_ns)


def _header_values(num_gpus: int, seed: int) -> tuple[bytes, int, int, int, int, int, bytes]:
    return (_MAGIC, num_gpus, _HEADER_BYTES, _RECORD_BYTES, _SLOT.size, seed, read_boot_id().encode())


def _flock(kind: int, position: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, position, 1, 0)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode()
