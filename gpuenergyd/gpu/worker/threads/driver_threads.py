"""The two threads that call the driver, the one that sets and the one that reads: watched, and replaced when stuck."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.link.messages import ClockSet, GpuSample
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.worker.health import GpuStates
from gpuenergyd.gpu.worker.options import WorkerOptions
from gpuenergyd.gpu.worker.threads.actuator import Actuator
from gpuenergyd.gpu.worker.threads.sampler import Sampler

_NS_PER_S = 1_000_000_000


class DriverThreads:
    """`actuator` and `sampler` are those that work now.

    `on_samples`, `on_clock_set` and `on_counter_reset` are called on their threads; `on_wedged` and `on_returned` get
    a GPU during `watch`.
    """

    def __init__(
        self,
        controller: GpuController,
        journal: Journal,
        options: WorkerOptions,
        states: GpuStates,
        *,
        on_samples: Callable[[Sequence[GpuSample]], None],
        on_clock_set: Callable[[ClockSet], None],
        on_counter_reset: Callable[[str], None],
        on_wedged: Callable[[str], None],
        on_returned: Callable[[str], None],
    ) -> None:
        self._options = options
        self._states = states
        self._on_clock_set = on_clock_set
        self._on_wedged = on_wedged
        self._on_returned = on_returned
        self._returned: deque[str] = deque()
        self._is_ending = False
        identities = controller.identities()
        self.sampler = Sampler(
            controller,
            [i.gpu_uuid for i in identities],
            period_s=options.sample_period_s,
            on_samples=on_samples,
            on_settled=on_clock_set,
            on_health=states.note,
            on_counter_reset=on_counter_reset,
            on_returned=self._returned.append,
        )
        self.actuator = Actuator(
            controller,
            journal,
            identities,
            on_set=self._clock_was_set,
            on_health=states.note,
            on_returned=self._returned.append,
        )

    def start(self) -> None:
        """Begin to read and to set."""
        self.sampler.start()
        self.actuator.start()

    def end_actuator(self) -> None:
        """Have all orders given so far carried out, by successors too; `watch` goes on until `actuator` has ended."""
        self._is_ending = True
        self.actuator.close(timeout_s=0.0)

    def watch(self) -> None:
        """Replace threads that do not return, take GPUs back whose call did."""
        for thread, deadline_s in (
            (self.sampler, self._options.read_deadline_s),
            (self.actuator, self._options.set_deadline_s),
        ):
            stuck, since_ns = thread.call.gpu_uuid, thread.call.since_mono_ns
            if stuck and time.monotonic_ns() - since_ns > deadline_s * _NS_PER_S:
                self._states.wedge(stuck, f"a driver call has not returned for {deadline_s:g} s")
                self._replace(thread, stuck)
                self._on_wedged(stuck)
        while self._returned:
            uuid = self._returned.popleft()
            if self._states.unwedge(uuid):
                self.sampler.leave_out(uuid)
                self.sampler.take_in(uuid)
                self._on_returned(uuid)

    def _replace(self, thread: Sampler | Actuator, stuck: str) -> None:
        """Leave a thread alone with the GPU whose call does not return; the other GPUs get a new one."""
        if isinstance(thread, Sampler):
            self.sampler = thread.succeed(stuck)
            self.sampler.start()
            self.actuator.drop_requests([stuck])
            return
        self.sampler.leave_out(stuck)
        self.actuator = thread.succeed(stuck)
        self.actuator.start()
        if self._is_ending:
            self.actuator.close(timeout_s=0.0)

    def _clock_was_set(self, change: ClockSet) -> None:
        if change.error is None:
            self.sampler.await_effect(change)
        else:
            self._on_clock_set(change)
