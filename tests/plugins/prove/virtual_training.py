"""A training in virtual time for proofs: known true savings, drift, disturbances and an outside meter."""

import math
import random
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpuenergyd_prove.proof.measurements import Block, IterationSample, PowerSample
from gpuenergyd_prove.proof.registration import BASELINE_ARM, Arm

EPOCH_S = 1_790_000_000.0
PAUSE_S = 20.0
"""Between blocks: the training starts anew."""


@dataclass(frozen=True, slots=True)
class VirtualMeter:
    """An outside meter with known errors."""

    lag_s: float = 0.0
    gain: float = 1.0
    offset_w: float = 250.0
    noise_w: float = 5.0
    period_s: float = 1.0


@dataclass(slots=True)
class VirtualTraining:
    """Runs blocks of a made-up training; implements `BlockRunner`.

    Each block starts warm or cold by chance, all iterations of a block share an error, power drifts over the proof, and
    some iterations are disturbed. `saving_ratio` and `slowdown_ratio` are true for every arm but full speed.
    """

    seed: int
    saving_ratio: float = 0.12
    slowdown_ratio: float = 0.003
    block_sigma_ratio: float = 0.004
    """What all iterations of a block share, and no repetition within it reduces."""
    iteration_sigma_ratio: float = 0.01
    drift_ratio: float = 2e-5
    """Of energy, per iteration: GPUs and the room grow warm."""
    disturbed_ratio: float = 0.02
    meter: VirtualMeter | None = None
    loss_noise: float = 0.0
    iteration_time_s: float = 0.7
    power_w: float = 1200.0
    num_iterations: int = 0
    now_s: float = EPOCH_S
    _draw: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def time(self) -> float:
        return self.now_s

    def calibrate(self) -> Mapping[str, Any]:
        self.now_s += 1.0
        return {"simulated": True}

    def rehearse(self, arm: Arm, *, num_iterations: int) -> None:
        """Do nothing: a made-up training has no planner."""

    def run_block(self, arm: Arm, *, num_iterations: int) -> Block:
        self.now_s += PAUSE_S
        begun_at_s = self.now_s
        is_tuned = arm.name != BASELINE_ARM
        shared = self._draw.gauss(0.0, self.block_sigma_ratio)
        shared_time = self._draw.gauss(0.0, self.block_sigma_ratio / 4)
        samples: list[IterationSample] = []
        losses: list[float] = []
        waves = [(self.now_s - 1.0, 300.0), (self.now_s, 300.0)]
        self.now_s += 2.0
        waves.append((self.now_s, 300.0))
        for index in range(num_iterations):
            noise = self._draw.gauss(0.0, self.iteration_sigma_ratio)
            time_s = self.iteration_time_s * math.exp(
                shared_time + self._draw.gauss(0.0, self.iteration_sigma_ratio / 2)
            )
            energy_j = (
                self.power_w * self.iteration_time_s * math.exp(shared + noise + self.drift_ratio * self.num_iterations)
            )
            if is_tuned:
                time_s, energy_j = time_s * (1 + self.slowdown_ratio), energy_j * (1 - self.saving_ratio)
            if self._draw.random() < self.disturbed_ratio:
                time_s, energy_j = 2 * time_s, 1.5 * energy_j
            losses.append(5.0 - 0.01 * index + self._draw.gauss(0.0, self.loss_noise))
            samples.append(IterationSample(index, self.now_s, time_s, energy_j))
            waves.append((self.now_s, energy_j / time_s))
            self.now_s += time_s
            waves.append((self.now_s - 1e-4, energy_j / time_s))
            self.num_iterations += 1
        waves += [(self.now_s, 300.0), (self.now_s + 2.0, 300.0)]
        gpu_power = tuple(PowerSample(*point) for point in waves)
        self.now_s += 1.0
        meter_power = self._metered(gpu_power) if self.meter is not None else ()
        return Block(arm.name, begun_at_s, self.now_s, tuple(samples), gpu_power, meter_power, tuple(losses))

    def _metered(self, gpu_power: tuple[PowerSample, ...]) -> tuple[PowerSample, ...]:
        """Return what the meter reports until one lag after the block."""
        assert self.meter is not None
        meter = self.meter
        found: list[PowerSample] = []
        at_s = gpu_power[0].at_s + self._draw.random() * meter.period_s + meter.period_s + meter.lag_s
        while at_s < gpu_power[-1].at_s + meter.lag_s:
            power_w = meter.offset_w + meter.gain * _mean_w(
                gpu_power, at_s - meter.lag_s - meter.period_s, meter.period_s
            )
            found.append(PowerSample(at_s, power_w + self._draw.gauss(0.0, meter.noise_w)))
            at_s += meter.period_s
        return tuple(found)


def _mean_w(samples: tuple[PowerSample, ...], from_s: float, window_s: float) -> float:
    """Return the mean of steps over a window, by small ones."""
    times_s = [sample.at_s for sample in samples]
    steps = (bisect_right(times_s, from_s + window_s * (k + 0.5) / 40) - 1 for k in range(40))
    return sum(samples[max(0, step)].power_w for step in steps) / 40
