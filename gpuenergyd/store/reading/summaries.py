"""The summary of one job, computed from its single iterations and its blocks of merged iterations."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from gpuenergyd.core.job.replica_name import replica_name
from gpuenergyd.core.measurement.robust import weighted_median
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store.encoding.compressed_json import decode_tags
from gpuenergyd.store.reader import Reader, Row
from gpuenergyd.store.reading.iterations import Iterations, all_iterations
from gpuenergyd.store.reading.summary_inputs import SummaryInputs
from gpuenergyd.store.reading.time_range import ALL_TIME, TimeRange
from gpuenergyd.store.records import known_sum

if TYPE_CHECKING:
    from gpuenergyd.core.job.measurements.savings import Interval, Point


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The summary of one job; None means not measured or not available yet.

    `energy_j` is the sum over the `num_measured_iterations` regular iterations of known energy, `iterations_energy_j`
    the sum over all iterations. Baseline and tuned values, saving and slowdown with their 95 % confidence intervals are
    the daemon's last estimate, over iterations since the job last changed. They are computed from the stored iterations
    if only part of the job is covered, or if the job was recorded by a version without stored estimates. Predictions
    are those of the last tuned plan.
    """

    job_id: str
    job_name: str
    policy: str
    schedule_name: str
    is_simulated: bool
    started_at: datetime
    ended_at: datetime | None
    end_reason: str | None
    num_ranks: int
    num_microbatches: int
    max_slowdown_ratio: float
    uid: int
    gpu_uuids: tuple[str, ...]
    num_iterations: int
    num_measured_iterations: int
    duration_s: float
    energy_j: float | None
    num_baseline_iterations: int
    baseline_time_s: float | None
    baseline_energy_j: float | None
    num_tuned_iterations: int
    iteration_time_s: float | None
    energy_per_iteration_j: float | None
    num_profile_iterations: int
    profile_energy_j: float | None
    saving_ratio: float | None
    slowdown_ratio: float | None
    predicted_iteration_time_s: float | None
    predicted_energy_j: float | None
    lower_bound_j: float | None
    saving_interval: tuple[float, float] | None = None
    slowdown_interval: tuple[float, float] | None = None
    predicted_saving_ratio: float | None = None
    """Predicted saving of a job whose clocks are only observed; None once a plan was applied. 0 if the prediction does
    not exceed its own error."""
    predicted_saving_low_ratio: float | None = None
    predicted_saving_high_ratio: float | None = None
    """Bounds of its interval; None if the policy provides none, or if recorded by a version up to 0.3."""
    predicted_saving_basis: str | None = None
    num_measured_profile_iterations: int = 0
    num_trial_iterations: int = 0
    trial_energy_j: float | None = None
    """Energy of all trial iterations; None unless that of each is known."""
    since_iteration: int = 0
    """First iteration of the estimate; earlier ones ran before the job changed."""
    num_compared_baseline_iterations: int | None = None
    num_compared_tuned_iterations: int | None = None
    cost_s: float | None = None
    """Time that the daemon has cost the job's training; None if recorded by a version that did not measure it."""
    cost_ratio: float | None = None
    num_experiments: int | None = None
    num_tokens: int | None = None
    """Tokens of measured iterations, and the energy of these; None if the program did not report them."""
    tokens_energy_j: float | None = None
    tags: tuple[tuple[str, str], ...] = ()
    """User, source revision and other tags reported by the job's processes, by name."""
    host: str | None = None
    """Host whose daemon recorded the job; None if recorded by a version that did not record hosts."""
    outcome: str | None = None
    """A `core.job.outcome.OutcomeKind`, or "unknown"; None while the job runs, or if its daemon recorded none."""
    outcome_reason: str | None = None
    iterations_energy_j: float | None = None
    """Energy of all iterations of known energy: regular, disturbed, and of trials."""
    num_estimated_iterations: int = 0
    """Number of iterations with estimated energy, because they were shorter than the time between counter readings."""
    energy_scope: str | None = None
    """What the energy counters include, an `EnergyScope`; None if an earlier version recorded the job."""
    run_key: str = ""
    """Key shared by the processes of one run, see `store.reading.trainings`."""
    dp_rank: int = 0
    """Index of the pipeline's replica; for a plain loop, index of the process."""

    @property
    def replica_name(self) -> str:
        """Name of the job for people, with its rank if the training has several jobs."""
        return replica_name(self.job_name, num_ranks=self.num_ranks, dp_rank=self.dp_rank, tags=self.tags)

    @property
    def is_saving_significant(self) -> bool | None:
        """Whether the measured saving is significant, positive or negative; None without a measured saving."""
        if self.saving_interval is None:
            return None
        return self.saving_interval[0] > 0.0 or self.saving_interval[1] < 0.0


