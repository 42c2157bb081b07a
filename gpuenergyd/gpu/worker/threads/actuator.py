"""The one thread that changes GPUs: newest wish wins, nothing stale is queued, restores go before wishes.

When it is abandoned with a call that does not return, a successor takes over the wishes and orders of all other GPUs.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gpuenergyd.core.clock_request import ClockRequest
from gpuenergyd.errors import GpuEnergyError, GpuLostError, GpuPermissionError
from gpuenergyd.gpu.device import GpuController, GpuIdentity
from gpuenergyd.gpu.link.messages import ClockSet, GpuHealth
from gpuenergyd.gpu.restore.journal import Control, Journal
from gpuenergyd.gpu.worker.threads.driver_thread import DriverThread

_NS_PER_S = 1_000_000_000
_CALLS_KEPT = 64
"""More than one wish can wait for: each GPU has one call at most between two of another."""


@dataclass(slots=True)
class _Slot:
    """What is wished of one GPU, and what we last set; None is not known to be ours."""

    clocks_mhz: tuple[int, ...]
    now: ClockRequest | None = None
    later: ClockRequest | None = None
    in_force_mhz: int | None = None
    set_mono_ns: int = 0
    is_failing: bool = False

    def is_raised_by(self, request: ClockRequest) -> bool:
        """Return whether a request makes the GPU faster, as far as we know."""
        return self.in_force_mhz is not None and request.sm_clock_mhz > self.in_force_mhz


@dataclass(frozen=True, slots=True)
class _FinishedCall:
    """A call that set a clock: which GPU's, and when it began and returned."""

    gpu_uuid: str
    called_mono_ns: int
    returned_mono_ns: int


@dataclass(frozen=True, slots=True)
class _Order:
    """Something to do for one GPU before any further wish."""

    gpu_uuid: str
    action: Callable[[], None]


