"""Actuator: the one thread that changes GPUs. Newest clock request wins; tasks such as restores go before requests.

When it is abandoned with a call that does not return, a successor takes over the requests and tasks of the other GPUs.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.errors import GpuEnergyError, GpuLostError, GpuPermissionError
from gpuenergyd.gpu.device import GpuController, GpuIdentity, RecallsLocks
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuHealth
from gpuenergyd.gpu.restore.journal import Control, Journal
from gpuenergyd.gpu.worker.threads.driver_thread import DriverThread

_NS_PER_S = 1_000_000_000
_CALLS_KEPT = 64
"""More than one request can wait for: each GPU has at most one call between two of another GPU."""


@dataclass(frozen=True, slots=True)
class ClockLock:
    """A clock lock that we set, and the instant in ns at which that call returned."""

    sm_clock_mhz: int
    returned_mono_ns: int


@dataclass(slots=True)
class _Slot:
    """One GPU: its pending requests, and our lock; None where none is known to be ours or a call is in progress.

    `num_invalidations` counts the restores, drops and driver reloads that ended our lock: a call that was in progress
    meanwhile must not declare its lock to be in force.
    """

    clocks_mhz: tuple[int, ...]
    """Those up to the lock of another program, if there is one."""
    now: ClockRequest | None = None
    later: deque[ClockRequest] = field(default_factory=deque)
    """In order of their instants."""
    lock: ClockLock | None = None
    num_invalidations: int = 0
    is_failing: bool = False

    def is_raised_by(self, request: ClockRequest) -> bool:
        """Return whether a request raises the clock that we last set."""
        return self.lock is not None and request.sm_clock_mhz > self.lock.sm_clock_mhz

    def invalidate_lock(self) -> None:
        """Assume that our lock is gone, and that one being set now will be."""
        self.lock = None
        self.num_invalidations += 1


@dataclass(frozen=True, slots=True)
class _FinishedCall:
    """A driver call that set a GPU's clock: when it began and returned."""

    gpu_uuid: str
    called_mono_ns: int
    returned_mono_ns: int


@dataclass(frozen=True, slots=True)
class _Task:
    """An action for one GPU, to run before any further clock request."""

    gpu_uuid: str
    action: Callable[[], None]


