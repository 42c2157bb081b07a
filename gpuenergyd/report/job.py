"""All that a report says of one job, read from the history once."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cache, cached_property, partial
from statistics import median
from typing import Any

from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.report.carbon import NO_CARBON, CarbonReport, carbon_report
from gpuenergyd.report.energy_use import NOTHING_USED, EnergyUse
from gpuenergyd.report.observed_iteration import ObservedIteration
from gpuenergyd.report.tariff import Tariff
from gpuenergyd.store import History, IterationRow, JobSummary, PlanRow
from gpuenergyd.store.reading.summaries import WHOLE, Counted


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """What the last tuned plan of a job was measured to do: medians over its regular iterations after the first."""

    plan_id: str
    num_iterations: int
    iteration_time_s: float
    energy_j: float | None
    saving_ratio: float | None
    slowdown_ratio: float | None


@dataclass(frozen=True)
class JobReport:
    """One job: its figures and its iterations, which are read when first asked for; without slots, to keep them."""

    summary: JobSummary
    read_iterations: Callable[[], tuple[IterationRow, ...]] = field(repr=False, compare=False)
    ledger: EnergyUse = NOTHING_USED
    """All that its GPUs used while they worked for it, between iterations too."""
    price_per_kwh: float | None = None
    read_carbon: Callable[[], CarbonReport | None] = field(default=lambda: None, repr=False, compare=False)
    counted: Counted = WHOLE
    """Which part of the job the figures count; its pictures show all of it."""

    @property
    def is_part(self) -> bool:
        """Whether the figures leave a part of the job out."""
        return self.counted != WHOLE

    @cached_property
    def carbon(self) -> CarbonReport | None:
        """Its grams, None where no intensity of the job's time is known."""
        return self.read_carbon()

    @cached_property
    def iterations(self) -> tuple[IterationRow, ...]:
        """The iterations that are still kept singly, in order."""
        return self.read_iterations()

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
        num_measured = summary.num_measured_profile_iterations
        if summary.baseline_energy_j is None or summary.profile_energy_j is None:
            return None
        if num_measured < summary.num_profile_iterations:
            return None
        return summary.profile_energy_j - num_measured * summary.baseline_energy_j

    @property
    def cost(self) -> float | None:
        """What its GPUs used costs, measured and estimated, in the currency of the price."""
        return self.ledger.cost

    @property
    def plan_in_force(self) -> PlanInForce | None:
        """The last tuned plan, whatever earlier plans that were corrected did; None without a regular iteration."""
        tuned = [r for r in self.iterations if self._is_tuned(r)]
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

    def _is_tuned(self, row: IterationRow) -> bool:
        is_counted = row.plan_purpose is PlanPurpose.TUNED and self.counted.holds(row.started_at)
        return row.is_regular and row.plan_id is not None and is_counted

    def figures(self) -> dict[str, Any]:
        """Return everything by name, as JSON and CSV give it; a missing figure is None."""
        named = {field.name: getattr(self.summary, field.name) for field in fields(self.summary)}
        for name in ("saving", "slowdown"):
            low, high = named.pop(f"{name}_interval") or (None, None)
            named |= {f"{name}_low_ratio": low, f"{name}_high_ratio": high}
        tags = dict(named.pop("tags"))
        return {
            **named,
            "saved_energy_j": self.saved_energy_j,
            "profiling_cost_j": self.profiling_cost_j,
            **{f"gpu_{name}": value for name, value in self.ledger.figures().items()},
            "counted_from": self.counted.since,
            "counted_until": self.counted.until,
            "price_per_kwh": self.price_per_kwh,
            "cost": self.cost,
            **(self.carbon.figures() if self.carbon is not None else NO_CARBON),
            # Named, so that a table of sacct joins without taking tags apart.
            **{name: tags.get(name) for name in ("user", "slurm_job_id", "git_commit")},
            "tags": tags,
        }


def job_reports(
    history: History,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    job: str | None = None,
    tariff: Tariff | None = None,
    counts_only_span: bool = False,
) -> tuple[JobReport, ...]:
    """Return the jobs that ran in a span of time, oldest first; `job` is a job's id or name.

    Their figures are those of the whole job, or where asked of its part within the span.
    """
    summaries = history.job_summaries(since=since, until=until, job=job, counts_only_span=counts_only_span)
    span = Counted(since, until) if counts_only_span else WHOLE
    used = _energy_use(history, summaries, tariff, span)
    price = tariff.flat_price_per_kwh if tariff is not None else None
    begun_at = min((summary.started_at for summary in summaries), default=None)
    known_intensities = cache(partial(history.intensities, since=begun_at))
    return tuple(
        JobReport(
            summary,
            partial(history.iterations, summary.job_id),
            used.get(summary.job_id, NOTHING_USED),
            price,
            partial(carbon_report, history, summary, span, known_intensities),
            WHOLE if span.holds_all(summary.started_at, summary.ended_at) else span,
        )
        for summary in summaries
    )


def _energy_use(
    history: History, summaries: Sequence[JobSummary], tariff: Tariff | None, span: Counted
) -> Mapping[str, EnergyUse]:
    if not summaries:
        return {}
    used: dict[str, EnergyUse] = defaultdict(EnergyUse)
    # A clock that was set back meanwhile lets a job end before it began.
    begun_at = min(min(summary.started_at, summary.ended_at or summary.started_at) for summary in summaries)
    # A bucket begins before the job does.
    begin = begun_at.replace(minute=0, second=0, microsecond=0)
    has_periods = tariff is not None and tariff.periods != ()
    for part in history.energy_sums(since=max(begin, span.since or begin), until=span.until, by_time=has_periods):
        if part.job_id:
            used[part.job_id] = used[part.job_id].plus(part, tariff)
    return used


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
            name = f"{title}, iteration {row.iteration_index}"
            schedule_name = report.summary.schedule_name or ""
            shown.append(ObservedIteration(name, row.iteration_time_s, spans, schedule_name))
    return tuple(shown)


def plan_in_force(history: History, report: JobReport) -> PlanRow | None:
    """Return the last tuned plan of a job."""
    tuned = [row for row in history.plans(report.summary.job_id) if row.plan.purpose is PlanPurpose.TUNED]
    return tuned[-1] if tuned else None


def _typical(rows: Sequence[IterationRow]) -> IterationRow:
    middle_s = median(row.iteration_time_s for row in rows)
    return min(rows, key=lambda row: abs(row.iteration_time_s - middle_s))
