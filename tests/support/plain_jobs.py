"""Plain training loops in virtual time: one rank, one instruction per iteration, on GPUs with random curves."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import Instruction, InstructionKind, Schedule
from gpuenergyd.core.policy_api.policy import ClockPolicy, Lever
from gpuenergyd_sim.driver.device_model import blocking_power_w, voltage_ratio
from gpuenergyd_sim.driver.device_parameters import DeviceParameters, device_parameters
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import CLOCKS_MHZ, Work

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
        return self.time_at_top_s * (1 - self.compute_share + self.compute_share * _TOP_MHZ / sm_clock_mhz)

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return what it draws at a clock: activity times clock times the square of the voltage, and static power."""
        ratio = sm_clock_mhz / _TOP_MHZ
        above = max(0.0, ratio - self.knee_ratio) / (1 - self.knee_ratio)
        voltage = (1 + (self.max_voltage_ratio - 1) * above) / self.max_voltage_ratio
        dynamic_j = (self.power_at_top_w - self.static_power_w) * self.time_at_top_s
        return self.static_power_w + dynamic_j * voltage**2 / self.time_s(sm_clock_mhz)


def random_loop_work(seed: int, compute_shares: tuple[float, float] = (0.7, 1.0)) -> LoopWork:
    """Return the work of one job; ranges are those of published fits, see `setting_curves`."""
    rng = random.Random(seed)
    return LoopWork(
        time_at_top_s=rng.uniform(0.2, 0.6),
        compute_share=rng.uniform(*compute_shares),
        power_at_top_w=rng.uniform(220.0, 400.0),
        static_power_w=rng.uniform(32.0, 80.0),
        knee_ratio=rng.uniform(0.70, 0.78),
        max_voltage_ratio=rng.uniform(1.21, 1.38),
    )


@dataclass(frozen=True, slots=True)
class GpuLoopWork:
    """One instruction on a GPU model of which every parameter is a little different from the published one.

    Power limits lower the clock; memory traffic costs the same energy at every clock.
    """

    gpu: DeviceParameters
    time_at_top_s: float
    memory_share: float
    """Memory time as a share of memory and compute time, at the highest clock."""
    exponent: float
    """1: memory and compute times add up; 3: the longer one nearly hides the other."""
    active_w_per_mhz: float
    traffic_w: float
    """Power of memory traffic while memory is busy."""

    def time_s(self, sm_clock_mhz: int) -> float:
        return self._time_s(self.actual_clock_mhz(sm_clock_mhz))

    def power_w(self, sm_clock_mhz: int) -> float:
        return self._power_w(self.actual_clock_mhz(sm_clock_mhz))

    @property
    def _unit_s(self) -> float:
        """The sum of memory and compute time, at the highest clock."""
        p = self.exponent
        return self.time_at_top_s / float((self.memory_share**p + (1 - self.memory_share) ** p) ** (1 / p))

    def actual_clock_mhz(self, sm_clock_mhz: int) -> float:
        """Return the clock under the power limit."""
        limit_w, low, high = self.gpu.default_power_limit_w, self.gpu.min_sm_clock_mhz, float(sm_clock_mhz)
        if self._power_w(high) <= limit_w:
            return high
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self._power_w(middle) <= limit_w else (low, middle)
        return low

    def _time_s(self, mhz: float) -> float:
        p = self.exponent
        compute = (1 - self.memory_share) * self.gpu.max_sm_clock_mhz / mhz
        return self._unit_s * float((self.memory_share**p + compute**p) ** (1 / p))

    def _power_w(self, mhz: float) -> float:
        time_s = self._time_s(mhz)
        active = (1 - self.memory_share) * self.gpu.max_sm_clock_mhz / mhz * self._unit_s / time_s
        dynamic = (self.gpu.uncore_w_per_mhz + active * self.active_w_per_mhz) * mhz * voltage_ratio(self.gpu, mhz) ** 2
        return self.gpu.static_power_w + dynamic + self.traffic_w * self.memory_share * self._unit_s / time_s


