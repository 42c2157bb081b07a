"""Emissions of one job on one trace: at full speed, at constant speed, with a perfect forecast, and as controlled.

A look-ahead is a table: row k holds the forecast, issued when hour k of the job begins, for that hour and later ones.
The controller has no other knowledge of the future.
"""

import math
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.carbon.intensity import JOULES_PER_KWH
from gpuenergyd_carbon.policy.budget import SLOT_S, Array, SpeedHull, next_speed, plan_slots

RESERVE_RATIO = 1e-9
"""Share of the work done ahead of the budget, so that rounding never exceeds it."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """Result of a job: hourly speeds, emissions, time, and the emissions at constant speed in the same time."""

    speeds_per_s: Array
    carbon_g: float
    constant_g: float
    time_s: float


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of fixed work that starts at an hour of a trace; `truth` is the trace from that hour on."""

    hull: SpeedHull
    truth: Array
    job_s: float
    max_slowdown_ratio: float

    @property
    def num_iterations(self) -> float:
        """The work: iterations at full speed in the job's nominal time."""
        return self.job_s * self.hull.full_speed_per_s

    @property
    def permitted_s(self) -> float:
        """Longest permitted time of the job."""
        return self.job_s * (1.0 + self.max_slowdown_ratio)

    @property
    def slot_lengths_s(self) -> Array:
        """Lengths of the hours until the deadline; the last one ends there."""
        num_slots = math.ceil(self.permitted_s / SLOT_S - 1e-9)
        lengths = np.full(num_slots, SLOT_S)
        lengths[-1] = self.permitted_s - SLOT_S * (num_slots - 1)
        return lengths

    def constant_g(self, time_s: float) -> float:
        """Return the emissions at the constant speed that takes a given time, limited to the hull."""
        speed = np.clip(self.num_iterations / time_s, self.hull.speeds_per_s[0], self.hull.full_speed_per_s)
        return self._grams(np.full(len(self.truth), speed))[0]

    def run(self, speeds_per_s: Array) -> JobRun:
        """Return the result with given hourly speeds."""
        carbon_g, time_s = self._grams(speeds_per_s)
        return JobRun(speeds_per_s, carbon_g, self.constant_g(time_s), time_s)

    def oracle(self) -> JobRun:
        """Return the optimum with perfect knowledge of the trace."""
        lengths = self.slot_lengths_s
        work = self.num_iterations * (1.0 + RESERVE_RATIO)
        return self.run(plan_slots(self.hull, self.truth[: len(lengths)], lengths, work))

    def controlled(self, expected: Array, fallback: Array) -> JobRun:
        """Return the result of the controller with a look-ahead, which may be shorter than the job.

        The naive forecast `fallback` extends to the end of the job.
        """
        lengths = self.slot_lengths_s
        left = self.num_iterations * (1.0 + RESERVE_RATIO)
        speeds = np.empty(len(lengths))
        for k, length_s in enumerate(lengths):
            speeds[k] = next_speed(self.hull, expected[k], fallback[k][: len(lengths) - k], lengths[k:], left)
            left -= speeds[k] * length_s
        return self.run(speeds)

    def _grams(self, speeds_per_s: Array) -> tuple[float, float]:
        """Return emissions and time of the work at hourly speeds; the last speed continues until the work is done."""
        lengths_s = np.full(len(speeds_per_s), SLOT_S)
        lengths_s[-1] = np.inf
        done_before = np.cumsum(speeds_per_s * SLOT_S) - speeds_per_s * SLOT_S
        times_s = np.clip((self.num_iterations - done_before) / speeds_per_s, 0.0, lengths_s)
        energy_j = self.hull.power_w(speeds_per_s) * times_s
        return float((energy_j * self.truth[: len(times_s)]).sum()) / JOULES_PER_KWH, float(times_s.sum())
