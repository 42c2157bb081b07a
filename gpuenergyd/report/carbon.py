"""Emissions and carbon savings of a job, computed from the history.

Emissions are those of all its energy (`energy_use`). The savings of plans are known for tuned iterations. An iteration
has the intensity of the hour in which it started; for a block of merged iterations, in which the block started.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuenergyd.core.carbon.account import JobCarbon, WorkSlot, charged_time_s, job_carbon, saving_fields
from gpuenergyd.core.carbon.intensity import CarbonSignal, IntensitySample
from gpuenergyd.core.job.result_text import NOT_SIGNIFICANT, slowdown_text
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.count_text import count_text
from gpuenergyd.quantities.energy_use import EnergyUse
from gpuenergyd.quantities.rates import Rates
from gpuenergyd.report.formatting import grams_text, ratio_text, time_text
from gpuenergyd.store import History, JobSummary, TargetRecord
from gpuenergyd.store.reading.iterations import Iterations
from gpuenergyd.store.reading.time_range import ALL_TIME, TimeRange

SAVED_GRAMS = ("saved_by_plan_g", "saved_by_frontier_g", "saved_by_timing_g")
"""The JSON values for the three parts of a job's saved emissions."""

NO_CARBON: Mapping[str, Any] = dict.fromkeys(
    (
        *("tuned_carbon_g", *SAVED_GRAMS),
        *("carbon_zone", "carbon_source", "carbon_kind", "carbon_factor", "measured_intensity_ratio"),
        *("host_power_w", "total_slowdown_ratio", "profiling_slowdown_ratio", "trial_slowdown_ratio", "num_targets"),
        "is_grid_replayed",
    )
)
"""The JSON values of a job without any known carbon intensity, in addition to those of its energy."""


@dataclass(frozen=True, slots=True)
class CarbonReport:
    """Emissions of one job; `tuned` holds the savings of its tuned iterations, None without a frontier."""

    signal: CarbonSignal
    use: EnergyUse
    """The job's whole energy, with its emissions."""
    host_power_w: float
    """Mean power assumed for the rest of its hosts: the share of its GPUs."""
    pue: float
    """Power usage effectiveness included in all emissions."""
    tuned: JobCarbon | None
    targets: tuple[TargetRecord, ...]
    slowdown_ratio: float | None
    """Slowdown of the whole job against full speed, as charged to its slowdown account."""
    trial_ratio: float | None
    """The part of the slowdown caused by trials, some of them slower than any plan."""
    profiling_ratio: float | None
    """The part caused by profiling, in histories of versions up to 0.3."""
    is_replayed: bool
    """Whether a past trace was replayed, so that the emissions are not those of the day on which the job ran."""

    def to_dict(self) -> dict[str, Any]:
        """Return all values by their JSON and CSV names, without those of its energy."""
        return {
            **saving_fields(self.tuned),
            "carbon_zone": self.signal.zone,
            "carbon_source": self.signal.source,
            "carbon_kind": self.signal.kind,
            "carbon_factor": self.signal.factor,
            "measured_intensity_ratio": self.measured_ratio,
            "host_power_w": self.host_power_w,
            "total_slowdown_ratio": self.slowdown_ratio,
            "profiling_slowdown_ratio": self.profiling_ratio,
            "trial_slowdown_ratio": self.trial_ratio,
            "num_targets": len(self.targets),
            "is_grid_replayed": self.is_replayed,
        }

    @property
    def measured_ratio(self) -> float | None:
        """Share of the energy that has a measured intensity; for the rest it was estimated, forecast or fixed."""
        priced_j, measured_j = self.use.priced_j, self.use.measured_intensity_j
        return measured_j / priced_j if priced_j and measured_j is not None else None

    @property
    def saved_g(self) -> float | None:
        """Emissions saved by plans, slowdown and timing together; None if unknown."""
        if self.tuned is None:
            return None
        savings = self.tuned.savings
        by_plan_g = self.tuned.saved_by_plan_g or 0.0
        return by_plan_g + savings.saved_by_frontier_g + savings.saved_by_timing_g

    def lines(self, *, is_significant: bool = True) -> tuple[str, ...]:
        """Return a summary for people, one sentence per line; without amounts if the saving is not significant."""
        signal = self.signal
        host = f"including {self.host_power_w:g} W assumed for the host" if self.host_power_w else "GPUs only"
        pue = f", PUE {self.pue:g}" if self.pue != 1.0 else ""
        use = self.use
        unpriced = use.unpriced_j / use.used_j if use.unpriced_j and use.used_j else 0.0
        unknown = f"; intensity unknown for {100 * unpriced:.0f} % of the energy" if unpriced > 0.005 else ""
        estimated = (
            f"; {grams_text(use.estimated_carbon_g)} of it from estimated energy" if use.estimated_carbon_g else ""
        )
        replayed = "; replayed trace" if self.is_replayed else ""
        grid = f"zone {signal.zone}, source {signal.source}, {signal.kind}, {signal.factor}"
        notes = f"{estimated}{unknown}{replayed}"
        emissions = f"carbon emissions: {grams_text(use.carbon_g)} ({host}{pue}); location-based"
        lines = [f"{emissions}, {grid}{notes}"]
        if self.tuned is not None and not is_significant:
            lines.append(f"emissions saved in tuned iterations: {NOT_SIGNIFICANT}")
        elif self.tuned is not None:
            savings, full_g = self.tuned.savings, self.tuned.savings.full_speed_g
            by_frontier = (
                f"{grams_text(savings.saved_by_frontier_g)} ({ratio_text(savings.saved_by_frontier_g / full_g)})"
            )
            by_timing = f"{grams_text(savings.saved_by_timing_g)} ({ratio_text(savings.saved_by_timing_g / full_g)})"
            lines.append(
                f"saved in tuned iterations: {grams_text(self.tuned.saved_by_plan_g)} without slowdown, {by_frontier}"
                f" by running slower, {by_timing} by choosing the hours, compared with a constant slowdown of the same"
                " total time"
            )
        if self.targets:
            times_s = [target.permitted_time_s for target in self.targets if target.permitted_time_s is not None]
            span = f" from {time_text(min(times_s))} to {time_text(max(times_s))} per iteration" if times_s else ""
            parts = f"trials: {slowdown_text(self.trial_ratio)}"
            if self.profiling_ratio:
                parts += f", profiling: {slowdown_text(self.profiling_ratio)}"
            lines.append(
                f"whole job against full speed: {slowdown_text(self.slowdown_ratio)} ({parts}); permitted slowdown"
                f" {100 * self.targets[-1].budget_ratio:.3g} %; {count_text(len(self.targets), 'target')}{span}"
            )
        return tuple(lines)