MEMORY_SHARES = {"compute-bound": (0.0, 0.2), "mixed": (0.2, 0.6), "memory-bound": (0.6, 0.9)}
"""By kind of job: memory time as a share of memory and compute time."""
_GPU_MODELS = ("a100-sxm", "v100-sxm2", "a40", "h100-sxm", "a100-pcie")


AT_LIMIT = "at the power limit"
_ACTIVE_OF_LIMIT, _ACTIVE_AT_LIMIT = (0.55, 1.1), (1.3, 2.2)
"""Power of active SMs at the highest clock as a share of the power limit; big matrix products on an H200 have 1.9."""


def random_gpu_work(seed: int, kind: str, *, gpu_model: str = "") -> GpuLoopWork:
    """Return the work of one job on one of five GPU models, or on one; how far parameters are off is assumed.

    Jobs `AT_LIMIT` are compute-bound ones that their power limit holds far below the highest clock.
    """
    rng = random.Random(f"{kind} {seed}")
    model = device_parameters(gpu_model or _GPU_MODELS[seed % len(_GPU_MODELS)])
    gpu = replace(
        model,
        knee_sm_clock_mhz=model.knee_sm_clock_mhz * rng.uniform(0.94, 1.06),
        max_voltage_ratio=1 + (model.max_voltage_ratio - 1) * rng.uniform(0.8, 1.2),
        static_power_w=model.static_power_w * rng.uniform(0.7, 1.4),
        uncore_w_per_mhz=rng.uniform(0.0, 0.05) * model.default_power_limit_w / model.max_sm_clock_mhz,
    )
    memory_share = rng.uniform(*MEMORY_SHARES["compute-bound" if kind == AT_LIMIT else kind])
    at_top = gpu.max_sm_clock_mhz * gpu.max_voltage_ratio**2
    active_w = rng.uniform(*(_ACTIVE_AT_LIMIT if kind == AT_LIMIT else _ACTIVE_OF_LIMIT)) * gpu.default_power_limit_w
    traffic_w = rng.uniform(0.05, 0.2) * gpu.default_power_limit_w
    time_s, exponent = rng.uniform(0.2, 0.6), rng.choice((1.0, 2.0, 3.0))
    return GpuLoopWork(gpu, time_s, memory_share, exponent, active_w / at_top, traffic_w)


def loop_training(
    policy: ClockPolicy,
    work: LoopWork | GpuLoopWork,
    *,
    max_slowdown_ratio: float,
    seed: int,
    levers: frozenset[Lever] = frozenset({Lever.CLOCKS}),
    power_limit_range_w: tuple[float, float] | None = None,
    power_profiles: Mapping[int, tuple[float, float]] | None = None,
    num_dp_ranks: int = 1,
    rules: JobRules | None = None,
    scatter_ratio: float = 0.002,
) -> VirtualTraining:
    gpu = work.gpu if isinstance(work, GpuLoopWork) else device_parameters("a100-sxm")
    works: dict[tuple[int, InstructionKind], Work] = {(0, InstructionKind.F): work}
    return VirtualTraining(
        LOOP,
        works,
        policy,
        max_slowdown_ratio=max_slowdown_ratio,
        noise_ratio=scatter_ratio,
        capped_clock_noise_ratio=0.055,
        energy_noise_ratio=0.005,
        step_overhead_s=0.005,
        levers=levers,
        power_limit_range_w=power_limit_range_w,
        power_profiles=power_profiles or {},
        num_dp_ranks=num_dp_ranks,
        clocks_mhz=gpu.supported_sm_clocks_mhz if isinstance(work, GpuLoopWork) else CLOCKS_MHZ,
        model_name=gpu.model_name,
        waiting_power_w=lambda mhz: blocking_power_w(gpu, mhz),
        seed=seed,
        rules=rules or JobRules(),
    )
