"""Carbon account of a job: emissions saved by running slower and by choosing the hours.

Both savings compare with the same work on the job's own frontier: at its fastest plan from the same start, and at one
constant point with the same total time. The frontier is a model. It is scaled to the measured energy of the work that
was run, so that an error in its level cancels and only its shape matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from math import fsum

from gpuenergyd.core.carbon.intensity import CarbonSavings, grams
from gpuenergyd.core.carbon.speed_curve import power_at, speed_points
from gpuenergyd.errors import CarbonDataError


@dataclass(frozen=True, slots=True)
class WorkSlot:
    """Tuned iterations of a job during one intensity interval; the intensity is None if unknown."""

    begin_at: datetime
    num_iterations: int
    time_s: float
    energy_j: float
    carbon_intensity_g_per_kwh: float | None

    def with_iterations(self, time_s: float, energy_j: float, *, num_iterations: int = 1) -> "WorkSlot":
        """Return the slot with further iterations; time and energy are their sums."""
        return WorkSlot(
            self.begin_at,
            self.num_iterations + num_iterations,
            self.time_s + time_s,
            self.energy_j + energy_j,
            self.carbon_intensity_g_per_kwh,
        )


@dataclass(frozen=True, slots=True)
class JobCarbon:
    """Emissions of a job's tuned iterations, including the host if its power is known.

    `unpriced_j` is the energy in hours of unknown intensity; it is in none of the sums.
    """

    savings: CarbonSavings
    baseline_g: float | None
    """Emissions of the same work at the baseline, from the same start; None if its energy was not measured."""
    num_iterations: int
    priced_j: float
    unpriced_j: float
    host_power_w: float

    @property
    def saved_by_plan_g(self) -> float | None:
        """Saving of the fastest plan against the baseline, without slowdown."""
        return None if self.baseline_g is None else self.baseline_g - self.savings.full_speed_g


def saving_fields(carbon: JobCarbon | None) -> dict[str, float | None]:
    """Return emissions and savings of tuned iterations by their JSON names; None if unknown."""
    savings = carbon.savings if carbon is not None else None
    return {
        "tuned_carbon_g": savings.actual_g if savings is not None else None,
        "saved_by_plan_g": carbon.saved_by_plan_g if carbon is not None else None,
        "saved_by_frontier_g": savings.saved_by_frontier_g if savings is not None else None,
        "saved_by_timing_g": savings.saved_by_timing_g if savings is not None else None,
    }


def job_carbon(
    slots: Sequence[WorkSlot],
    frontier: Sequence[tuple[float, float]],
    *,
    host_power_w: float = 0.0,
    baseline: tuple[float, float] | None = None,
) -> JobCarbon | None:
    """Return emissions and savings of tuned work; None without a frontier or without priced work.

    Args:
        slots: the job's tuned work, in order of time.
        frontier: the job's `(iteration_time_s, energy_j)` points, without the host.
        host_power_w: assumed power of the host without its GPUs.
        baseline: measured iteration time and energy of the baseline.
    """
    priced = [(slot, c) for slot in slots if (c := slot.carbon_intensity_g_per_kwh) is not None and slot.time_s > 0]
    num_iterations = sum(slot.num_iterations for slot, _ in priced)
    try:
        curve = speed_points(frontier, host_power_w)
    except CarbonDataError:
        return None
    if not num_iterations:
        return None
    measured = [slot.energy_j + host_power_w * slot.time_s for slot, _ in priced]
    modelled_j = fsum(power_at(curve, slot.num_iterations / slot.time_s) * slot.time_s for slot, _ in priced)
    scale = fsum(measured) / modelled_j
    total_s = fsum(slot.time_s for slot, _ in priced)
    lengths = [(slot.time_s, c) for slot, c in priced]
    constant_per_s = min(max(num_iterations / total_s, curve[0][0]), curve[-1][0])
    full_g = _constant_speed_grams(lengths, num_iterations, curve[-1][0], scale * curve[-1][1])
    constant_w = scale * power_at(curve, constant_per_s)
    baseline_g = None
    if baseline is not None:
        time_s, energy_j = baseline
        baseline_g = _constant_speed_grams(lengths, num_iterations, 1.0 / time_s, energy_j / time_s + host_power_w)
    return JobCarbon(
        CarbonSavings(
            actual_g=fsum(grams(energy_j, c) for energy_j, (_, c) in zip(measured, priced, strict=True)),
            full_speed_g=full_g,
            equal_time_constant_g=_constant_speed_grams(lengths, num_iterations, constant_per_s, constant_w),
        ),
        baseline_g=baseline_g,
        num_iterations=num_iterations,
        priced_j=fsum(slot.energy_j for slot, _ in priced),
        unpriced_j=fsum(slot.energy_j for slot in slots) - fsum(slot.energy_j for slot, _ in priced),
        host_power_w=host_power_w,
    )


def charged_time_s(
    iteration_time_s: float, *, full_speed_time_s: float, permitted_time_s: float, is_own: bool
) -> float:
    """Return the time charged for an iteration in the job's slowdown account and in reports.

    A disturbed iteration (checkpoint, evaluation, stall) or one at straggler pace is charged at most the permitted
    time, because the job's own share of its time is unknown.
    """
    return iteration_time_s if is_own else min(iteration_time_s, max(permitted_time_s, full_speed_time_s))


def _constant_speed_grams(
    lengths: Sequence[tuple[float, float]], num_iterations: int, speed_per_s: float, power_w: float
) -> float:
    """Return the emissions of the work at one constant speed; work beyond the last slot is billed at its intensity."""
    left_s = num_iterations / speed_per_s
    total_g = 0.0
    for number, (time_s, intensity) in enumerate(lengths):
        used_s = left_s if number == len(lengths) - 1 else min(left_s, time_s)
        total_g += grams(power_w * used_s, intensity)
        left_s -= used_s
    return total_g
