"""Random pipelines on six GPU models, whose times and powers are close to the fitted models but never equal to them."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from gpuenergyd.core.job.rules import JobRules
from gpuenergyd.core.pipeline.graph import InstructionClass, InstructionKind, Schedule, one_forward_one_backward
from gpuenergyd.core.pipeline.profile import PipelineProfile
from gpuenergyd.core.policy_api.policy import ClockPolicy, Lever
from gpuenergyd_sim.driver.device_model import blocking_power_w, voltage_ratio
from gpuenergyd_sim.driver.device_parameters import DeviceParameters, device_parameters
from gpuenergyd_sim.virtual_training.training import VirtualTraining
from gpuenergyd_sim.virtual_training.work import exact_profile

F, B = InstructionKind.F, InstructionKind.B
COMMUNICATION_LATENCY_S = 0.0015
SWITCH_LATENCY_S = 0.006
LOWEST_RATIO = 0.55
_GPU_MODELS = ("a100-pcie", "a100-sxm", "a40", "h100-sxm", "h200", "v100-sxm2")


@dataclass(frozen=True, slots=True)
class TrueWork:
    """True times and powers of an instruction, close to the fitted models but never equal."""

    model: DeviceParameters
    memory_time_s: float
    compute_time_s: float
    power_ratio: float
    saturation: float
    wobble_ratio: float
    wobble_phase: float

    def actual_clock_mhz(self, sm_clock_mhz: int) -> float:
        """Return the clock under the power cap."""
        limit_w = self.model.default_power_limit_w * self.model.cap_settles_at_ratio
        low, high = float(self.model.min_sm_clock_mhz), float(sm_clock_mhz)
        if self._power_at(high) <= limit_w:
            return high
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if self._power_at(middle) <= limit_w else (low, middle)
        return low

    def _time_at(self, clock_mhz: float) -> float:
        scaled = self.compute_time_s * self.model.max_sm_clock_mhz / clock_mhz
        p = self.saturation
        return float((self.memory_time_s**p + scaled**p) ** (1 / p))

    def _power_at(self, clock_mhz: float) -> float:
        active = self.compute_time_s * self.model.max_sm_clock_mhz / clock_mhz / self._time_at(clock_mhz)
        watts = active * self.power_ratio * self.model.typical_w_per_mhz * clock_mhz
        wobble = 1 + self.wobble_ratio * math.sin(6 * clock_mhz / self.model.max_sm_clock_mhz + self.wobble_phase)
        return (self.model.static_power_w + watts * voltage_ratio(self.model, clock_mhz) ** 2) * wobble

    def time_s(self, sm_clock_mhz: int) -> float:
        """Return the time at a clock."""
        return self._time_at(self.actual_clock_mhz(sm_clock_mhz))

    def power_w(self, sm_clock_mhz: int) -> float:
        """Return the power at a clock."""
        return self._power_at(self.actual_clock_mhz(sm_clock_mhz))


@dataclass(frozen=True, slots=True)
class TrueJob:
    """One pipeline on one model of GPU."""

    model: DeviceParameters
    schedule: Schedule
    work: Mapping[tuple[int, InstructionKind], TrueWork]
    clocks_mhz: tuple[int, ...]
    seed: int

    def profile(self) -> PipelineProfile:
        """Return the true times and energies, without measurement errors."""
        clocks_mhz = [clock for clock in self.clocks_mhz if clock >= LOWEST_RATIO * self.clocks_mhz[0]]
        work = {InstructionClass(rank, kind): work for (rank, kind), work in self.work.items()}
        waiting_w = blocking_power_w(self.model, self.model.max_sm_clock_mhz)
        return exact_profile(work, clocks_mhz, blocking_power_w=waiting_w)

    def training(
        self,
        policy: ClockPolicy,
        rules: JobRules,
        *,
        max_slowdown_ratio: float = 0.0,
        levers: frozenset[Lever] = frozenset({Lever.CLOCKS}),
    ) -> VirtualTraining:
        """Return a run of this job with all its noise."""
        noise = random.Random(self.seed)  # noqa: S311  not a secret
        limits_w = (self.model.min_power_limit_w, self.model.max_power_limit_w)
        heat = {rank: noise.uniform(0.0, 0.004) for rank in range(self.schedule.num_ranks)}
        return VirtualTraining(
            self.schedule,
            self.work,
            policy,
            max_slowdown_ratio=max_slowdown_ratio,
            rules=rules,
            levers=levers,
            power_limit_range_w=limits_w if Lever.POWER_LIMITS in levers else None,
            switch_latency_s=SWITCH_LATENCY_S,
            latency_spread_ratio=0.5,
            noise_ratio=0.004,
            energy_noise_ratio=0.02,
            counter_period_s=0.1,
            communication_latency_s=COMMUNICATION_LATENCY_S,
            waiting_power_w=lambda clock: blocking_power_w(self.model, clock),
            clocks_mhz=self.clocks_mhz,
            model_name=self.model.model_name,
            slowdown_of=lambda rank, iteration: 1.0 + heat[rank] * (1 - math.exp(-iteration / 15)),
            seed=self.seed,
        )


def random_job(
    seed: int, *, gpu_model: str | None = None, num_stages: int | None = None, num_microbatches: int | None = None
) -> TrueJob:
    """Return a random pipeline; without `gpu_model`, consecutive seeds use one GPU model after the other.

    Raises:
        GpuNotFoundError: unknown GPU model.
    """
    draw = random.Random(seed)  # noqa: S311  not a secret
    model = device_parameters(gpu_model or _GPU_MODELS[seed % len(_GPU_MODELS)])
    drawn_stages = draw.choice([2, 4, 4, 8])
    drawn_microbatches = draw.choice([4, 8, 8, 16]) if drawn_stages < 8 else draw.choice([8, 16])
    num_ranks = num_stages or drawn_stages
    scale_s = draw.uniform(0.03, 0.09)
    memory_share = {F: draw.uniform(0.1, 0.45), B: draw.uniform(0.1, 0.45)}
    work = {}
    for rank in range(num_ranks):
        uneven = draw.uniform(0.9, 1.12)
        for kind in (F, B):
            time_s = scale_s * uneven * (1.0 if kind is F else draw.uniform(1.7, 2.1))
            work[rank, kind] = TrueWork(
                model=model,
                memory_time_s=time_s * memory_share[kind],
                compute_time_s=time_s * (1 - memory_share[kind]),
                power_ratio=draw.uniform(0.85, 1.15),
                saturation=draw.uniform(1.0, 1.25),
                wobble_ratio=0.03 * draw.uniform(0.3, 1.0),
                wobble_phase=draw.uniform(0, 6.28),
            )
    schedule = one_forward_one_backward(num_ranks, num_microbatches or drawn_microbatches)
    return TrueJob(model, schedule, work, model.supported_sm_clocks_mhz, seed)