JOB_VALUES = frozenset(
    {
        *("job_id", "job_name", "policy", "schedule_name", "is_simulated", "started_at", "ended_at", "end_reason"),
        *("num_ranks", "num_microbatches", "max_slowdown_ratio", "uid", "tags", "host"),
        *("outcome", "outcome_reason", "run_key", "dp_rank", "energy_scope"),
    }
)
"""The fields of a summary that are columns of the jobs table."""


def job_values(job: Row) -> dict[str, Any]:
    """Return the fields of a summary that are columns of the jobs table."""
    return {**{name: getattr(job, name) for name in JOB_VALUES}, "tags": decode_tags(job.tags)}


@dataclass(frozen=True, slots=True)
class MedianIteration:
    """Number, median time and median energy of some iterations; None without any."""

    num_iterations: int
    iteration_time_s: float | None
    energy_j: float | None


def median_baseline(reader: Reader, job_id: str) -> MedianIteration:
    """Return the medians of a job's regular iterations at full speed."""
    return _medians(_regular(all_iterations(reader, job_id), PlanPurpose.BASELINE))


def job_summary(job: Row, inputs: SummaryInputs, time_range: TimeRange = ALL_TIME) -> JobSummary:
    """Return the summary of a row of the jobs table.

    If it covers only part of the job, the baseline is still that of the whole job.
    """
    whole_job = inputs.iterations
    in_range = [each for each in whole_job if time_range.contains(each.started_at)]
    regular = [each for each in in_range if each.is_regular]
    at_full_speed, under_plan = _regular(whole_job, PlanPurpose.BASELINE), _regular(in_range, PlanPurpose.TUNED)
    baseline, tuned = _medians(at_full_speed), _medians(under_plan)
    if time_range == ALL_TIME and inputs.estimate is not None:
        estimate = _stored_estimate(inputs.estimate)
    else:
        estimate = _computed_estimate(at_full_speed, under_plan)
    profiled = [each for each in in_range if each.purpose is PlanPurpose.PROFILE]
    tried = [each for each in in_range if each.purpose is PlanPurpose.TRIAL]
    last_plan = inputs.tuned_plan
    prediction = inputs.predicted_plan if not tuned.num_iterations else None
    predicted_saving_ratio = prediction.predicted_saving_ratio if prediction is not None else None
    if prediction is not None and predicted_saving_ratio is None:  # written by a version up to 0.3
        predicted_saving_ratio = _change(estimate["baseline_energy_j"], prediction.predicted_energy_j, sign=-1)
        predicted_saving_ratio = None if predicted_saving_ratio is None else max(0.0, predicted_saving_ratio)
    begin_at = max(job.started_at, time_range.since or job.started_at)
    last_seen_at = begin_at
    if whole_job:
        last_seen_at = whole_job[-1].started_at + timedelta(seconds=whole_job[-1].sum_time_s)
    end_at = job.ended_at or last_seen_at
    end_at = min(end_at, time_range.until or end_at)
    duration_s = (end_at - begin_at).total_seconds() if end_at > begin_at else sum(each.sum_time_s for each in in_range)
    return JobSummary(
        **job_values(job),
        gpu_uuids=tuple(inputs.gpu_uuids),
        num_iterations=sum(each.num_iterations for each in in_range),
        num_measured_iterations=sum(each.num_measured for each in regular),
        duration_s=duration_s,
        energy_j=known_sum(each.sum_energy_j for each in regular),
        iterations_energy_j=known_sum(each.sum_energy_j for each in in_range),
        num_estimated_iterations=sum(each.num_estimated for each in in_range),
        num_baseline_iterations=baseline.num_iterations,
        num_tuned_iterations=tuned.num_iterations,
        num_profile_iterations=sum(each.num_iterations for each in profiled),
        profile_energy_j=known_sum(each.sum_energy_j for each in profiled),
        predicted_iteration_time_s=last_plan.predicted_iteration_time_s if last_plan else None,
        predicted_energy_j=last_plan.predicted_energy_j if last_plan else None,
        lower_bound_j=last_plan.lower_bound_j if last_plan else None,
        predicted_saving_ratio=predicted_saving_ratio,
        predicted_saving_low_ratio=prediction.predicted_saving_low_ratio if prediction is not None else None,
        predicted_saving_high_ratio=prediction.predicted_saving_high_ratio if prediction is not None else None,
        predicted_saving_basis=prediction.reason if prediction is not None else None,
        num_measured_profile_iterations=sum(each.num_measured for each in profiled),
        num_trial_iterations=sum(each.num_iterations for each in tried),
        trial_energy_j=(
            known_sum(each.sum_energy_j for each in tried)
            if all(each.num_measured == each.num_iterations for each in tried)
            else None
        ),
        **estimate,
    )


