"""A timer for simulated GPUs: instruction times without the host's wake-up latency.

A process that sleeps until a simulated instruction ends wakes up late, by milliseconds on a busy host. A host timer
would add that to the instruction; on a real GPU, CUDA events do not. Here it counts as time between instructions.
"""

from gpuenergyd.client.recorder import DEFAULT_CAPACITY, HostRecorder


class SimulatedTimer(HostRecorder):
    """An InstructionTimer that uses the end time of simulated work, or host time for instructions without any."""

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        super().__init__(capacity)
        self.work_ended_ns = 0
        """End of the newest simulated work, as returned by `SimulatedHost.finish_work`."""

    def end(self, slot: int) -> None:
        """Mark the end of an instruction; a later call moves it, unless simulated work ended in the instruction."""
        if slot >= 0 and self.work_ended_ns >= self._current.begin_ns[slot]:
            self._current.end_ns[slot] = self.work_ended_ns
        else:
            super().end(slot)
