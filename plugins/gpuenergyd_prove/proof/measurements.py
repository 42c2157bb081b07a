"""Raw data of a proof: blocks of iterations, separately sampled GPU power, and readings of external meters."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class IterationSample:
    """One iteration under the arm's plan; `begun_at_s` is in seconds since 1970 UTC, the energy is that of all GPUs."""

    index: int
    begun_at_s: float
    time_s: float
    gpu_energy_j: float | None


@dataclass(frozen=True, slots=True)
class PowerSample:
    """Power at an instant: of all GPUs, from differences of their energy counters, or as read from a meter."""

    at_s: float
    power_w: float


@dataclass(frozen=True, slots=True)
class Block:
    """One run of one arm: its iterations under the arm's plan, and the power from start to end."""

    arm: str
    begun_at_s: float
    ended_at_s: float
    iterations: tuple[IterationSample, ...]
    gpu_power: tuple[PowerSample, ...] = ()
    meter_power: tuple[PowerSample, ...] = ()
    losses: tuple[float, ...] = ()
    """Losses of all iterations of the run from the first on, if the program writes them."""


def energy_j(samples: Sequence[PowerSample], from_s: float, to_s: float) -> float | None:
    """Return the energy between two instants by the trapezoid rule; None unless samples cover them."""
    if not samples or to_s <= from_s or samples[0].at_s > from_s or samples[-1].at_s < to_s:
        return None
    total_j = 0.0
    for left, right in itertools.pairwise(samples):
        begin_s, end_s = max(left.at_s, from_s), min(right.at_s, to_s)
        if end_s > begin_s:
            slope = (right.power_w - left.power_w) / (right.at_s - left.at_s)
            middle_s = (begin_s + end_s) / 2
            total_j += (left.power_w + slope * (middle_s - left.at_s)) * (end_s - begin_s)
    return total_j
