"""All that a report says of one job, read from the history once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from statistics import median
from typing import Any

from gpuenergyd.core.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.report.figures import JOULES_PER_KWH
from gpuenergyd.report.timeline import ObservedIteration
from gpuenergyd.store import History, IterationRow, JobSummary, PlanRow


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """What the last tuned plan of a job was measured to do: medians over its regular iterations after the first."""

    plan_id: str
    num_iterations: int
    iteration_time_s: float
    energy_j: float | None
    saving_ratio: float | None
    slowdown_ratio: float | None


@dataclass(frozen=True, slots=True)
class JobReport:
    """One job: its figures and its iterations."""

    summary: JobSummary
    iterations: tuple[IterationRow, ...]
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

    @property
    def plan_in_force(self) -> PlanInForce | None:
        """The last tuned plan, whatever earlier plans that were corrected did; None without a regular iteration."""
        tuned = [r for r in self.iterations if r.is_regular and r.plan_purpose is PlanPurpose.TUNED and r.plan_id]
        if not tuned or tuned[-1].plan_id is None:
            return None
        own = [r for r in tuned if r.plan_id == tuned[-1].plan_id]
        settled = own[1:] or own
        time_s = median(r.iteration_time_s for r in settled)
        energies_j = [r.energy_j for r in settled if r.energy_j is not None]
        energy_j = median(energies_j) if energies_j else None
        summary = self.summary
        return PlanInForce(
            plan_id=tuned[-1].plan_id,
            num_iterations=len(settled),
            iteration_time_s=time_s,
            energy_j=energy_j,
            saving_ratio=1 - energy_j / summary.baseline_energy_j
            if energy_j is not None and summary.baseline_energy_j
            else None,
            slowdown_ratio=time_s / summary.baseline_time_s - 1 if summary.baseline_time_s else None,
        )

    def figures(self) -> dict[str, Any]:
        """Return everything by name, as JSON and CSV give it; a missing figure is None."""
        named = {field.name: getattr(self.summary, field.name) for field in fields(self.summary)}
        for name in ("saving", "slowdown"):
            low, high = named.pop(f"{name}_interval") or (None, None)
            named |= {f"{name}_low_ratio": low, f"{name}_high_ratio": high}
        return {
            **named,
            "saved_energy_j": self.saved_energy_j,
            "profiling_cost_j": self.profiling_cost_j,
            "price_per_kwh": self.price_per_kwh,
            "cost": self.cost,
        }


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
        JobReport(summary, history.iterations(summary.job_id), price_per_kwh)
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


def _typical(rows: Sequence[IterationRow]) -> IterationRow:
    middle_s = median(row.iteration_time_s for row in rows)
    return min(rows, key=lambda row: abs(row.iteration_time_s - middle_s))
