"""One job on one trace: what it emits at full speed, at a constant point, with a perfect forecast, and as controlled.

A look-ahead is a table: row k holds what was expected, when hour k of the job began, of that hour and the next ones.
Nothing else of the future reaches the controller.
"""

import math
from dataclasses import dataclass

import numpy as np

from gpuenergyd.core.carbon.intensity import JOULES_PER_KWH
from gpuenergyd_policies.carbon.budget import (
    Array,
    SpeedHull,
    constant_speed,
    next_speed,
    plan_slots,
)

SLOT_S = 3600.0
RESERVE_RATIO = 1e-9
"""Of the work, done ahead of the budget, so that rounding never makes a miss."""


@dataclass(frozen=True, slots=True)
class JobRun:
    """How a job went: the speed of each hour, its grams, its time, and the same time's constant point."""

    speeds_per_s: Array
    carbon_g: float
    constant_g: float
    time_s: float


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A job of fixed work that starts at an hour of a trace; `truth` holds its hours from the start on."""

    hull: SpeedHull
    truth: Array
    job_s: float
    max_slowdown_ratio: float

    @property
    def num_iterations(self) -> float:
        """The work: what full speed does in the job's nominal time."""
        return self.job_s * self.hull.full_speed_per_s

    @property
    def permitted_s(self) -> float:
        """The longest the job may take."""
        return self.job_s * (1.0 + self.max_slowdown_ratio)

    @property
    def slot_lengths_s(self) -> Array:
        """The hours until the deadline; the last is cut there."""
        num_slots = math.ceil(self.permitted_s / SLOT_S - 1e-9)
        lengths = np.full(num_slots, SLOT_S)
        lengths[-1] = self.permitted_s - SLOT_S * (num_slots - 1)
        return lengths

    def full_speed_g(self) -> float:
        """Grams at full speed all the way."""
        return self.constant_g(self.job_s)

    def constant_g(self, time_s: float) -> float:
        """Grams at the one point that takes the given time."""
        speed = constant_speed(self.hull, self.num_iterations, time_s)
        return self._grams(np.full(len(self.truth), speed))[0]

    def run(self, speeds_per_s: Array) -> JobRun:
        """Return what given speeds of the hours lead to."""
        carbon_g, time_s = self._grams(speeds_per_s)
        return JobRun(speeds_per_s, carbon_g, self.constant_g(time_s), time_s)

    def oracle(self) -> JobRun:
        """Return the optimum of someone who knows the trace."""
        lengths = self.slot_lengths_s
        work = self.num_iterations * (1.0 + RESERVE_RATIO)
        return self.run(plan_slots(self.hull, self.truth[: len(lengths)], lengths, work).speeds_per_s)

    def controlled(self, expected: Array, fallback: Array) -> JobRun:
        """Return what the controller makes of a look-ahead.

        Args:
            expected: (slots, H), what was expected at each hour of it and the next ones; H may be shorter than the job.
            fallback: (slots, slots), the same of a naive forecast that reaches to the end.
        """
        lengths = self.slot_lengths_s
        left = self.num_iterations * (1.0 + RESERVE_RATIO)
        speeds = np.empty(len(lengths))
        for k, length_s in enumerate(lengths):
            speeds[k] = next_speed(self.hull, expected[k], fallback[k][: len(lengths) - k], lengths[k:], left)
            left -= speeds[k] * length_s
        return self.run(speeds)

    def _grams(self, speeds_per_s: Array) -> tuple[float, float]:
        """Return grams and time of the work at given hourly speeds; the last speed is kept until the work is done."""
        done_by_end = np.cumsum(speeds_per_s) * SLOT_S
        work = self.num_iterations
        last = int(np.searchsorted(done_by_end, work))
        if last >= len(speeds_per_s):
            extra_s = (work - float(done_by_end[-1])) / float(speeds_per_s[-1])
            times = np.append(np.full(len(speeds_per_s) - 1, SLOT_S), SLOT_S + extra_s)
        else:
            before = float(done_by_end[last - 1]) if last else 0.0
            times = np.append(np.full(last, SLOT_S), (work - before) / float(speeds_per_s[last]))
        speeds = speeds_per_s[: len(times)]
        energy_j = self.hull.power_w(speeds) * times
        return float((energy_j * self.truth[: len(times)]).sum()) / JOULES_PER_KWH, float(times.sum())
