"""A virtual training whose ranks execute the operations that a real program puts on its streams, in their order.

An instruction is what lies between two events of the program. A wait of the stream between them would be recorded as
work, as on a GPU.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd_sim.virtual_training.training import VirtualTraining

StreamOperation = tuple[str, str, int]
"""An operation of a stream: `begin`, `launch` and `end` with kind and microbatch; `wait` and `send` with a channel."""
Stream = Sequence[StreamOperation]


@dataclass
class StreamTraining(VirtualTraining):
    """A training whose iterations are the operations of each rank's stream."""

    streams_of: Callable[[Schedule], Sequence[Stream]] = lambda _schedule: ()
    """Returns each rank's operations in one iteration of an order."""

    def _run_pipeline(self) -> tuple[dict[Instruction, tuple[float, float]], float]:
        streams = self.streams_of(self.running)
        self._free_s = self._begins_s()
        self._sent_s: dict[int, list[float]] = defaultdict(list)
        self._awaited: dict[int, int] = defaultdict(int)
        spans: dict[Instruction, tuple[float, float]] = {}
        done = [0] * len(streams)
        while any(position < len(stream) for position, stream in zip(done, streams, strict=True)):
            before = list(done)
            for r, stream in enumerate(streams):
                while done[r] < len(stream) and self._execute(r, stream[done[r]], spans):
                    done[r] += 1
            assert done != before, "the streams wait for each other"
        return spans, max(end_s for _, end_s in spans.values())

    def _execute(self, r: int, operation: StreamOperation, spans: dict[Instruction, tuple[float, float]]) -> bool:
        """Execute an operation; return False if the signal that it waits for has not been given."""
        what, kind, number = operation
        now_s = self._free_s[r]
        if what == "wait":
            sent_s = self._sent_s[number]
            if self._awaited[number] == len(sent_s):
                return False
            self._wait_until(r, sent_s[self._awaited[number]] + self.communication_latency_s)
            self._awaited[number] += 1
            return True
        if what == "send":
            self._sent_s[number].append(now_s)
            return True
        instruction = Instruction(r, InstructionKind(kind), number)
        if what == "begin":
            spans[instruction] = (now_s, now_s)
            for change in self.changes[r] if self.has_lease else ():
                if change.instruction == instruction:
                    self._ask(r, now_s + change.offset_s, change.sm_clock_mhz)
        elif what == "launch":
            self._free_s[r] = self._work_from(r, instruction, now_s)
        else:
            spans[instruction] = (spans[instruction][0], now_s)
        return True
