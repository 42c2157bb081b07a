"""Instruction times as the simulated GPU has them, as CUDA events tell them of a real one.

Whoever sleeps until a simulated instruction is over wakes up late, by milliseconds on a busy host. The host's clock
would count that as time of the instruction, of which no real GPU knows; here it passes between two instructions.
"""

from gpuenergyd.client.recorder import DEFAULT_CAPACITY, HostRecorder


class SimulatedTimer(HostRecorder):
    """Marks the end of an instruction when the simulated GPU was done with it; an InstructionTimer.

    Whoever runs the simulated work says when that was. What has no simulated work ends by the host's clock.
    """

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        super().__init__(capacity)
        self.work_ended_ns = 0
        """When the newest simulated work was over, as `SimulatedHost.finish_work` tells."""

    def end(self, slot: int) -> None:
        """Mark the end; a later call for the same slot moves it only where no simulated work ended in it."""
        if slot >= 0 and self.work_ended_ns >= self._current.begin_ns[slot]:
            self._current.end_ns[slot] = self.work_ended_ns
        else:
            super().end(slot)
