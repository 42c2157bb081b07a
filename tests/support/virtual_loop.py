"""Plain training loops with phases in virtual time: each rank runs forward, backward, communication, step and so on.

The phases are those of a data-parallel training on an A100 (forward and backward: the published GPT-3 tables). Exposed
communication and waits for data take a third of the iteration; Mohan et al. (VLDB 2021) report data stalls of 10 to
70 %. The optimizer step is bound by memory: it reads and writes all states and computes little (shares assumed).
"""

import random
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.policy_api.policy import ClockPolicy
from gpuenergyd_policies.bubble_aware.policy import BubbleAware
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import A100Work, Work, a100_waiting_power_w
from tests.support.virtual_replicas import VirtualReplicas
from tests.support.waiting import LIMIT_S

F, B, C, O, D = (InstructionKind(kind) for kind in "FBCOD")  # noqa: E741  one letter, as the others
_MEETING_LIMIT_S = LIMIT_S


@dataclass(frozen=True, slots=True)
class Wait:
    """A phase that takes the same time at every clock, at the power of a waiting GPU."""

    own_time_s: float
    waiting_power_w: Callable[[int], float] = a100_waiting_power_w

    def time_s(self, sm_clock_mhz: int) -> float:  # noqa: ARG002  any clock
        return self.own_time_s

    def power_w(self, sm_clock_mhz: int) -> float:
        return self.waiting_power_w(sm_clock_mhz)


def phase_work() -> dict[tuple[int, InstructionKind], Work]:
    return {
        (0, F): A100Work(0.0120, 0.0382, 0.25),
        (0, B): A100Work(0.0270, 0.0660, 0.27),
        (0, C): Wait(0.060),
        (0, O): A100Work(0.020, 0.004, 0.25),
        (0, D): Wait(0.030),
    }


def random_phase_work(seed: int) -> dict[tuple[int, InstructionKind], Work]:
    """Return the work of each phase of one job: times, shares and powers around those of `phase_work` (assumed)."""
    rng = random.Random(f"phases {seed}")

    def computing(time_s: float, memory: tuple[float, float]) -> A100Work:
        own_s, share = time_s * rng.uniform(0.7, 1.4), rng.uniform(*memory)
        return A100Work(own_s * share, own_s * (1 - share), 0.26 * rng.uniform(0.7, 1.1))

    return {
        (0, F): computing(0.05, (0.1, 0.5)),
        (0, B): computing(0.09, (0.1, 0.5)),
        (0, C): Wait(rng.uniform(0.01, 0.07)),
        (0, O): computing(0.024, (0.6, 0.95)),
        (0, D): Wait(rng.uniform(0.006, 0.04)),
    }


def loop_schedule(num_microbatches: int = 1) -> Schedule:
    """Return the phases of an iteration that accumulates the gradients of so many microbatches."""
    compute = [Instruction(0, kind, m) for m in range(num_microbatches) for kind in (F, B)]
    then = [Instruction(0, C, num_microbatches - 1), Instruction(0, O, 0), Instruction(0, D, 0)]
    return Schedule("loop", num_microbatches, ((*compute, *then),))


@dataclass
class VirtualLoop(VirtualTraining):
    """One rank of a plain loop; with `meet`, its communication ends when that of all ranks does."""

    schedule: Schedule = field(default_factory=loop_schedule)
    work: Mapping[tuple[int, InstructionKind], Work] = field(default_factory=phase_work)
    policy: ClockPolicy = field(default_factory=BubbleAware)
    step_overhead_s: float = 0.0
    communication_latency_s: float = 0.0
    meet: Callable[[float], float] | None = None
    """Given when this rank has its gradients, returns when the slowest rank has."""
    waits_s: list[float] = field(default_factory=list)
    """For how long each communication waited for the slowest rank."""

    def _work_from(self, r: int, instruction: Instruction, start_s: float) -> float:
        if instruction.kind is not C:
            return super()._work_from(r, instruction, start_s)
        usual = self.work[r, C]
        waited_s = 0.0 if self.meet is None else self.meet(start_s) - start_s
        self.waits_s.append(waited_s)
        slowdown = self.slowdown_of(r, self.iteration_index)  # of the GPU, not of the network
        wait = Wait((usual.time_s(0) + waited_s) / slowdown, self.waiting_power_w)
        before, self.work = self.work, {**self.work, (r, C): wait}
        try:
            return super()._work_from(r, instruction, start_s)
        finally:
            self.work = before


@dataclass
class DataParallelLoops(VirtualReplicas):
    """The ranks of a data-parallel loop, each a job of its own; they meet in every communication."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._starts_s: list[float] = []
        self._barrier = threading.Barrier(len(self.replicas))
        for replica in self.replicas:
            assert isinstance(replica, VirtualLoop)
            replica.meet = self._meet

    def _meet(self, start_s: float) -> float:
        self._starts_s.append(start_s)
        self._barrier.wait(_MEETING_LIMIT_S)
        return max(self._starts_s[-len(self.replicas) :])

    def _begin(self) -> list[float]:
        """Run all ranks at the same time, since each waits for the others."""
        self._starts_s.clear()
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            return list(pool.map(VirtualTraining.begin_iteration, self.replicas))
