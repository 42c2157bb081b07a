"""Injects faults, delays, critical errors and modes into the fake driver library, from any process."""

import mmap
import struct
from pathlib import Path
from typing import Self

_MAX_GPUS, _MAX_FAULTS, _MAX_XIDS = 16, 32, 64
_HEAD = struct.Struct("<3q")
_FAULT = struct.Struct("<64s7q")
_XIDS_AT = _HEAD.size
_MIG_AT = _XIDS_AT + 16 * _MAX_XIDS
_PERSISTENCE_AT = _MIG_AT + 8 * _MAX_GPUS
_PROFILES_AT = _PERSISTENCE_AT + 8 * _MAX_GPUS
_MEMORY_LOCKS_AT = _PROFILES_AT + 8 * _MAX_GPUS
_APPLICATION_CLOCKS_AT = _MEMORY_LOCKS_AT + 8 * _MAX_GPUS
_SMOOTHING_AT = _APPLICATION_CLOCKS_AT + 8 * _MAX_GPUS
_HOLDERS_AT = _SMOOTHING_AT + 32 * _MAX_GPUS
_MAX_HOLDERS = 32
_FAULTS_AT = _HOLDERS_AT + 16 * _MAX_HOLDERS
_SIZE = _FAULTS_AT + _FAULT.size * _MAX_FAULTS


class FakeNvmlControl:
    """The control file beside a world; make it before the library is loaded."""

    def __init__(self, world_path: Path) -> None:
        path = world_path.with_name(world_path.name + ".nvml")
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _SIZE)
        for index in range(_MAX_GPUS):
            struct.pack_into("<q", self._map, _PERSISTENCE_AT + 8 * index, 1)

    def close(self) -> None:
        """Let go of the file; what was injected stays."""
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def inject(
        self,
        function: str,
        code: int = 0,
        *,
        gpu_index: int = -1,
        after_calls: int = 0,
        num_calls: int = -1,
        delay_s: float = 0.0,
    ) -> None:
        """Let a function (or `field_186`, or `*`) return a code, hang, or both; -1: any GPU or no limit."""
        for slot in range(_MAX_FAULTS):
            at = _FAULTS_AT + slot * _FAULT.size
            if not self._map[at]:
                values = (gpu_index, code, after_calls, num_calls, round(delay_s * 1e9), 0, 0)
                body = _FAULT.pack(function.encode(), *values)
                self._map[at + 64 : at + _FAULT.size] = body[64:]
                self._map[at : at + 64] = body[:64]
                return
        raise AssertionError("no room for another fault")

    def clear_faults(self) -> None:
        """Take all faults back; a call that hangs goes on hanging."""
        self._map[_FAULTS_AT:_SIZE] = bytes(_SIZE - _FAULTS_AT)

    def num_hits(self, function: str) -> int:
        """Return how often the faults of a function struck."""
        total = 0
        for slot in range(_MAX_FAULTS):
            name, *_, hits = _FAULT.unpack_from(self._map, _FAULTS_AT + slot * _FAULT.size)
            total += hits if name.rstrip(b"\0").decode() == function else 0
        return total

    def set_privileged(self, is_privileged: bool | None) -> None:  # noqa: FBT001 - None, True and False are the rule
        """Allow or forbid changes to everybody; None goes by CAP_SYS_ADMIN, as the driver does."""
        struct.pack_into("<q", self._map, 0, {None: 0, True: 1, False: 2}[is_privileged])

    def forbid_changes(self) -> None:
        """End every process that calls a function that changes something, even with its present value."""
        struct.pack_into("<q", self._map, 0, 3)

    def set_mig(self, gpu_index: int, *, is_on: bool) -> None:
        struct.pack_into("<q", self._map, _MIG_AT + 8 * gpu_index, int(is_on))

    def set_persistence(self, gpu_index: int, *, is_on: bool) -> None:
        """Switch persistence mode of one GPU."""
        struct.pack_into("<q", self._map, _PERSISTENCE_AT + 8 * gpu_index, int(is_on))

    def set_power_profiles(self, gpu_index: int, *profiles: int) -> None:
        """Request workload power profiles of one GPU, which supports them from then on."""
        mask = sum(1 << profile for profile in profiles)
        struct.pack_into("<q", self._map, _PROFILES_AT + 8 * gpu_index, 1 + 2 * mask)

    def lock_memory_clock(self, gpu_index: int, memory_clock_mhz: int) -> None:
        """Lock the memory clock of one GPU; 0 for no lock."""
        struct.pack_into("<q", self._map, _MEMORY_LOCKS_AT + 8 * gpu_index, memory_clock_mhz)

    def set_application_clock(self, gpu_index: int, sm_clock_mhz: int) -> None:
        """Set the SM clock for applications of one GPU; 0 for the default."""
        struct.pack_into("<q", self._map, _APPLICATION_CLOCKS_AT + 8 * gpu_index, sm_clock_mhz)

    def set_power_smoothing(self, gpu_index: int, *, is_on: bool, profile: int, floors_w: tuple[int, int]) -> None:
        """Set power smoothing of one GPU, which supports it from then on."""
        struct.pack_into("<4q", self._map, _SMOOTHING_AT + 32 * gpu_index, 1 + is_on, profile, *floors_w)

    def holders(self, gpu_index: int) -> set[int]:
        """Return the pids of live processes that have opened a GPU; while there are any it cannot be reset."""
        slots = struct.iter_unpack("<2q", self._map[_HOLDERS_AT:_FAULTS_AT])
        return {pid for pid, gpus in slots if pid and gpus >> gpu_index & 1 and Path(f"/proc/{pid}").exists()}

    def reload_driver(self) -> None:
        """Make every handle and every initialisation invalid; the world forgets locks by itself."""
        (epoch,) = struct.unpack_from("<q", self._map, 8)
        struct.pack_into("<q", self._map, 8, epoch + 1)

    def raise_xid(self, gpu_index: int, xid: int) -> None:
        """Report a critical error of one GPU."""
        (count,) = struct.unpack_from("<q", self._map, 16)
        struct.pack_into("<2q", self._map, _XIDS_AT + 16 * (count % _MAX_XIDS), gpu_index, xid)
        struct.pack_into("<q", self._map, 16, count + 1)
