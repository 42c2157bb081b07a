"""Clock locks that other programs set over ours: seen in samples; our lease of the GPU ends, and their lock stays.

A driver has one lock per GPU, and no call reads it. So a lock of another program is known by the clock of a busy GPU
that the driver names no other reason for. A lease of such a GPU stays below that clock, and its restore locks it there
again. The journal keeps the locks that were found.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

from gpuenergyd.errors import GpuEnergyError, JournalError
from gpuenergyd.gpu.device import SAME_CLOCK_MHZ, GpuDriver, GpuIdentity, HasClocks, require_capability
from gpuenergyd.gpu.link.messages import GpuHealth, GpuSample
from gpuenergyd.gpu.restore.journal import Control, Journal
from gpuenergyd.gpu.restore.policy import RestorePolicy
from gpuenergyd.gpu.worker.daemon_connection import log
from gpuenergyd.gpu.worker.health import HealthTable
from gpuenergyd.gpu.worker.leases import Leases
from gpuenergyd.gpu.worker.threads.actuator import ClockLock, supported_clock_mhz
from gpuenergyd.gpu.worker.threads.driver_threads import DriverThreads
from gpuenergyd.gpu.worker.threads.sample_stream import ForeignChangeDetector

FOREIGN_CHANGE = "another program changed its clock lock"


class ForeignChanges:
    """Watches for locks of other programs. `check` is called on the sampler's thread; the actuator's thread acts."""

    def __init__(
        self,
        controller: GpuDriver,
        journal: Journal,
        threads: DriverThreads,
        leases: Leases,
        health: HealthTable,
        *,
        identities: Callable[[], Sequence[GpuIdentity]],
        restore_policy: Callable[[], RestorePolicy],
        on_found: Callable[[], None],
    ) -> None:
        self._locks: dict[str, ClockLock] = {}
        """The locks of other programs, as if each had been set when it was found."""
        self._controller = controller
        self._detector = ForeignChangeDetector()
        self._dropped_mhz: dict[str, int] = {}
        """Our own locks that a GPU ran below when their leases ended."""
        self._journal = journal
        self._threads = threads
        self._leases = leases
        self._health = health
        self._identities = identities
        self._restore_policy = restore_policy
        self._on_found = on_found

    def load(self) -> None:
        """Stay below the locks that an earlier worker has found."""
        try:
            known = self._journal.foreign_locks_mhz()
        except JournalError:
            return  # the restore at the start reports it
        now_ns = time.monotonic_ns()
        self._locks = {uuid: ClockLock(clock_mhz, now_ns) for uuid, clock_mhz in known.items()}
        for identity in self._identities():
            self._threads.actuator(identity.gpu_uuid).stay_below(known.get(identity.gpu_uuid))

    def clock_mhz(self, gpu_uuid: str) -> int | None:
        """Return the clock at which another program has locked a GPU; None while none is known."""
        lock = self._locks.get(gpu_uuid)
        return None if lock is None else lock.sm_clock_mhz

    def check(self, sample: GpuSample, lock: ClockLock | None) -> None:
        """Check a sample against our lock, or against the known one of another program while we have set none.

        Under a workload power profile of ours a GPU may run below any lock, without a reason that the driver names.
        """
        uuid = sample.gpu_uuid
        if self._has_our_profile(uuid):
            return
        if lock is not None:
            self._dropped_mhz.pop(uuid, None)
            self._resolve_doubt(sample, lock)
        foreign = self._in_force(uuid) if lock is None else None
        if not self._detector.is_detected(sample, lock or foreign):
            return
        if lock is not None:
            self._threads.actuator(uuid).submit(partial(self._yield, sample, lock))
        elif foreign is not None:
            self._threads.actuator(uuid).submit(partial(self._follow, sample, foreign))

    def _resolve_doubt(self, sample: GpuSample, lock: ClockLock) -> None:
        """Trust a doubtful lock again that a busy GPU shows."""
        actuator = self._threads.actuator(sample.gpu_uuid)
        if not actuator.is_lock_doubtful() or sample.is_clock_limited is not False or sample.sm_clock_mhz is None:
            return
        if abs(sample.sm_clock_mhz - lock.sm_clock_mhz) <= SAME_CLOCK_MHZ:
            actuator.trust_lock(sample.read_mono_ns - sample.clock_age_ns)

    def _has_our_profile(self, uuid: str) -> bool:
        try:
            return self._journal.holds(uuid, Control.POWER_PROFILE)
        except JournalError:
            return False

    def _in_force(self, uuid: str) -> ClockLock | None:
        """Return another program's lock, unless a lock of ours may be in force."""
        foreign = self._locks.get(uuid)
        try:
            return foreign if foreign is not None and not self._journal.holds(uuid, Control.SM_CLOCK_LOCK) else None
        except JournalError:
            return None

    def _yield(self, sample: GpuSample, lock: ClockLock) -> None:
        """Drop the lease of a GPU that another program changed, and leave that program's clocks alone.

        A lock that was restored or replaced since the detection says nothing about the GPU's present lease.
        """
        uuid = sample.gpu_uuid
        actuator = self._threads.actuator(uuid)
        if actuator.lock_in_force() != lock:
            return
        if actuator.is_lock_doubtful() and (sample.sm_clock_mhz or 0) > lock.sm_clock_mhz:
            actuator.forget_lock()
            seen = f"it runs at {sample.sm_clock_mhz} MHz, above our lock at {lock.sm_clock_mhz} MHz"
            log(f"{uuid}: {seen}, since its energy counter fell: the driver was reloaded and its clock lock is gone")
            return
        self._leases.drop([uuid])
        actuator.drop_requests()
        if self._restore_policy() is not RestorePolicy.RESTORE:
            try:
                self._journal.remove({(uuid, Control.SM_CLOCK_LOCK)})
            except JournalError as error:
                log(str(error))
            self._record(sample)
        is_below = sample.sm_clock_mhz is not None and sample.sm_clock_mhz < lock.sm_clock_mhz
        if is_below:
            self._dropped_mhz[uuid] = lock.sm_clock_mhz
        side = "below" if is_below else "above"
        detail = f"{FOREIGN_CHANGE}: it runs at {sample.sm_clock_mhz} MHz, {side} ours; lease dropped"
        self._health.record(uuid, GpuHealth.DEGRADED, detail)

    def _follow(self, sample: GpuSample, known: ClockLock) -> None:
        """Record that another program has changed its own lock, while we have set none."""
        uuid = sample.gpu_uuid
        if self._threads.actuator(uuid).lock_in_force() is not None or self._locks.get(uuid) != known:
            return
        dropped_mhz = self._dropped_mhz.pop(uuid, None)
        if dropped_mhz is not None and abs((sample.sm_clock_mhz or 0) - dropped_mhz) <= SAME_CLOCK_MHZ:
            self._remove_ours(uuid, dropped_mhz)
        else:
            self._record(sample)

    def _remove_ours(self, uuid: str, sm_clock_mhz: int) -> None:
        """Reset a lock of ours that was taken for replaced: the GPU had been slower for another reason."""
        log(f"{uuid} runs at {sm_clock_mhz} MHz again, our last lock: no program has replaced it; resetting it")
        try:
            with self._journal.gpu_lock(uuid):
                if self._journal.holds(uuid, Control.SM_CLOCK_LOCK):
                    return
                require_capability(self._controller, HasClocks).reset_sm_clock(uuid)
            self._keep(uuid, None)
        except GpuEnergyError as error:
            log(f"{uuid}: {error}")
            self._dropped_mhz[uuid] = sm_clock_mhz
            return
        self._threads.actuator(uuid).stay_below(None)
        self._health.resolve(uuid, FOREIGN_CHANGE, "its clock lock was ours, and is removed")
        self._on_found()

    def _record(self, sample: GpuSample) -> None:
        """Have leases of a GPU stay below the lock that a reading shows, and restores set it again."""
        uuid = sample.gpu_uuid
        clock_mhz = foreign_clock_mhz(next(gpu for gpu in self._identities() if gpu.gpu_uuid == uuid), sample)
        try:
            self._keep(uuid, clock_mhz)
        except JournalError as error:
            log(str(error))
        self._threads.actuator(uuid).stay_below(clock_mhz)
        self._on_found()
        what = "no lock of another program" if clock_mhz is None else f"locked at {clock_mhz} MHz by another program"
        log(f"{uuid}: {what}")

    def _keep(self, uuid: str, sm_clock_mhz: int | None) -> None:
        """Keep another program's lock, None where it has removed it.

        Raises:
            JournalError: it is not durable; it is known to this worker.
        """
        if sm_clock_mhz is None:
            self._locks.pop(uuid, None)
        else:
            self._locks[uuid] = ClockLock(sm_clock_mhz, time.monotonic_ns())
        self._journal.record_foreign_lock(uuid, sm_clock_mhz)


def foreign_clock_mhz(identity: GpuIdentity, sample: GpuSample) -> int | None:
    """Return the lock that a reading of a busy GPU shows; None for none, or if another reason may hold it down."""
    clocks_mhz, seen_mhz = identity.supported_sm_clocks_mhz, sample.sm_clock_mhz
    if seen_mhz is None or sample.is_clock_limited is not False or seen_mhz >= clocks_mhz[0] - SAME_CLOCK_MHZ:
        return None
    return supported_clock_mhz(clocks_mhz, seen_mhz)
