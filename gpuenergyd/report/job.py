"""The report data of one job: its summary, iterations, energy, carbon and plan in force."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import cached_property, partial
from statistics import median
from typing import TYPE_CHECKING, Any

from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.count_text import count_text
from gpuenergyd.quantities.by_job import energy_by_job
from gpuenergyd.quantities.energy_use import NO_ENERGY, EnergyUse
from gpuenergyd.quantities.rates import Rates, read_rates
from gpuenergyd.quantities.tariff import Tariff
from gpuenergyd.report.carbon import NO_CARBON, SAVED_GRAMS, CarbonReport, carbon_report
from gpuenergyd.report.formatting import energy_text
from gpuenergyd.report.timelines import ObservedIteration
from gpuenergyd.store import History, IterationRow, JobSummary, PlanRecord
from gpuenergyd.store.reading.time_range import ALL_TIME, TimeRange
from gpuenergyd.store.records import ORDER_ADVICE, SLOWDOWN_ADVICE

if TYPE_CHECKING:
    from gpuenergyd.core.job.measurements.savings import Interval, Point


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """Measured medians of the last tuned plan of a job, over its regular iterations without the first."""

    plan_id: str
    num_iterations: int
    iteration_time_s: float
    energy_j: float | None
    saving: "Interval | None"
    slowdown: "Interval | None"
    """Measured against the baseline, like `saving`; None with too few iterations."""


@dataclass(frozen=True)
class JobReport:
    """The report of one job; iterations and carbon are read on first use (cached, hence no slots)."""

    summary: JobSummary
    read_iterations: Callable[[], tuple[IterationRow, ...]] = field(repr=False, compare=False)
    energy_use: EnergyUse = NO_ENERGY
    """Energy that its GPUs used for the job, including time between iterations."""
    rates: Rates = field(default_factory=Rates, repr=False, compare=False)
    """Rates used for the price and emissions of its energy."""
    read_carbon: Callable[[], CarbonReport | None] = field(default=lambda: None, repr=False, compare=False)
    time_range: TimeRange = ALL_TIME
    """Part of the job that the values cover; charts always show the whole job."""
    read_advice: Callable[[str], str | None] = field(default=lambda _action: None, repr=False, compare=False)

    @property
    def is_partial(self) -> bool:
        """Whether the values cover only a part of the job."""
        return self.time_range != ALL_TIME

    @cached_property
    def carbon(self) -> CarbonReport | None:
        """Its emissions; None if no carbon intensity is known for the time of the job."""
        return self.read_carbon()

    @cached_property
    def order_advice(self) -> str | None:
        """Predicted saving of another instruction order, as text; None if the policy did not compute it."""
        return self.read_advice(ORDER_ADVICE)

    @cached_property
    def slowdown_advice(self) -> str | None:
        """What a larger permitted slowdown would have saved, as text; None if unknown, or while the job runs."""
        return self.read_advice(SLOWDOWN_ADVICE)

    @cached_property
    def iterations(self) -> tuple[IterationRow, ...]:
        """The iterations that are still stored singly, in order."""
        return self.read_iterations()

    @property
    def saved_energy_j(self) -> float | None:
        """Energy saved by all regular tuned iterations, compared with the baseline; None unless significant."""
        summary = self.summary
        if not summary.is_saving_significant or summary.saving_ratio is None or summary.baseline_energy_j is None:
            return None
        return summary.saving_ratio * summary.baseline_energy_j * summary.num_tuned_iterations

    @property
    def is_saving_left_out(self) -> bool:
        """Whether totals leave out this job's saving, which was measured but is not significant."""
        return self.summary.saving_ratio is not None and not self.summary.is_saving_significant

    @property
    def has_shown_prediction(self) -> bool:
        """Whether the last plan predicts less energy than full speed; other predictions are not shown."""
        predicted_j, full_speed_j = self.summary.predicted_energy_j, self.adjusted_baseline_energy_j
        full_speed_j = self.summary.baseline_energy_j if full_speed_j is None else full_speed_j
        return predicted_j is not None and (full_speed_j is None or predicted_j < full_speed_j)

    @property
    def profiling_cost_j(self) -> float | None:
        """Energy of profiling iterations (up to version 0.3) minus that of as many at full speed; negative if less."""
        summary = self.summary
        is_measured = summary.num_measured_profile_iterations == summary.num_profile_iterations
        return self._cost_j(summary.profile_energy_j if is_measured else None, summary.num_profile_iterations)

    @property
    def trial_cost_j(self) -> float | None:
        """Energy of trial iterations minus that of as many at full speed; negative if less."""
        return self._cost_j(self.summary.trial_energy_j, self.summary.num_trial_iterations)

    def _cost_j(self, energy_j: float | None, num_iterations: int) -> float | None:
        baseline_j = self.summary.baseline_energy_j
        return None if energy_j is None or baseline_j is None else energy_j - num_iterations * baseline_j

    @property
    def estimate_note(self) -> str:
        """How many energies of iterations are estimated, and why; empty if none is."""
        summary = self.summary
        if not summary.num_estimated_iterations:
            return ""
        return (
            f"energy of {summary.num_estimated_iterations} of {count_text(summary.num_iterations, 'iteration')}:"
            " estimated, since each was shorter than the time between readings of the counter; their sum is measured"
        )

    @property
    def cost_lines(self) -> tuple[str, ...]:
        """Extra energy over full speed of trials, and of profiling up to version 0.3, as text; empty if none."""
        summary = self.summary
        costs = (
            ("trials", summary.num_trial_iterations, self.trial_cost_j),
            ("profiling", summary.num_profile_iterations, self.profiling_cost_j),
        )
        return tuple(
            f"{what}: {count_text(number, 'iteration')} used {energy_text(cost_j)} more than the same number of"
            " baseline iterations"
            for what, number, cost_j in costs
            if cost_j is not None and cost_j > 0.0
        )

    @property
    def cost(self) -> float | None:
        """Cost of the measured and estimated energy, in the currency of the tariff."""
        return self.energy_use.cost

    @property
    def between_iterations_j(self) -> float | None:
        """Measured and estimated energy outside iterations: before, between and after them."""
        used_j, within_j = self.energy_use.used_j, self.summary.iterations_energy_j
        return used_j if used_j is None or within_j is None else used_j - within_j

    @property
    def adjusted_baseline_time_s(self) -> float | None:
        """Iteration time at full speed close to the tuned iterations, with which the slowdown compares them."""
        time_s, ratio = self.summary.iteration_time_s, self.summary.slowdown_ratio
        return None if time_s is None or ratio is None else time_s / (1.0 + ratio)

    @property
    def adjusted_baseline_energy_j(self) -> float | None:
        """Energy per iteration at full speed close to the tuned iterations, with which the saving compares them."""
        energy_j, ratio = self.summary.energy_per_iteration_j, self.summary.saving_ratio
        return None if energy_j is None or ratio is None or ratio >= 1.0 else energy_j / (1.0 - ratio)

    @cached_property
    def plan_in_force(self) -> PlanInForce | None:
        """Measurements of the last tuned plan alone; None without a regular iteration."""
        from gpuenergyd.core.job.measurements.savings import saving_between  # noqa: PLC0415  the table of jobs needs none

        tuned = [r for r in self.iterations if self._is_tuned(r)]
        if not tuned or tuned[-1].plan_id is None:
            return None
        under_plan = [r for r in tuned if r.plan_id == tuned[-1].plan_id]
        settled = under_plan[1:] or under_plan
        time_s = median(r.iteration_time_s for r in settled)
        energies_j = [r.energy_j for r in settled if r.energy_j is not None]
        energy_j = median(energies_j) if energies_j else None
        first_index = self.summary.since_iteration
        counted = [r for r in self.iterations if r.is_regular and r.iteration_index >= first_index]
        baseline = [r for r in counted if r.plan_purpose is PlanPurpose.BASELINE]
        measured = saving_between(_points(baseline), _points(settled))
        return PlanInForce(
            plan_id=tuned[-1].plan_id,
            num_iterations=len(settled),
            iteration_time_s=time_s,
            energy_j=energy_j,
            saving=measured.saving_ratio if measured else None,
            slowdown=measured.slowdown_ratio if measured else None,
        )

    def _is_tuned(self, row: IterationRow) -> bool:
        is_tuned = row.plan_purpose is PlanPurpose.TUNED and row.plan_id is not None
        return row.is_regular and is_tuned and self.time_range.contains(row.started_at)

    @property
    def tokens_per_j(self) -> float | None:
        """Tokens per joule over all measured iterations; None if the program did not report its tokens."""
        tokens, energy_j = self.summary.num_tokens, self.summary.tokens_energy_j
        return tokens / energy_j if tokens and energy_j else None

    def to_dict(self) -> dict[str, Any]:
        """Return all values by their JSON and CSV names; missing values are None."""
        named = {field.name: getattr(self.summary, field.name) for field in fields(self.summary)}
        for name in ("saving", "slowdown"):
            low, high = named.pop(f"{name}_interval") or (None, None)
            named |= {f"{name}_low_ratio": low, f"{name}_high_ratio": high}
        tags = dict(named.pop("tags"))
        named |= {"energy_j": self.energy_use.energy_j, "regular_energy_j": self.summary.energy_j}
        carbon = dict(self.carbon.to_dict() if self.carbon is not None else NO_CARBON)
        if self.is_saving_left_out:  # amounts are shown only for significant savings
            carbon |= dict.fromkeys(SAVED_GRAMS)
        return {
            **named,
            "energy_per_token_j": _per_token(self.summary.energy_per_iteration_j, tags),
            "tokens_per_j": self.tokens_per_j,
            "baseline_energy_per_token_j": _per_token(self.summary.baseline_energy_j, tags),
            "is_saving_significant": self.summary.is_saving_significant,
            "between_iterations_j": self.between_iterations_j,
            "adjusted_baseline_time_s": self.adjusted_baseline_time_s,
            "adjusted_baseline_energy_j": self.adjusted_baseline_energy_j,
            "saved_energy_j": self.saved_energy_j,
            "profiling_cost_j": self.profiling_cost_j,
            "trial_cost_j": self.trial_cost_j,
            **{f"gpu_{name}": value for name, value in self.energy_use.to_dict().items()},
            "counted_from": self.time_range.since,
            "counted_until": self.time_range.until,
            **self.rates.to_dict(),
            "cost": self.cost,
            **self.energy_use.carbon_to_dict(),
            **carbon,
            # In columns of their own, so that the table can be joined with the output of sacct.
            **{name: tags.get(name) for name in ("user", "slurm_job_id", "git_commit")},
            "tags": tags,
        }