def carbon_report(
    history: History, job: JobSummary, use: EnergyUse, rates: Rates, time_range: TimeRange = ALL_TIME
) -> CarbonReport | None:
    """Return the emissions of a job for its energy use in a time range; None if no intensity is known."""
    grid = rates.grid_of(job.job_id)
    if grid is None or use.carbon_g is None:
        return None
    iterations = [row for row in history.all_iterations(job.job_id) if time_range.contains(row.started_at)]
    targets = history.targets(job.job_id)
    frontier = next((row.frontier for row in reversed(targets) if row.frontier), ())
    priced = [(row, grid.at(row.started_at)) for row in iterations]
    host_power_w = use.host_power_w(max(1, len(set(job.gpu_uuids)))) or 0.0
    full_speed = None
    if job.baseline_time_s is not None and job.baseline_energy_j is not None:
        full_speed = (job.baseline_time_s, job.baseline_energy_j)
    return CarbonReport(
        signal=grid.signal,
        use=use,
        host_power_w=host_power_w,
        pue=rates.pue,
        tuned=job_carbon(_slots(priced, rates.pue), frontier, host_power_w=host_power_w, baseline=full_speed),
        targets=targets,
        slowdown_ratio=slowdown_ratio(job, iterations, targets),
        trial_ratio=slowdown_ratio(job, iterations, targets, PlanPurpose.TRIAL),
        profiling_ratio=slowdown_ratio(job, iterations, targets, PlanPurpose.PROFILE),
        is_replayed=any(row.grid_from != row.host.valid_from_at for row in grid.known),
    )


def _slots(priced: Sequence[tuple[Iterations, IntensitySample | None]], pue: float) -> list[WorkSlot]:
    """Return the tuned work by intensity interval, oldest first; intensities are per kWh used by the computers."""
    slots: list[WorkSlot] = []
    for row, sample in priced:
        if not row.is_regular or row.purpose is not PlanPurpose.TUNED or row.sum_energy_j is None:
            continue
        begin_at = sample.valid_from_at if sample is not None else row.started_at
        if not slots or slots[-1].begin_at != begin_at:
            slots.append(WorkSlot(begin_at, 0, 0.0, 0.0, None))
        joined = slots[-1].with_iterations(row.measured_time_s, row.sum_energy_j, num_iterations=row.num_measured)
        intensity = pue * sample.carbon_intensity_g_per_kwh if sample is not None else None
        slots[-1] = replace(joined, carbon_intensity_g_per_kwh=intensity)
    return slots


def slowdown_ratio(
    job: JobSummary, iterations: Sequence[Iterations], targets: Sequence[TargetRecord], by: PlanPurpose | None = None
) -> float | None:
    """Return the slowdown of a job, or the part due to iterations of one purpose; None without iterations.

    It is the value of the job's slowdown account (`charged_time_s`), recomputed from stored iterations. Disturbed
    iterations are charged at most the time permitted when they started; iterations in a block are charged its mean.
    """
    num_iterations = sum(row.num_iterations for row in iterations)
    full_s = job.baseline_time_s
    if not num_iterations or not full_s:
        return None
    decided_at = [target.decided_at for target in targets]
    excess_s = 0.0
    for row in iterations:
        if by is not None and row.purpose is not by:
            continue
        number = bisect_right(decided_at, row.started_at)
        registered_s = full_s * (1.0 + job.max_slowdown_ratio)
        permitted_s = (targets[number - 1].permitted_time_s or full_s) if number else registered_s
        charged_s = charged_time_s(
            row.sum_time_s / row.num_iterations,
            full_speed_time_s=full_s,
            permitted_time_s=permitted_s,
            is_own=row.is_regular,
        )
        excess_s += row.num_iterations * (charged_s - full_s)
    return excess_s / (num_iterations * full_s)