class Actuator(DriverThread):
    """Sets clocks one after another; the driver serialises its calls anyway.

    `on_set` gets each change when its call has returned, `on_health` the health that a failure implies, `on_returned`
    a GPU whose call returned after the actuator was abandoned; all are called on the actuator's thread. A request for
    a GPU without a journal entry fails: the GPU has been restored.
    """

    def __init__(
        self,
        controller: GpuController,
        journal: Journal,
        identities: Sequence[GpuIdentity],
        *,
        on_set: Callable[[ClockChangeReport], None],
        on_health: Callable[[str, GpuHealth, str], None],
        on_returned: Callable[[str], None],
    ) -> None:
        super().__init__("actuator", on_returned=on_returned)
        self.num_skipped = 0
        self._controller = controller
        self._journal = journal
        self._records_locks = isinstance(controller, RecallsLocks)
        self._identities = identities
        self._on_set = on_set
        self._on_health = on_health
        self._slots = {i.gpu_uuid: _Slot(i.supported_sm_clocks_mhz) for i in identities}
        self._tasks: deque[_Task] = deque()
        self._finished: deque[_FinishedCall] = deque(maxlen=_CALLS_KEPT)

    def succeed(self, stuck_gpu_uuid: str) -> "Actuator":
        """Abandon the thread that is stuck with one GPU; return an actuator for the other GPUs, not started."""
        successor = Actuator(
            self._controller,
            self._journal,
            self._identities,
            on_set=self._on_set,
            on_health=self._on_health,
            on_returned=self._on_returned,
        )
        with self._wakeup:
            self._abandon(stuck_gpu_uuid)
            successor.num_skipped = self.num_skipped
            successor._slots = self._slots
            successor._tasks = deque(t for t in self._tasks if t.gpu_uuid != stuck_gpu_uuid)
            self._slots = {uuid: _Slot(slot.clocks_mhz) for uuid, slot in successor._slots.items()}
            self._tasks = deque()
            successor._slots[stuck_gpu_uuid] = _Slot(self._slots[stuck_gpu_uuid].clocks_mhz)
        return successor

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Queue a request; it replaces earlier requests for this GPU."""
        with self._wakeup:
            slot = self._slots[gpu_uuid]
            if request.sm_clock_mhz:
                slot.now = request
            slot.later = deque(request.later_requests())
            self._wakeup.notify()

    def drop_requests(self, gpu_uuids: Sequence[str]) -> None:
        """Drop the pending clock requests for these GPUs."""
        with self._wakeup:
            for uuid in gpu_uuids:
                self._slots[uuid].now = None
                self._slots[uuid].later.clear()
                self._slots[uuid].invalidate_lock()

    def forget_lock(self, gpu_uuid: str) -> None:
        """Assume that our lock is gone, so the next request sets the clock even if it is the same."""
        with self._wakeup:
            self._slots[gpu_uuid].invalidate_lock()

    def stay_below(self, gpu_uuid: str, sm_clock_mhz: int | None) -> None:
        """Set no clock above this one from now on, which another program has locked; None for any clock."""
        identity = next(own for own in self._identities if own.gpu_uuid == gpu_uuid)
        clocks = identity.supported_sm_clocks_mhz
        with self._wakeup:
            allowed = tuple(c for c in clocks if sm_clock_mhz is None or c <= sm_clock_mhz)
            self._slots[gpu_uuid].clocks_mhz = allowed or clocks[-1:]

    def lock_in_force(self, gpu_uuid: str) -> ClockLock | None:
        """Return our lock; None while a call that changes it is in progress, since either clock may be in force."""
        with self._wakeup:
            return self._slots[gpu_uuid].lock

    def submit(self, gpu_uuid: str, action: Callable[[], None]) -> None:
        """Run an action for one GPU on the actuator's thread, before any further clock request."""
        with self._wakeup:
            self._tasks.append(_Task(gpu_uuid, action))
            self._wakeup.notify()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            self.call.begin(task.gpu_uuid)
            task.action()
            self.call.end()

    def _next(self) -> _Task | None:
        """Wait for the next task; None ends the thread."""
        with self._wakeup:
            while True:
                if self._tasks:
                    return self._tasks.popleft()
                if self._is_closing:
                    return None
                due = self._pop_due()
                if due is not None:
                    uuid, request = due
                    slot = self._slots[uuid]
                    return _Task(uuid, partial(self._apply, slot, uuid, request, slot.num_invalidations))
                self._wakeup.wait(self._until_next_s())

    def _pop_due(self) -> tuple[str, ClockRequest] | None:
        """Remove and return the request to apply next: raises first, since a late raise costs time; then the oldest."""
        now_ns = time.monotonic_ns()
        due: list[tuple[bool, int, str, ClockRequest]] = []
        for uuid, slot in self._slots.items():
            while slot.later and slot.later[0].sent_mono_ns <= now_ns:
                slot.now = slot.later.popleft()
            if slot.now is not None:
                due.append((not slot.is_raised_by(slot.now), slot.now.sent_mono_ns, uuid, slot.now))
        if not due:
            return None
        _, _, uuid, request = min(due, key=lambda entry: entry[:3])
        self._slots[uuid].now = None
        return uuid, request

    def _until_next_s(self) -> float | None:
        dues = [slot.later[0].sent_mono_ns for slot in self._slots.values() if slot.later]
        return max(0.0, (min(dues) - time.monotonic_ns()) / _NS_PER_S) if dues else None

    def _apply(self, slot: _Slot, uuid: str, request: ClockRequest, num_invalidations: int) -> None:
        """Set a clock, unless it is in force or the request was dropped after `num_invalidations` was read."""
        sm_clock_mhz = supported_clock_mhz(slot.clocks_mhz, request.sm_clock_mhz)
        with self._wakeup:
            if slot.num_invalidations != num_invalidations:
                return
            if slot.lock is not None and slot.lock.sm_clock_mhz == sm_clock_mhz:
                self.num_skipped += 1
                return
            slot.lock = None
        called_ns = returned_ns = 0
        error: str | None = None
        try:
            with self._journal.gpu_lock(uuid):
                if not self._journal.holds(uuid, Control.SM_CLOCK_LOCK):
                    error = "the journal has no entry for this GPU: it has been restored"
                else:
                    if self._records_locks:
                        self._journal.record_lock(uuid, sm_clock_mhz, is_settled=False)
                    called_ns = time.monotonic_ns()
                    self._controller.lock_sm_clock(uuid, sm_clock_mhz)
                    returned_ns = time.monotonic_ns()
                    if self._records_locks:
                        self._journal.record_lock(uuid, sm_clock_mhz, is_settled=True)
        except GpuEnergyError as failure:
            error = str(failure)
            slot.is_failing = True
            self._on_health(uuid, health_after(failure), error)
        if error is None and slot.is_failing:
            slot.is_failing = False
            self._on_health(uuid, GpuHealth.OK, "its clock can be set again")
        with self._wakeup:
            if error is None and slot.num_invalidations == num_invalidations:
                slot.lock = ClockLock(sm_clock_mhz, returned_ns)
        blocked_ns = self._blocked_ns(uuid, request.sent_mono_ns, called_ns)
        self._finished.append(_FinishedCall(uuid, called_ns, returned_ns))
        self._on_set(
            ClockChangeReport(
                gpu_uuid=uuid,
                requested_sm_clock_mhz=sm_clock_mhz,
                due_mono_ns=request.sent_mono_ns,
                called_mono_ns=called_ns,
                returned_mono_ns=returned_ns,
                effective_mono_ns=None,
                actual_sm_clock_mhz=None,
                error=error,
                blocked_ns=blocked_ns,
            )
        )

    def _blocked_ns(self, uuid: str, due_ns: int, called_ns: int) -> int:
        """Return how long calls for other GPUs occupied the driver between these instants."""
        return sum(
            max(0, min(call.returned_mono_ns, called_ns) - max(call.called_mono_ns, due_ns))
            for call in self._finished
            if call.gpu_uuid != uuid
        )


def health_after(failure: GpuEnergyError) -> GpuHealth:
    """Return the health that a failure implies for its GPU."""
    if isinstance(failure, GpuLostError):
        return GpuHealth.LOST
    return GpuHealth.OBSERVE_ONLY if isinstance(failure, GpuPermissionError) else GpuHealth.DEGRADED


def supported_clock_mhz(clocks_mhz: Sequence[int], requested_mhz: int) -> int:
    """Return the slowest supported clock that is at least the requested one; the maximum where none is."""
    return min((c for c in clocks_mhz if c >= requested_mhz), default=max(clocks_mhz))
