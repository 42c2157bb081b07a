"""Supervision of the two threads that call the driver, actuator and sampler: replaces one that is stuck in a call."""

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from gpuenergyd.gpu.device import GpuController
from gpuenergyd.gpu.link.messages import ClockChangeReport, GpuSample
from gpuenergyd.gpu.restore.journal import Journal
from gpuenergyd.gpu.worker.health import HealthTable
from gpuenergyd.gpu.worker.threads.actuator import Actuator
from gpuenergyd.gpu.worker.threads.sampler import Sampler

_NS_PER_S = 1_000_000_000


class DriverThreadsListener(Protocol):
    """Receiver of what the driver threads observe."""

    def handle_samples(self, samples: Sequence[GpuSample]) -> None:
        """Process readings; on the sampler's thread."""
        ...

    def handle_clock_change(self, change: ClockChangeReport) -> None:
        """Process a clock change whose effect is known or that failed; on either thread."""
        ...

    def handle_counter_reset(self, gpu_uuid: str) -> None:
        """React to an energy counter that restarted; on the sampler's thread."""
        ...

    def handle_wedged(self, gpu_uuid: str) -> None:
        """React to a driver call that does not return; during `watch`."""
        ...

    def handle_returned(self, gpu_uuid: str) -> None:
        """Process the late return of a call that had been reported as hung; called during `watch`."""
        ...


class DriverThreads:
    """The pair of threads; `actuator` and `sampler` are those that work now."""

    def __init__(
        self,
        controller: GpuController,
        journal: Journal,
        health: HealthTable,
        listener: DriverThreadsListener,
        *,
        sample_period_s: float,
        read_deadline_s: float,
        set_deadline_s: float,
    ) -> None:
        self._health = health
        self._listener = listener
        self._read_deadline_s = read_deadline_s
        self._set_deadline_s = set_deadline_s
        self._returned: deque[str] = deque()
        self._is_ending = False
        identities = controller.identities()
        self.sampler = Sampler(
            controller,
            [i.gpu_uuid for i in identities],
            period_s=sample_period_s,
            on_samples=listener.handle_samples,
            on_settled=listener.handle_clock_change,
            on_health=health.record,
            on_counter_reset=listener.handle_counter_reset,
            on_returned=self._returned.append,
        )
        self.actuator = Actuator(
            controller,
            journal,
            identities,
            on_set=self._follow_up,
            on_health=health.record,
            on_returned=self._returned.append,
        )

    def start(self) -> None:
        """Start both threads."""
        self.sampler.start()
        self.actuator.start()

    def end_actuator(self) -> None:
        """Let the actuator and its successors end once all tasks are done; call `watch` until `actuator` has ended."""
        self._is_ending = True
        self.actuator.close(timeout_s=0.0)

    def watch(self) -> None:
        """Replace threads whose driver call does not return, and reinstate GPUs whose call did."""
        for thread, deadline_s in ((self.sampler, self._read_deadline_s), (self.actuator, self._set_deadline_s)):
            stuck, since_ns = thread.call.gpu_uuid, thread.call.since_mono_ns
            if stuck and time.monotonic_ns() - since_ns > deadline_s * _NS_PER_S:
                self._health.mark_wedged(stuck, f"a driver call has not returned for {deadline_s:g} s")
                self._replace(thread, stuck)
                self._listener.handle_wedged(stuck)
        while self._returned:
            uuid = self._returned.popleft()
            if self._health.clear_wedged(uuid):
                self.sampler.remove(uuid)
                self.sampler.add(uuid)
                self._listener.handle_returned(uuid)

    def _replace(self, thread: Sampler | Actuator, stuck: str) -> None:
        """Abandon a thread with the GPU whose call does not return, and start a successor for the other GPUs."""
        if isinstance(thread, Sampler):
            self.sampler = thread.succeed(stuck)
            self.sampler.start()
            self.actuator.drop_requests([stuck])
            return
        self.sampler.remove(stuck)
        self.actuator = thread.succeed(stuck)
        self.actuator.start()
        if self._is_ending:
            self.actuator.close(timeout_s=0.0)

    def _follow_up(self, change: ClockChangeReport) -> None:
        """Have the sampler watch for the effect of a clock change; one that failed is complete."""
        if change.error is None:
            self.sampler.await_effect(change)
        else:
            self._listener.handle_clock_change(change)
