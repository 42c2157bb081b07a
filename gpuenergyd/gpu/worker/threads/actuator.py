"""Actuator: the thread that changes one GPU. Newest clock request wins; tasks such as restores go before requests.

Each GPU has one, so a call that does not return delays that GPU alone. Clock changes of several GPUs take turns.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.errors import GpuEnergyError, GpuLostError, GpuPermissionError
from gpuenergyd.gpu.device import GpuDriver, GpuIdentity, HasClocks, RecallsLocks, require_capability
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuHealth
from gpuenergyd.gpu.restore.journal import Control, Journal
from gpuenergyd.gpu.worker.threads.driver_thread import DriverThread
from gpuenergyd.gpu.worker.threads.driver_turns import DriverTurns, FinishedCall, Urgency

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ClockLock:
    """A clock lock that we set, and the instant in ns at which that call returned."""

    sm_clock_mhz: int
    returned_mono_ns: int


@dataclass(slots=True)
class _Slot:
    """The pending requests, and our lock; None where none is known to be ours or a call is in progress.

    `num_invalidations` counts the restores, drops and driver reloads that ended our lock: a call that was in progress
    at the time must not declare its lock to be in force.
    """

    clocks_mhz: tuple[int, ...]
    """Clocks that may be set: all supported ones, up to the lock of another program if there is one."""
    now: ClockRequest | None = None
    later: deque[ClockRequest] = field(default_factory=deque)
    """Later requests, in order of their instants."""
    lock: ClockLock | None = None
    num_invalidations: int = 0
    is_failing: bool = False
    is_doubtful: bool = False
    """Whether our lock may be gone: the same clock is set again."""
    doubted_mono_ns: int = 0

    def invalidate_lock(self) -> None:
        """Assume that our lock is gone, and that one being set now will be."""
        self.lock = None
        self.is_doubtful = False
        self.num_invalidations += 1


@dataclass(frozen=True, slots=True)
class _Task:
    """An action, to run before any further clock request, and what to do if it never can."""

    action: Callable[[], None]
    refuse: Callable[[str], None]


class Actuator(DriverThread):
    """Sets the clock of one GPU, and runs tasks that call the driver for it.

    `on_set` gets each change when its call has returned, `on_health` the health that a failure implies; both are called
    on the actuator's thread. A request for a GPU without a journal entry fails: the GPU has been restored.
    """

    def __init__(
        self,
        controller: GpuDriver,
        journal: Journal,
        identity: GpuIdentity,
        turns: DriverTurns,
        *,
        on_set: Callable[[ClockChangeReport], None],
        on_health: Callable[[str, GpuHealth, str], None],
    ) -> None:
        super().__init__(f"actuator {identity.index}")
        self.num_skipped = 0
        self._controller = controller
        self._clocks = controller if isinstance(controller, HasClocks) else None
        self._journal = journal
        self._records_locks = isinstance(controller, RecallsLocks)
        self._uuid = identity.gpu_uuid
        self._clocks_mhz = identity.supported_sm_clocks_mhz
        self._turns = turns
        self._on_set = on_set
        self._on_health = on_health
        self._slot = _Slot(identity.supported_sm_clocks_mhz)
        self._tasks: deque[_Task] = deque()
        self._present: _Task | None = None

    def request_clock(self, request: ClockRequest) -> None:
        """Queue a request; it replaces earlier requests."""
        with self._wakeup:
            if request.sm_clock_mhz:
                self._slot.now = request
            self._slot.later = deque(request.later_requests())
            self._wakeup.notify()
        self._turns.reconsider()

    def drop_requests(self) -> None:
        """Drop the pending clock requests."""
        with self._wakeup:
            self._slot.now = None
            self._slot.later.clear()
            self._slot.invalidate_lock()
        self._turns.reconsider()

    def forget_lock(self) -> None:
        """Assume that our lock is gone, so the next request sets the clock even if it is the same."""
        with self._wakeup:
            self._slot.invalidate_lock()

    def doubt_lock(self) -> bool:
        """Assume that our lock may be gone, until the GPU shows which; return whether there is one."""
        with self._wakeup:
            self._slot.is_doubtful = self._slot.lock is not None
            self._slot.doubted_mono_ns = time.monotonic_ns()
            return self._slot.is_doubtful

    def trust_lock(self, shown_since_mono_ns: int) -> None:
        """Assume that our lock is in force again if the GPU has shown it since it was doubted."""
        with self._wakeup:
            self._slot.is_doubtful &= shown_since_mono_ns < self._slot.doubted_mono_ns

    def is_lock_doubtful(self) -> bool:
        """Return whether our lock may be gone."""
        return self._slot.is_doubtful

    def stay_below(self, sm_clock_mhz: int | None) -> None:
        """Set no clock above this one from now on, which another program has locked; None for any clock."""
        with self._wakeup:
            allowed = tuple(c for c in self._clocks_mhz if sm_clock_mhz is None or c <= sm_clock_mhz)
            self._slot.clocks_mhz = allowed or self._clocks_mhz[-1:]

    def lock_in_force(self) -> ClockLock | None:
        """Return our lock; None while a call that changes it is in progress, since either clock may be in force."""
        with self._wakeup:
            return self._slot.lock

    def submit(self, action: Callable[[], None], refuse: Callable[[str], None] = lambda _: None) -> None:
        """Run an action on the actuator's thread, before any further clock request; see `give_up` for `refuse`."""
        with self._wakeup:
            self._tasks.append(_Task(action, refuse))
            self._wakeup.notify()

    def give_up(self, reason: str) -> None:
        """Drop all requests and tasks, and have the tasks refused: the call in progress does not return."""
        self.drop_requests()
        with self._wakeup:
            dropped = [*([] if self._present is None else [self._present]), *self._tasks]
            self._tasks.clear()
        for task in dropped:
            task.refuse(reason)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            self.call.begin(self._uuid)
            try:
                task.action()
            except Exception as error:  # noqa: BLE001 - whatever went wrong, the GPU's next restore must be tried
                self._on_health(self._uuid, GpuHealth.DEGRADED, f"unexpected {error!r}")
                task.refuse(f"unexpected {error!r}")
            self.call.end()

    def _next(self) -> _Task | None:
        """Wait for the next task; None ends the thread."""
        with self._wakeup:
            self._present = None
            while True:
                if self._tasks:
                    self._present = self._tasks.popleft()
                    return self._present
                if self._is_closing:
                    return None
                slot, now_ns = self._slot, time.monotonic_ns()
                while slot.later and slot.later[0].sent_mono_ns <= now_ns:
                    slot.now = slot.later.popleft()
                if slot.now is not None:
                    return _Task(self._apply_in_turn, lambda _: None)
                self._wakeup.wait(max(0.0, (slot.later[0].sent_mono_ns - now_ns) / _NS_PER_S) if slot.later else None)

    def _urgency(self) -> Urgency:
        """Return how urgent the newest request is: a late raise costs time; without one, the turn is over at once."""
        with self._wakeup:
            request, lock = self._slot.now, self._slot.lock
            if request is None or self._tasks:
                return False, 0
            return lock is None or request.sm_clock_mhz <= lock.sm_clock_mhz, request.sent_mono_ns

    def _apply_in_turn(self) -> None:
        """Apply the newest request when it is this GPU's turn, unless a task has come up by then."""
        with self._turns.turn(self._uuid, self._urgency):
            with self._wakeup:
                if self._tasks or self._slot.now is None:
                    return
                request, self._slot.now = self._slot.now, None
                num_invalidations = self._slot.num_invalidations
            self._apply(request, num_invalidations)

    def _apply(self, request: ClockRequest, num_invalidations: int) -> None:
        """Set a clock, unless it is in force or the request was dropped after `num_invalidations` was read."""
        slot, uuid = self._slot, self._uuid
        self.call.begin(uuid)
        sm_clock_mhz = supported_clock_mhz(slot.clocks_mhz, request.sm_clock_mhz)
        with self._wakeup:
            if slot.num_invalidations != num_invalidations:
                return
            if slot.lock is not None and slot.lock.sm_clock_mhz == sm_clock_mhz and not slot.is_doubtful:
                self.num_skipped += 1
                return
            slot.lock, slot.is_doubtful = None, False
        called_ns = returned_ns = 0
        error: str | None = None
        try:
            with self._journal.gpu_lock(uuid):
                if not self._journal.holds(uuid, Control.SM_CLOCK_LOCK):
                    error = "the journal has no entry for this GPU: it has been restored"
                else:
                    if self._records_locks:
                        self._journal.record_lock(uuid, sm_clock_mhz, is_settled=False)
                    clocks = self._clocks or require_capability(self._controller, HasClocks)
                    called_ns = time.monotonic_ns()
                    clocks.lock_sm_clock(uuid, sm_clock_mhz)
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
        blocked_ns = self._turns.blocked_ns(uuid, request.sent_mono_ns, called_ns)
        self._turns.record(FinishedCall(uuid, called_ns, returned_ns))
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


def health_after(failure: GpuEnergyError) -> GpuHealth:
    if isinstance(failure, GpuLostError):
        return GpuHealth.LOST
    return GpuHealth.OBSERVE_ONLY if isinstance(failure, GpuPermissionError) else GpuHealth.DEGRADED


def supported_clock_mhz(clocks_mhz: Sequence[int], requested_mhz: int) -> int:
    """Return the slowest supported clock that is at least the requested one; the maximum where none is."""
    return min((c for c in clocks_mhz if c >= requested_mhz), default=max(clocks_mhz))
