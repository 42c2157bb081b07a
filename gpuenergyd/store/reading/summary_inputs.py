"""The rows from which job summaries are computed, read for many jobs with one query per table.

For many jobs on PostgreSQL, the server merges iterations into blocks, as compaction does for long jobs: a fleet has
millions of iterations per day.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpuenergyd.core.job.measurements.brackets import REACH
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store.reader import Reader, Row, epoch_us
from gpuenergyd.store.reading.iterations import BLOCK_COLUMNS, ITERATION_COLUMNS, Iterations, block_of, single_of
from gpuenergyd.store.reading.time_range import TimeRange

_MAX_JOBS_PER_QUERY = 250
"""Limits the memory of a query."""
_MIN_JOBS_TO_AGGREGATE = 16
_NUM_SINGLE, _BLOCK_ITERATIONS = 64, 200
_WITH_FULL_SPEED = f"""(
    SELECT *,
        max(CASE WHEN plan_purpose = '{PlanPurpose.BASELINE}' THEN iteration_index END) OVER
            (PARTITION BY job_id ORDER BY iteration_index) AS last_at_full_speed,
        min(CASE WHEN plan_purpose = '{PlanPurpose.BASELINE}' THEN iteration_index END) OVER
            (PARTITION BY job_id ORDER BY iteration_index DESC) AS next_at_full_speed
    FROM iterations
) AS beside"""  # noqa: S608  constants of this program
"""Iterations with the indices of the last and the next one at full speed."""
_AFTER_IT = f"iteration_index - last_at_full_speed <= {REACH}"
_BEFORE_IT = f"next_at_full_speed - iteration_index <= {REACH}"
_IS_NEARER_TO_LAST = "iteration_index - last_at_full_speed < coalesce(next_at_full_speed, 4e18) - iteration_index"
_BLOCK_OF_ITERATION = (
    f"last_at_full_speed, CASE WHEN {_AFTER_IT} AND {_IS_NEARER_TO_LAST} THEN 1 WHEN {_BEFORE_IT} THEN 2 ELSE 0 END,"
    f" CASE WHEN iteration_index < {_NUM_SINGLE} THEN iteration_index"
    f" WHEN {_AFTER_IT} OR {_BEFORE_IT} THEN NULL ELSE iteration_index / {_BLOCK_ITERATIONS} END"
)
"""SQL expressions by which iterations are merged; those next to a full-speed block form rows of their own."""
_PLAN_COLUMNS = (
    *("job_id", "purpose", "issued_at", "reason"),
    *("predicted_iteration_time_s", "predicted_energy_j", "lower_bound_j"),
    *("predicted_saving_ratio", "predicted_saving_low_ratio", "predicted_saving_high_ratio"),
)


@dataclass(slots=True)
class SummaryInputs:
    """The rows of one job from which its summary is computed."""

    iterations: list[Iterations] = field(default_factory=list)
    tuned_plan: Row = None
    """The last tuned plan issued before the end of the time range, None without any."""
    predicted_plan: Row = None
    """The first plan that predicts savings for a job whose clocks are only observed, None without any."""
    gpu_uuids: list[str] = field(default_factory=list)
    estimate: Row = None
    """The daemon's estimate of the saving; None for a job of version 0.1, or before its baseline is measured."""


def summary_inputs(
    reader: Reader, job_ids: Sequence[str], time_range: TimeRange, *, may_aggregate: bool = False
) -> Iterator[tuple[str, SummaryInputs]]:
    """Yield the inputs of each job, in the order of the IDs.

    With `may_aggregate`, the database server may merge iterations into blocks that do not cross the range's ends.
    """
    aggregates = may_aggregate and reader.supports_median and len(job_ids) >= _MIN_JOBS_TO_AGGREGATE
    for k in range(0, len(job_ids), _MAX_JOBS_PER_QUERY):
        some = job_ids[k : k + _MAX_JOBS_PER_QUERY]
        of_jobs = reader.in_condition("job_id", some)
        inputs: dict[str, SummaryInputs] = defaultdict(SummaryInputs)
        if aggregates:
            _read_aggregated_iterations(reader, of_jobs, inputs, time_range)
        else:
            for job_id, *values in reader.values(("job_id", *ITERATION_COLUMNS), "iterations", of_jobs):
                inputs[job_id].iterations.append(single_of(values))
        for job_id, *values in reader.values(("job_id", *BLOCK_COLUMNS), "iteration_blocks", of_jobs):
            inputs[job_id].iterations.append(block_of(values))
        _read_plans(reader, of_jobs, inputs, time_range)
        for row in reader.select(("job_id", "gpu_uuid"), "ranks", of_jobs, order_by="job_id, pp_rank"):
            inputs[row.job_id].gpu_uuids.append(row.gpu_uuid)
        for row in reader.select("*", "estimates", of_jobs):
            inputs[row.job_id].estimate = row
        for job_id in some:
            inputs[job_id].iterations.sort(key=lambda each: each.first_index)
            yield job_id, inputs[job_id]


def _read_plans(
    reader: Reader, of_jobs: Mapping[str, object], inputs: Mapping[str, SummaryInputs], time_range: TimeRange
) -> None:
    where = {**of_jobs, **reader.in_condition("purpose", (PlanPurpose.TUNED, PlanPurpose.PREDICTED))}
    for row in reader.select(_PLAN_COLUMNS, "plans", where, order_by="job_id, plan_epoch"):
        job = inputs[row.job_id]
        if row.purpose == PlanPurpose.TUNED and (time_range.until is None or row.issued_at < time_range.until):
            job.tuned_plan = row
        elif row.purpose == PlanPurpose.PREDICTED and job.predicted_plan is None:
            job.predicted_plan = row


def _read_aggregated_iterations(
    reader: Reader, of_jobs: Mapping[str, object], inputs: Mapping[str, SummaryInputs], time_range: TimeRange
) -> None:
    """Read iterations as blocks computed by PostgreSQL.

    Full-speed iterations, which are few, and the first iterations stay single, for an estimate of the scatter.
    """
    median = "percentile_cont(0.5) WITHIN GROUP (ORDER BY {0})"
    columns = (
        "job_id, min(iteration_index) AS first_iteration_index, min(started_at) AS started_at, plan_purpose,"
        " is_regular, count(*) AS num_iterations, sum(iteration_time_s) AS sum_time_s,"
        f" {median.format('iteration_time_s')} AS median_time_s, count(energy_j) AS num_measured,"
        f" sum(energy_j) AS sum_energy_j, {median.format('energy_j')} AS median_energy_j,"
        " count(energy_low_j) AS num_estimated"
    )
    ends = (at for at in (time_range.since, time_range.until) if at is not None)
    group_by = (
        f"job_id, plan_id, plan_purpose, is_regular, {_BLOCK_OF_ITERATION}"
        f"{''.join(f', started_at < {epoch_us(at)}' for at in ends)}"
    )
    for job_id, *values in reader.values(columns, _WITH_FULL_SPEED, of_jobs, group_by=group_by):
        inputs[job_id].iterations.append(block_of(values))