TOKENS_TAG = "tokens_per_iteration"
"""Tag in which a trainer or user reports the number of tokens per iteration of the job."""


def _per_token(energy_j: float | None, tags: Mapping[str, str]) -> float | None:
    """Return the energy of an iteration per token; None if either is unknown or the tag is not a positive number."""
    tokens = tags.get(TOKENS_TAG, "")
    is_count = tokens.isascii() and tokens.isdigit() and int(tokens) > 0
    return energy_j / int(tokens) if energy_j is not None and is_count else None


def job_reports(
    history: History,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    job: str | None = None,
    tariff: Tariff | None = None,
    pue: float = 1.0,
    within_range_only: bool = False,
) -> tuple[JobReport, ...]:
    """Return reports on the jobs that ran in a time range, oldest first; `job` is the ID or name of a job.

    A report covers the whole job or, with `within_range_only`, its part within the range.
    """
    summaries = history.job_summaries(since=since, until=until, job=job, within_range_only=within_range_only)
    time_range = TimeRange(since, until) if within_range_only else ALL_TIME
    first_start_at = min((summary.started_at for summary in summaries), default=None)
    rates = read_rates(history, tariff, pue=pue, since=first_start_at)
    used: Mapping[str, EnergyUse] = {}
    if summaries:
        # If the clock was set back while a job ran, the job ends before it started.
        first_at = min(min(summary.started_at, summary.ended_at or summary.started_at) for summary in summaries)
        used = energy_by_job(history, rates, first_at=first_at, since=time_range.since, until=time_range.until)
    return tuple(
        JobReport(
            summary,
            partial(history.iterations, summary.job_id),
            (use := used.get(summary.job_id, NO_ENERGY)),
            rates,
            partial(carbon_report, history, summary, use, rates, time_range),
            ALL_TIME if time_range.contains_job(summary.started_at, summary.ended_at) else time_range,
            partial(_newest_advice, history, summary.job_id),
        )
        for summary in summaries
    )