class Actuator(DriverThread):
    """Sets clocks one after another, as the driver would anyway.

    `on_set` gets each change when its call has returned, `on_health` what a failure says about a GPU, `on_returned`
    a GPU whose call came back after the actuator was abandoned; all are called on the actuator's thread. A GPU whose
    journal entry is gone is no longer ours: its wishes are dropped.
    """

    def __init__(
        self,
        controller: GpuController,
        journal: Journal,
        identities: Sequence[GpuIdentity],
        *,
        on_set: Callable[[ClockSet], None],
        on_health: Callable[[str, GpuHealth, str], None],
        on_returned: Callable[[str], None],
    ) -> None:
        super().__init__("actuator", on_returned=on_returned)
        self.num_skipped = 0
        self._controller = controller
        self._journal = journal
        self._identities = identities
        self._on_set = on_set
        self._on_health = on_health
        self._slots = {i.gpu_uuid: _Slot(i.supported_sm_clocks_mhz) for i in identities}
        self._orders: deque[_Order] = deque()
        self._finished: deque[_FinishedCall] = deque(maxlen=_CALLS_KEPT)

    def succeed(self, stuck_gpu_uuid: str) -> "Actuator":
        """Abandon the thread that is stuck with one GPU, and return an actuator with everything else, not started."""
        heir = Actuator(
            self._controller,
            self._journal,
            self._identities,
            on_set=self._on_set,
            on_health=self._on_health,
            on_returned=self._on_returned,
        )
        with self._wakeup:
            self._abandon(stuck_gpu_uuid)
            heir.num_skipped = self.num_skipped
            heir._slots = self._slots
            heir._orders = deque(o for o in self._orders if o.gpu_uuid != stuck_gpu_uuid)
            self._slots = {uuid: _Slot(slot.clocks_mhz) for uuid, slot in heir._slots.items()}
            self._orders = deque()
            heir._slots[stuck_gpu_uuid] = _Slot(self._slots[stuck_gpu_uuid].clocks_mhz)
        return heir

    def request_clock(self, gpu_uuid: str, request: ClockRequest) -> None:
        """Queue a request; it replaces earlier requests for this GPU."""
        with self._wakeup:
            slot = self._slots[gpu_uuid]
            if request.sm_clock_mhz:
                slot.now = request
                slot.later = None
            if request.later_sm_clock_mhz:
                slot.later = request.later_request()
            self._wakeup.notify()

    def drop_requests(self, gpu_uuids: Sequence[str]) -> None:
        """Drop the pending clock requests for these GPUs."""
        with self._wakeup:
            for uuid in gpu_uuids:
                self._slots[uuid].now = self._slots[uuid].later = None
                self._slots[uuid].in_force_mhz = None

    def forget_lock(self, gpu_uuid: str) -> None:
        """Take no lock for granted: the driver has forgotten it, or somebody else changed it."""
        with self._wakeup:
            self._slots[gpu_uuid].in_force_mhz = None

    def lock_in_force(self, gpu_uuid: str) -> tuple[int, int] | None:
        """Return the clock we locked and when that call returned, if we did."""
        with self._wakeup:
            slot = self._slots[gpu_uuid]
            return None if slot.in_force_mhz is None else (slot.in_force_mhz, slot.set_mono_ns)

    def order(self, gpu_uuid: str, action: Callable[[], None]) -> None:
        """Run something that concerns one GPU on the actuator's thread, before any further wish."""
        with self._wakeup:
            self._orders.append(_Order(gpu_uuid, action))
            self._wakeup.notify()

    def _work(self) -> None:
        while (order := self._next()) is not None:
            self.call.begin(order.gpu_uuid)
            order.action()
            self.call.end()

    def _next(self) -> _Order | None:
        """Wait for what is to be done next; None is the end."""
        with self._wakeup:
            while True:
                if self._orders:
                    return self._orders.popleft()
                if self._is_closing:
                    return None
                due = self._take_due()
                if due is not None:
                    uuid, request = due
                    return _Order(uuid, partial(self._apply, uuid, request))
                self._wakeup.wait(self._until_next_s())

    def _take_due(self) -> tuple[str, ClockRequest] | None:
        """Return the wish to carry out next, and take it out: raises first, a late one costs time; then by age."""
        now_ns = time.monotonic_ns()
        due: list[tuple[bool, int, str, ClockRequest]] = []
        for uuid, slot in self._slots.items():
            if slot.later is not None and slot.later.sent_mono_ns <= now_ns:
                slot.now, slot.later = slot.later, None
            if slot.now is not None:
                due.append((not slot.is_raised_by(slot.now), slot.now.sent_mono_ns, uuid, slot.now))
        if not due:
            return None
        _, _, uuid, request = min(due, key=lambda entry: entry[:3])
        self._slots[uuid].now = None
        return uuid, request

    def _until_next_s(self) -> float | None:
        dues = [slot.later.sent_mono_ns for slot in self._slots.values() if slot.later is not None]
        return max(0.0, (min(dues) - time.monotonic_ns()) / _NS_PER_S) if dues else None

    def _apply(self, uuid: str, request: ClockRequest) -> None:
        slot = self._slots[uuid]
        sm_clock_mhz = supported_clock_mhz(slot.clocks_mhz, request.sm_clock_mhz)
        if slot.in_force_mhz == sm_clock_mhz:
            self.num_skipped += 1
            return
        called_ns = returned_ns = 0
        error: str | None = None
        try:
            with self._journal.gpu_lock(uuid):
                if not self._journal.holds(uuid, Control.SM_CLOCK_LOCK):
                    error = "the journal holds no entry for this GPU: somebody restored it"
                else:
                    called_ns = time.monotonic_ns()
                    self._controller.lock_sm_clock(uuid, sm_clock_mhz)
                    returned_ns = time.monotonic_ns()
        except GpuEnergyError as failure:
            error = str(failure)
            slot.is_failing = True
            self._on_health(uuid, health_after(failure), error)
        if error is None and slot.is_failing:
            slot.is_failing = False
            self._on_health(uuid, GpuHealth.OK, "its clock can be set again")
        slot.in_force_mhz, slot.set_mono_ns = None if error else sm_clock_mhz, returned_ns
        blocked_ns = self._blocked_ns(uuid, request.sent_mono_ns, called_ns)
        self._finished.append(_FinishedCall(uuid, called_ns, returned_ns))
        self._on_set(
            ClockSet(
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
        """Return how long, between these instants, calls for other GPUs kept the driver."""
        return sum(
            max(0, min(call.returned_mono_ns, called_ns) - max(call.called_mono_ns, due_ns))
            for call in self._finished
            if call.gpu_uuid != uuid
        )


def health_after(failure: GpuEnergyError) -> GpuHealth:
    """Return what a failure says about its GPU."""
    if isinstance(failure, GpuLostError):
        return GpuHealth.LOST
    return GpuHealth.OBSERVE_ONLY if isinstance(failure, GpuPermissionError) else GpuHealth.DEGRADED


def supported_clock_mhz(clocks_mhz: Sequence[int], wished_mhz: int) -> int:
    """Return the slowest supported clock that is no slower than the wish; the maximum when the wish is above it."""
    return min((c for c in clocks_mhz if c >= wished_mhz), default=max(clocks_mhz))
