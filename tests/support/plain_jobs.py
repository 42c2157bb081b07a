"""Plain training loops in virtual time: one rank, one instruction per iteration, on GPUs with random curves."""

import random
from dataclasses import dataclass

from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.policy_api.policy import ClockPolicy, Lever
from tests.support.virtual_training import CLOCKS_MHZ, VirtualTraining, Work

ORDER = (Instruction(0, InstructionKind.F, 0),)
LOOP = Schedule("loop", 1, (ORDER,))
_TOP_MHZ = CLOCKS_MHZ[0]


@dataclass(frozen=True, slots=True)
class LoopWork:
    """One instruction on a GPU: time and power by clock, as published curves of data-centre GPUs vary."""

    time_at_top_s: float
    compute_share: float
    power_at_top_w: float
    static_power_w: float
    knee_ratio: float
    max_voltage_ratio: float

    def time_s(self, sm_clock_mhz: int) -> float:
        """Return how long it takes at a clock."""
        return self.time_at_top_s * (1 - self.compute_share + self.compute_share * _TOP_MHZ / sm_clock_mhz)

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return what it draws at a clock: activity times clock times the square of the voltage, and static power."""
        ratio = sm_clock_mhz / _TOP_MHZ
        above = max(0.0, ratio - self.knee_ratio) / (1 - self.knee_ratio)
        voltage = (1 + (self.max_voltage_ratio - 1) * above) / self.max_voltage_ratio
        dynamic_j = (self.power_at_top_w - self.static_power_w) * self.time_at_top_s
        return self.static_power_w + dynamic_j * voltage**2 / self.time_s(sm_clock_mhz)


def random_loop_work(seed: int, compute_shares: tuple[float, float] = (0.7, 1.0)) -> LoopWork:
    """Return the work of one job; ranges are those of published fits, see `assumed_curves`."""
    rng = random.Random(seed)
    return LoopWork(
        time_at_top_s=rng.uniform(0.2, 0.6),
        compute_share=rng.uniform(*compute_shares),
        power_at_top_w=rng.uniform(220.0, 400.0),
        static_power_w=rng.uniform(32.0, 80.0),
        knee_ratio=rng.uniform(0.70, 0.78),
        max_voltage_ratio=rng.uniform(1.21, 1.38),
    )


def loop_training(
    policy: ClockPolicy,
    work: LoopWork,
    *,
    max_slowdown_ratio: float,
    seed: int,
    levers: frozenset[Lever] = frozenset({Lever.CLOCKS}),
    power_limit_range_w: tuple[float, float] | None = None,
) -> VirtualTraining:
    """Return the training of one loop, with noise."""
    works: dict[tuple[int, InstructionKind], Work] = {(0, InstructionKind.F): work}
    return VirtualTraining(
        LOOP,
        works,
        policy,
        max_slowdown_ratio=max_slowdown_ratio,
        noise_ratio=0.002,
        energy_noise_ratio=0.005,
        step_overhead_s=0.005,
        levers=levers,
        power_limit_range_w=power_limit_range_w,
        seed=seed,
    )
