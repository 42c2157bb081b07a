"""All that a report says of one job, read from the history once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from statistics import median
from typing import Any

from gpuenergyd.core.observation import IterationObservation, RankEnergy
from gpuenergyd.core.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.core.savings import Interval, measured_saving
from gpuenergyd.report.figures import JOULES_PER_KWH, ratio_text
from gpuenergyd.report.timeline import ObservedIteration
from gpuenergyd.store import History, IterationRow, JobSummary, PlanRow


@dataclass(frozen=True, slots=True)
class JobReport:
    """One job: its figures, how sure they are, and its iterations.

    The intervals come from all full-speed iterations, also those between tuned ones, so that a drift of the job is
    not taken for a saving; the summary's ratios are those of the medians.
    """

    summary: JobSummary
    iterations: tuple[IterationRow, ...]
    saving: Interval | None
    slowdown: Interval | None
    price_per_kwh: float | None = None

    @property
    def saved_energy_j(self) -> float | None:
        """What all regular tuned iterations together saved against the baseline."""
        summary = self.summary
        if summary.saving_ratio is None or summary.baseline_energy_j is None:
            return None
        return summary.saving_ratio * summary.baseline_energy_j * summary.num_tuned_iterations

    @property
    def profiling_cost_j(self) -> float | None:
        """What profiling used beyond as many baseline iterations; negative when it saved already."""
        summary = self.summary
        energies_j = [r.energy_j for r in self.iterations if r.plan_purpose is PlanPurpose.PROFILE]
        measured_j = [energy_j for energy_j in energies_j if energy_j is not None]
        if summary.baseline_energy_j is None or not measured_j or len(measured_j) < len(energies_j):
            return None
        return sum(measured_j) - len(measured_j) * summary.baseline_energy_j

    @property
    def cost(self) -> float | None:
        """What the measured energy costs, in the currency of the price."""
        return cost_of(self.summary.energy_j, self.price_per_kwh)

    def figures(self) -> dict[str, Any]:
        """Return everything by name, as JSON and CSV give it; a missing figure is None."""
        named = {field.name: getattr(self.summary, field.name) for field in fields(self.summary)}
        for name, interval in (("saving", self.saving), ("slowdown", self.slowdown)):
            named[f"{name}_low_ratio"] = interval.low if interval else None
            named[f"{name}_high_ratio"] = interval.high if interval else None
        return {
            **named,
            "saved_energy_j": self.saved_energy_j,
            "profiling_cost_j": self.profiling_cost_j,
            "price_per_kwh": self.price_per_kwh,
            "cost": self.cost,
        }


def interval_text(interval: Interval) -> str:
    """Return where a ratio lies: +11.0 % to +12.1 %."""
    return f"{ratio_text(interval.low)} to {ratio_text(interval.high)}"


def cost_of(energy_j: float | None, price_per_kwh: float | None) -> float | None:
    """Return what energy costs; None when one of them is not known."""
    return None if energy_j is None or price_per_kwh is None else energy_j / JOULES_PER_KWH * price_per_kwh


def job_reports(
    history: History,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    job: str | None = None,
    price_per_kwh: float | None = None,
) -> tuple[JobReport, ...]:
    """Return the jobs that ran in a span of time, oldest first; `job` is a job's id or name."""
    return tuple(
        _job_report(summary, history.iterations(summary.job_id), price_per_kwh)
        for summary in history.job_summaries(since=since, until=until, job=job)
    )


def before_and_after(history: History, report: JobReport) -> tuple[ObservedIteration, ...]:
    """Return the timelines to show: the baseline iteration nearest to its median, and the same for the last plan.

    One or both are missing when their timeline was not kept.
    """
    job_id = report.summary.job_id
    kept = set(history.iterations_with_spans(job_id))
    regular = [row for row in report.iterations if row.is_regular and row.iteration_index in kept]
    baseline = [row for row in regular if row.plan_id == BASELINE_PLAN_ID]
    tuned = [row for row in regular if row.plan_purpose is PlanPurpose.TUNED]
    last_plan = [row for row in tuned if row.plan_id == tuned[-1].plan_id]
    shown = []
    for title, rows in (("before: every clock un-tuned", baseline), (f"after: {report.summary.policy}", last_plan)):
        if rows:
            row = _typical(rows)
            spans = history.spans(job_id, row.iteration_index)
            shown.append(ObservedIteration(f"{title}, iteration {row.iteration_index}", row.iteration_time_s, spans))
    return tuple(shown)


def plan_in_force(history: History, report: JobReport) -> PlanRow | None:
    """Return the last tuned plan of a job."""
    tuned = [row for row in history.plans(report.summary.job_id) if row.plan.purpose is PlanPurpose.TUNED]
    return tuned[-1] if tuned else None


def _job_report(summary: JobSummary, rows: tuple[IterationRow, ...], price_per_kwh: float | None) -> JobReport:
    def regular(purpose: PlanPurpose) -> list[IterationObservation]:
        return [_observation(row) for row in rows if row.is_regular and row.plan_purpose is purpose]

    measured = measured_saving(regular(PlanPurpose.BASELINE), regular(PlanPurpose.TUNED))
    return JobReport(
        summary=summary,
        iterations=rows,
        saving=measured.saving_ratio if measured else None,
        slowdown=measured.slowdown_ratio if measured else None,
        price_per_kwh=price_per_kwh,
    )


def _observation(row: IterationRow) -> IterationObservation:
    """Return an iteration as the core judges it, its energy in one piece."""
    window = RankEnergy(pp_rank=0, window_s=row.iteration_time_s, energy_j=row.energy_j, time_at=())
    return IterationObservation(row.iteration_index, row.plan_id, row.iteration_time_s, (), (window,), row.is_regular)


def _typical(rows: Sequence[IterationRow]) -> IterationRow:
    middle_s = median(row.iteration_time_s for row in rows)
    return min(rows, key=lambda row: abs(row.iteration_time_s - middle_s))
