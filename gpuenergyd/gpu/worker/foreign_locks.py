"""Clock locks of other programs: what GPUs have shown of them, kept in the journal, so that restores set them again.

A driver has one lock per GPU, and no call reads it. So a lock of another program is known by the clock of a busy GPU
that the driver names no other reason for. A lease of such a GPU stays below that clock, and its restore locks it there
again.
"""

import threading
from collections.abc import Mapping

from gpuenergyd.gpu.device import SAME_CLOCK_MHZ, GpuIdentity
from gpuenergyd.gpu.link.messages import GpuSample
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.worker.threads.actuator import ClockLock, supported_clock_mhz


class ForeignLocks:
    """The locks of other programs by GPU; methods may be called on any thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._locks: dict[str, ClockLock] = {}
        self._guard = threading.Lock()

    def load(self, now_mono_ns: int) -> Mapping[str, int]:
        """Return the locks that an earlier worker has found since the host booted.

        Raises:
            JournalError: the journal cannot be read.
        """
        known = self._journal.foreign_locks_mhz()
        with self._guard:
            self._locks = {uuid: ClockLock(clock_mhz, now_mono_ns) for uuid, clock_mhz in known.items()}
        return known

    def of(self, gpu_uuid: str) -> ClockLock | None:
        """Return the lock of another program, as if it had been set when it was found."""
        return self._locks.get(gpu_uuid)

    def clock_mhz(self, gpu_uuid: str) -> int | None:
        """Return the clock at which another program has locked a GPU; None while none is known."""
        lock = self._locks.get(gpu_uuid)
        return None if lock is None else lock.sm_clock_mhz

    def record(self, gpu_uuid: str, sm_clock_mhz: int | None, now_mono_ns: int) -> None:
        """Record another program's lock, None where it has removed it.

        Raises:
            JournalError: it is not durable; it is known to this worker.
        """
        with self._guard:
            if sm_clock_mhz is None:
                self._locks.pop(gpu_uuid, None)
            else:
                self._locks[gpu_uuid] = ClockLock(sm_clock_mhz, now_mono_ns)
        self._journal.record_foreign_lock(gpu_uuid, sm_clock_mhz)


def foreign_clock_mhz(identity: GpuIdentity, sample: GpuSample) -> int | None:
    """Return the lock that a reading of a busy GPU shows; None for none, or if another reason may hold it down."""
    clocks_mhz, seen_mhz = identity.supported_sm_clocks_mhz, sample.sm_clock_mhz
    if seen_mhz is None or sample.is_clock_limited is not False or seen_mhz >= clocks_mhz[0] - SAME_CLOCK_MHZ:
        return None
    return supported_clock_mhz(clocks_mhz, seen_mhz)
