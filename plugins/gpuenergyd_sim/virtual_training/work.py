"""Times and powers of instructions at each clock, on a published A100 or on any GPU model of this plugin."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind
from gpuenergyd.core.pipeline.profile import ClockOption, PipelineProfile, instruction_profile
from gpuenergyd_sim.driver.device_model import InstructionWork, capped_sm_clock_mhz, instruction_time_s, working_power_w
from gpuenergyd_sim.driver.device_parameters import DeviceParameters

CLOCKS_MHZ = tuple(range(1410, 209, -15))


class Work(Protocol):
    """Time and power of one kind of instruction on one rank, as functions of the clock."""

    def time_s(self, sm_clock_mhz: int) -> float:
        """Return how long it takes at a clock."""
        ...

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return the power of the work at a clock."""
        ...


def actual_clock_mhz(work: Work | None, sm_clock_mhz: int) -> float:
    """Return the clock at which a GPU runs; work at a power limit has a method of this name, which lowers it."""
    limited: Callable[[int], float] | None = getattr(work, "actual_clock_mhz", None)
    return sm_clock_mhz if limited is None else limited(sm_clock_mhz)


def a100_power_w(active_w_per_mhz: float, sm_clock_mhz: int) -> float:
    """Return the power of an A100-SXM (published GPT-3 tables): 34.6 W static, knee at 1104 MHz, 1.213 V ratio."""
    voltage = 1 + 0.213 * max(0.0, sm_clock_mhz - 1104) / (1410 - 1104)
    return 34.6 + active_w_per_mhz * sm_clock_mhz * voltage**2


@dataclass(frozen=True, slots=True)
class A100Work:
    """Memory-bound and compute-bound time at the maximum clock; `power_w_per_mhz` is that of SMs always busy."""

    memory_time_s: float
    compute_time_s: float
    power_w_per_mhz: float

    def time_s(self, sm_clock_mhz: int) -> float:
        """Return how long it takes at a clock."""
        return self.memory_time_s + self.compute_time_s * CLOCKS_MHZ[0] / sm_clock_mhz

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return the power of the work at a clock."""
        active_ratio = self.compute_time_s * CLOCKS_MHZ[0] / sm_clock_mhz / self.time_s(sm_clock_mhz)
        return a100_power_w(active_ratio * self.power_w_per_mhz, sm_clock_mhz)


def a100_waiting_power_w(sm_clock_mhz: int) -> float:
    """Return the power while waiting for a peer: the published 83.64 W at the top, falling with the clock (assumed)."""
    return a100_power_w(0.0236, sm_clock_mhz)


def a100_stages(weights: Sequence[float], *, scale: float = 1.0) -> dict[tuple[int, InstructionKind], Work]:
    """Return the work of stages: 50 ms forward and 93 ms backward at the top clock, times weight and scale."""
    return {
        (rank, kind): A100Work(memory_s * weight * scale, compute_s * weight * scale, watts)
        for rank, weight in enumerate(weights)
        for kind, memory_s, compute_s, watts in (
            (InstructionKind.F, 0.0120, 0.0382, 0.25),
            (InstructionKind.B, 0.0270, 0.0660, 0.27),
        )
    }


@dataclass(frozen=True, slots=True)
class ModelWork:
    """An instruction on a model of simulated GPUs, warm and under its default power limit."""

    model: DeviceParameters
    work: InstructionWork

    def actual_clock_mhz(self, sm_clock_mhz: int) -> float:
        """Return the clock that the GPU runs at."""
        return capped_sm_clock_mhz(self.model, self.work, sm_clock_mhz, self.model.default_power_limit_w)

    def time_s(self, sm_clock_mhz: int) -> float:
        """Return how long it takes at a clock."""
        return instruction_time_s(self.model, self.work, self.actual_clock_mhz(sm_clock_mhz))

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return the power of the work at a clock."""
        return working_power_w(self.model, self.work, self.actual_clock_mhz(sm_clock_mhz))


def exact_profile(
    work: Mapping[InstructionClass, Work], clocks_mhz: Sequence[int], *, blocking_power_w: float
) -> PipelineProfile:
    """Return the true times and energies of instructions at some clocks, in the form that planners use."""
    classes = {}
    for key, curve in work.items():
        times_s = {clock: curve.time_s(clock) for clock in clocks_mhz}
        options = [ClockOption(clock, time_s, time_s * curve.power_w(clock)) for clock, time_s in times_s.items()]
        classes[key] = instruction_profile(options, where=str(key))
    return PipelineProfile(classes, blocking_power_w)
