"""What a job's figures are worked out from, read for many jobs at once: one question for all of them, not six for each.

Where many jobs are asked for on a server, it hands out their iterations in blocks, as compaction makes them of long
jobs: a fleet's day has millions of iterations, and medians of 200 alike say what a report says of a job.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store.readers.sqlite import Reader, Row, micros_of
from gpuenergyd.store.reading.iterations import OF_BLOCKS, OF_ITERATIONS, Iterations, block_of, single_of

_AT_ONCE = 250
"""Jobs of one question: what is in hand at a time stays bounded."""
_MANY = 16
"""From so many jobs on a server adds up iterations."""
_BLOCK_ITERATIONS = 200
_OF_PLANS = (
    *("job_id", "purpose", "issued_at", "reason"),
    *("predicted_iteration_time_s", "predicted_energy_j", "lower_bound_j"),
)


@dataclass(slots=True)
class JobParts:
    """All of one job that its figures need."""

    iterations: list[Iterations] = field(default_factory=list)
    tuned_plan: Row = None
    """The last one that was given out before the end of what counts, None without any."""
    would_be_plan: Row = None
    gpu_uuids: list[str] = field(default_factory=list)


def parts_of_jobs(
    reader: Reader,
    job_ids: Sequence[str],
    *,
    since: datetime | None = None,
    until: datetime | None = None,
    may_add_up: bool = False,
) -> Iterator[tuple[str, JobParts]]:
    """Yield what is known of jobs, in their order, plans from before `until`; no block that is made lies across either.

    Only with `may_add_up` are iterations put together that are still kept singly.
    """
    is_added_up = may_add_up and reader.has_medians and len(job_ids) >= _MANY
    for k in range(0, len(job_ids), _AT_ONCE):
        some = job_ids[k : k + _AT_ONCE]
        of_them = reader.is_one_of("job_id", some)
        parts: dict[str, JobParts] = defaultdict(JobParts)
        if is_added_up:
            blocks = reader.values(_blocks_of(), "iterations", of_them, group_by=_alike(since, until))
            for job_id, *figures in blocks:
                parts[job_id].iterations.append(block_of(figures))
        else:
            for job_id, *figures in reader.values(("job_id", *OF_ITERATIONS), "iterations", of_them):
                parts[job_id].iterations.append(single_of(figures))
        for job_id, *figures in reader.values(("job_id", *OF_BLOCKS), "iteration_blocks", of_them):
            parts[job_id].iterations.append(block_of(figures))
        plans = {**of_them, "purpose <> ?": PlanPurpose.PROFILE}
        for row in reader.select(_OF_PLANS, "plans", plans, order_by="job_id, plan_epoch"):
            own = parts[row.job_id]
            if row.purpose == PlanPurpose.TUNED and (until is None or row.issued_at < until):
                own.tuned_plan = row
            elif row.purpose == PlanPurpose.PREDICTED and own.would_be_plan is None:
                own.would_be_plan = row
        for row in reader.select(("job_id", "gpu_uuid"), "ranks", of_them, order_by="job_id, pp_rank"):
            parts[row.job_id].gpu_uuids.append(row.gpu_uuid)
        for job_id in some:
            parts[job_id].iterations.sort(key=lambda each: each.first_index)
            yield job_id, parts[job_id]


def _alike(since: datetime | None, until: datetime | None) -> str:
    """Return what iterations of one block share; a block never lies on both sides of an instant."""
    edges = "".join(f", started_at < {micros_of(at)}" for at in (since, until) if at is not None)
    return f"job_id, plan_id, plan_purpose, is_regular, iteration_index / {_BLOCK_ITERATIONS}{edges}"


def _blocks_of() -> str:
    """Return the columns `OF_BLOCKS` as PostgreSQL adds them up."""
    median = "percentile_cont(0.5) WITHIN GROUP (ORDER BY {0})"
    return (
        "job_id, min(iteration_index) AS first_iteration_index, min(started_at) AS started_at, plan_purpose,"
        " is_regular, count(*) AS num_iterations, sum(iteration_time_s) AS sum_time_s,"
        f" {median.format('iteration_time_s')} AS median_time_s, count(energy_j) AS num_measured,"
        f" sum(energy_j) AS sum_energy_j, {median.format('energy_j')} AS median_energy_j"
    )