def _stored_estimate(row: Row) -> dict[str, Any]:
    """Return the fields of a summary that come from the daemon's estimate."""
    names = (
        *("since_iteration", "num_compared_baseline_iterations", "num_compared_tuned_iterations"),
        *("baseline_time_s", "baseline_energy_j", "iteration_time_s", "energy_per_iteration_j"),
        *("saving_ratio", "slowdown_ratio", "cost_s", "cost_ratio", "num_experiments"),
        *("num_tokens", "tokens_energy_j"),
    )
    saving, slowdown = row.saving_ratio, row.slowdown_ratio
    return {
        **{name: getattr(row, name) for name in names},
        "saving_interval": None if saving is None else (row.saving_low_ratio, row.saving_high_ratio),
        "slowdown_interval": None if slowdown is None else (row.slowdown_low_ratio, row.slowdown_high_ratio),
    }


def _computed_estimate(at_full_speed: Sequence[Iterations], under_plan: Sequence[Iterations]) -> dict[str, Any]:
    """Return the same fields, computed from stored iterations."""
    from gpuenergyd.core.job.measurements.savings import saving_between  # noqa: PLC0415  reports of ended jobs need no statistics

    baseline, tuned = _medians(at_full_speed), _medians(under_plan)
    measured = saving_between(_points(at_full_speed), _points(under_plan))
    saving, slowdown = (measured.saving_ratio, measured.slowdown_ratio) if measured else (None, None)
    return {
        "baseline_time_s": baseline.iteration_time_s,
        "baseline_energy_j": baseline.energy_j,
        "num_compared_baseline_iterations": baseline.num_iterations,
        "iteration_time_s": tuned.iteration_time_s,
        "energy_per_iteration_j": tuned.energy_j,
        "num_compared_tuned_iterations": tuned.num_iterations,
        "saving_ratio": saving.estimate if saving else None,
        "slowdown_ratio": slowdown.estimate if slowdown else None,
        "saving_interval": _bounds(saving),
        "slowdown_interval": _bounds(slowdown),
    }


def _regular(iterations: Sequence[Iterations], purpose: PlanPurpose) -> list[Iterations]:
    return [each for each in iterations if each.is_regular and each.purpose is purpose]


def _medians(iterations: Sequence[Iterations]) -> MedianIteration:
    return MedianIteration(
        sum(each.num_iterations for each in iterations),
        weighted_median((each.median_time_s, each.num_iterations) for each in iterations),
        weighted_median(
            (each.median_energy_j, each.num_measured) for each in iterations if each.median_energy_j is not None
        ),
    )


def _points(iterations: Sequence[Iterations]) -> "list[Point]":
    """Return the points for the savings statistics; a block is one point."""
    from gpuenergyd.core.job.measurements.savings import Point  # noqa: PLC0415  reports of ended jobs need no statistics

    return [Point(i.first_index, i.median_time_s, i.median_energy_j, i.num_iterations) for i in iterations]


def _bounds(interval: "Interval | None") -> tuple[float, float] | None:
    return None if interval is None else (interval.low, interval.high)


def _change(before: float | None, after: float | None, *, sign: int) -> float | None:
    return sign * (after / before - 1.0) if before and after is not None else None
