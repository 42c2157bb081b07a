"""The threads that call the driver, and their supervision: what hangs for one GPU delays no other.

Each GPU has an actuator of its own. Readings share one sampler, so that ticks and the learning of counters are spread
in time, until a call for one GPU takes long: from then on each GPU has a sampler of its own.
"""

import time
from collections.abc import Callable, Iterator
from enum import Enum, auto

from gpuenergyd.gpu.device import GpuDriver, RecallsLocks
from gpuenergyd.gpu.link.messages import ClockChangeReport
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.worker.health import HealthTable
from gpuenergyd.gpu.worker.threads.actuator import Actuator
from gpuenergyd.gpu.worker.threads.driver_turns import DriverTurns
from gpuenergyd.gpu.worker.threads.sampler import Sampler

_LONG_READING_S = 0.5
"""Far above the 0.02 s of the slowest readings known; no other GPU is read while one takes so long."""
_LONG_CHANGE_S = 1.5
"""Far above the 0.03 s of the slowest changes known: a request for several GPUs does not wait for this one."""


class CallState(Enum):
    """What has become of a driver call for a GPU."""

    LONG = auto()
    """A change takes long: reported again and again."""
    HANGING = auto()
    """The driver call does not return: the GPU is wedged."""
    RETURNED = auto()
    """The call returned after all."""


class DriverThreads:
    """An actuator for each GPU, and a sampler for all of them or for each."""

    def __init__(
        self,
        controller: GpuDriver,
        sampler: Sampler,
        journal: Journal,
        health: HealthTable,
        *,
        on_clock_change: Callable[[ClockChangeReport], None],
        read_deadline_s: float,
        set_deadline_s: float,
    ) -> None:
        """Prepare the threads; `sampler` reads all GPUs at first, and `on_clock_change` gets changes that failed."""
        self._health = health
        self._on_clock_change = on_clock_change
        self._read_deadline_s = read_deadline_s
        self._set_deadline_s = set_deadline_s
        # Commands have time limits of their own, of several seconds, after which they are ended and rolled back.
        self._long_change_s = set_deadline_s if isinstance(controller, RecallsLocks) else _LONG_CHANGE_S
        identities = controller.identities()
        self._samplers = {i.gpu_uuid: sampler for i in identities}
        turns = DriverTurns()
        self._actuators = {
            i.gpu_uuid: Actuator(controller, journal, i, turns, on_set=self._follow_up, on_health=health.record)
            for i in identities
        }

    def actuator(self, gpu_uuid: str) -> Actuator:
        return self._actuators[gpu_uuid]

    def sampler(self, gpu_uuid: str) -> Sampler:
        return self._samplers[gpu_uuid]

    @property
    def num_late_ticks(self) -> int:
        """Sampling instants that were skipped."""
        return sum(sampler.num_late_ticks for sampler in set(self._samplers.values()))

    @property
    def num_skipped(self) -> int:
        """Clock requests for a clock that was set already."""
        return sum(actuator.num_skipped for actuator in self._actuators.values())

    def start(self) -> None:
        for thread in dict.fromkeys([*self._samplers.values(), *self._actuators.values()]):
            thread.start()

    def end_actuators(self) -> None:
        """Let the actuators end once all their tasks are done."""
        for actuator in self._actuators.values():
            actuator.close(timeout_s=0.0)

    def is_changing(self) -> bool:
        """Return whether an actuator has something left to do, and is not in a call that takes long."""
        return any(actuator.is_running and not self.takes_long(uuid) for uuid, actuator in self._actuators.items())

    def takes_long(self, gpu_uuid: str) -> bool:
        """Return whether a GPU's actuator is in a call that takes long, so that nobody should wait for it."""
        return self._actuators[gpu_uuid].call.lasted_s(gpu_uuid) > self._long_change_s

    def close_samplers(self, timeout_s: float) -> None:
        """Have the samplers end; wait `timeout_s` for that, for all together."""
        samplers = dict.fromkeys(self._samplers.values())
        for sampler in samplers:
            sampler.close(timeout_s=0.0)
        until_mono_s = time.monotonic() + timeout_s
        for sampler in samplers:
            sampler.close(max(0.0, until_mono_s - time.monotonic()))

    def watch(self) -> Iterator[tuple[str, CallState]]:
        """Yield each GPU whose driver call takes long, does not return, or did after all."""
        for uuid, actuator in self._actuators.items():
            set_s, read_s = actuator.call.lasted_s(uuid), self._samplers[uuid].call.lasted_s(uuid)
            if read_s > _LONG_READING_S:
                self._separate(uuid)
            if self.takes_long(uuid):
                yield uuid, CallState.LONG
            is_stuck = set_s > self._set_deadline_s or read_s > self._read_deadline_s
            if is_stuck and not self._health.is_wedged(uuid):
                deadline_s = self._set_deadline_s if set_s > self._set_deadline_s else self._read_deadline_s
                detail = f"a driver call has not returned for {deadline_s:g} s"
                self._health.mark_wedged(uuid, detail)
                self._samplers[uuid].remove(uuid)
                yield uuid, CallState.HANGING
                actuator.give_up(f"{uuid} is wedged: {detail}")
            elif not is_stuck and self._health.clear_wedged(uuid):
                self._samplers[uuid].add(uuid)
                yield uuid, CallState.RETURNED

    def _separate(self, long_uuid: str) -> None:
        """Have each of the GPUs that are read by the same thread as this one read by a thread of its own."""
        shared = self._samplers[long_uuid]
        for uuid in [uuid for uuid, sampler in self._samplers.items() if sampler is shared and uuid != long_uuid]:
            self._samplers[uuid] = shared.separate(uuid)
            self._samplers[uuid].start()

    def _follow_up(self, change: ClockChangeReport) -> None:
        """Have the sampler watch for the effect of a clock change; one that failed is complete."""
        if change.error is None:
            self.sampler(change.gpu_uuid).await_effect(change)
        else:
            self._on_clock_change(change)