def _newest_advice(history: History, job_id: str, action: str) -> str | None:
    """Return the reason in a job's newest log entry with an action; None without any."""
    found = [event.reason for event in history.control_events(job_id) if event.action == action]
    return found[-1] if found else None


def before_and_after(history: History, report: JobReport) -> tuple[ObservedIteration, ...]:
    """Return the baseline iteration and the iteration of the last plan closest to their median times.

    Either is left out if no timeline of such an iteration is stored.
    """
    job_id = report.summary.job_id
    stored = set(history.iterations_with_spans(job_id))
    regular = [row for row in report.iterations if row.is_regular and row.iteration_index in stored]
    baseline = [row for row in regular if row.plan_id == BASELINE_PLAN_ID]
    tuned = [row for row in regular if row.plan_purpose is PlanPurpose.TUNED]
    last_plan = [row for row in tuned if row.plan_id == tuned[-1].plan_id]
    shown = []
    for title, rows in (("before: full speed", baseline), (f"after: {report.summary.policy}", last_plan)):
        if rows:
            row = _typical(rows)
            spans = history.spans(job_id, row.iteration_index)
            name = title if row.energy_j is None else f"{title}, {energy_text(row.energy_j)}"
            schedule_name = report.summary.schedule_name or ""
            shown.append(ObservedIteration(name, row.iteration_time_s, spans, schedule_name))
    return tuple(shown)


def plan_in_force(history: History, report: JobReport) -> PlanRecord | None:
    """Return the last tuned plan of a job, None without one."""
    tuned = [row for row in history.plans(report.summary.job_id) if row.plan.purpose is PlanPurpose.TUNED]
    return tuned[-1] if tuned else None


def _points(rows: Sequence[IterationRow]) -> list["Point"]:
    from gpuenergyd.core.job.measurements.savings import Point  # noqa: PLC0415  the table of jobs needs none

    return [Point(row.iteration_index, row.iteration_time_s, row.energy_j) for row in rows]


def _typical(rows: Sequence[IterationRow]) -> IterationRow:
    middle_s = median(row.iteration_time_s for row in rows)
    return min(rows, key=lambda row: abs(row.iteration_time_s - middle_s))
