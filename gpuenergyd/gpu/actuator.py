"""The one thread that changes GPUs: newest wish wins, nothing stale is queued, restores go before wishes."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gpuenergyd.errors import GpuEnergyError, GpuLostError
from gpuenergyd.gpu.device import GpuController, GpuIdentity
from gpuenergyd.gpu.journal import Control, Journal
from gpuenergyd.gpu.link_messages import ClockSet, GpuHealth

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Wish:
    """A clock for one GPU, from `due_mono_ns` on."""

    sm_clock_mhz: int
    due_mono_ns: int
    asked_mono_ns: int


@dataclass(slots=True)
class _Slot:
    """What is wished of one GPU, and what we last set; None is not known to be ours."""

    clocks_mhz: tuple[int, ...]
    now: Wish | None = None
    later: Wish | None = None
    in_force_mhz: int | None = None
    is_failing: bool = False


@dataclass(slots=True)
class DriverCall:
    """The call that a thread is inside of, for whoever watches over it."""

    gpu_uuid: str | None = None
    since_mono_ns: int = 0


@dataclass(slots=True)
class Actuator:
    """Sets clocks one after another, as the driver would anyway.

    `on_set` gets each change when its call has returned, `on_health` what a failure says about a GPU; both are
    called on the actuator's thread. A GPU whose journal entry is gone is no longer ours: its wishes are dropped.
    """

    controller: GpuController
    journal: Journal
    identities: Sequence[GpuIdentity]
    on_set: Callable[[ClockSet], None]
    on_health: Callable[[str, GpuHealth, str], None]
    num_skipped: int = 0
    call: DriverCall = field(default_factory=DriverCall)
    _slots: dict[str, _Slot] = field(init=False)
    _commands: deque[Callable[[], None]] = field(default_factory=deque)
    _wakeup: threading.Condition = field(default_factory=threading.Condition)
    _is_closing: bool = False
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._slots = {i.gpu_uuid: _Slot(i.supported_sm_clocks_mhz) for i in self.identities}

    def start(self) -> None:
        """Begin to work."""
        self._thread = threading.Thread(target=self._run, name="actuator", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Finish the commands given so far and end."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def abandon(self) -> None:
        """Give up on a thread that a driver call does not return to: should it return, it ends."""
        with self._wakeup:
            self._is_closing = True
            self._commands.clear()
            for slot in self._slots.values():
                slot.now = slot.later = None

    def wish(
        self, gpu_uuid: str, sm_clock_mhz: int, *, later_sm_clock_mhz: int, later_at_mono_ns: int, asked_mono_ns: int
    ) -> None:
        """Take a wish; it replaces what was wished of this GPU before. 0 MHz is no wish."""
        slot = self._slots[gpu_uuid]
        with self._wakeup:
            if sm_clock_mhz:
                slot.now = Wish(sm_clock_mhz, asked_mono_ns, asked_mono_ns)
                slot.later = None
            if later_sm_clock_mhz:
                slot.later = Wish(later_sm_clock_mhz, later_at_mono_ns, asked_mono_ns)
            self._wakeup.notify()

    def drop_wishes(self, gpu_uuids: Sequence[str]) -> None:
        """Forget what is wished of these GPUs."""
        with self._wakeup:
            for uuid in gpu_uuids:
                self._slots[uuid].now = self._slots[uuid].later = None
                self._slots[uuid].in_force_mhz = None

    def command(self, action: Callable[[], None]) -> None:
        """Run something on the actuator's thread before any further wish."""
        with self._wakeup:
            self._commands.append(action)
            self._wakeup.notify()

    def _run(self) -> None:
        while True:
            with self._wakeup:
                action: Callable[[], None] | None = None
                while action is None:
                    if self._commands:
                        action = self._commands.popleft()
                    elif self._is_closing:
                        return
                    elif (due := self._take_due()) is not None:
                        uuid, wish = due
                        action = lambda uuid=uuid, wish=wish: self._apply(uuid, wish)  # noqa: E731 - one line of glue
                    else:
                        self._wakeup.wait(self._until_next_s())
            action()

    def _take_due(self) -> tuple[str, Wish] | None:
        """Return the wish that has been due longest, and take it out."""
        now_ns = time.monotonic_ns()
        best: tuple[str, Wish] | None = None
        for uuid, slot in self._slots.items():
            if slot.later is not None and slot.later.due_mono_ns <= now_ns:
                slot.now, slot.later = slot.later, None
            if slot.now is not None and (best is None or slot.now.due_mono_ns < best[1].due_mono_ns):
                best = (uuid, slot.now)
        if best is not None:
            self._slots[best[0]].now = None
        return best

    def _until_next_s(self) -> float | None:
        dues = [slot.later.due_mono_ns for slot in self._slots.values() if slot.later is not None]
        return max(0.0, (min(dues) - time.monotonic_ns()) / _NS_PER_S) if dues else None

    def _apply(self, uuid: str, wish: Wish) -> None:
        slot = self._slots[uuid]
        sm_clock_mhz = supported_clock_mhz(slot.clocks_mhz, wish.sm_clock_mhz)
        if slot.in_force_mhz == sm_clock_mhz:
            self.num_skipped += 1
            return
        called_ns = returned_ns = 0
        error: str | None = None
        try:
            with self.journal.gpu_lock(uuid):
                if not self.journal.holds(uuid, Control.SM_CLOCK_LOCK):
                    error = "the journal holds no entry for this GPU: somebody restored it"
                else:
                    called_ns = time.monotonic_ns()
                    self.call.since_mono_ns, self.call.gpu_uuid = called_ns, uuid
                    try:
                        self.controller.lock_sm_clock(uuid, sm_clock_mhz)
                    finally:
                        self.call.gpu_uuid = None
                    returned_ns = time.monotonic_ns()
        except GpuEnergyError as failure:
            error = str(failure)
            slot.is_failing = True
            self.on_health(uuid, GpuHealth.LOST if isinstance(failure, GpuLostError) else GpuHealth.DEGRADED, error)
        if error is None and slot.is_failing:
            slot.is_failing = False
            self.on_health(uuid, GpuHealth.OK, "its clock can be set again")
        slot.in_force_mhz = None if error else sm_clock_mhz
        self.on_set(
            ClockSet(
                gpu_uuid=uuid,
                requested_sm_clock_mhz=sm_clock_mhz,
                asked_mono_ns=wish.asked_mono_ns,
                called_mono_ns=called_ns,
                returned_mono_ns=returned_ns,
                effective_mono_ns=None,
                actual_sm_clock_mhz=None,
                error=error,
            )
        )


def supported_clock_mhz(clocks_mhz: Sequence[int], wished_mhz: int) -> int:
    """Return the slowest supported clock that is no slower than the wish; the maximum when the wish is above it."""
    return min((c for c in clocks_mhz if c >= wished_mhz), default=max(clocks_mhz))
