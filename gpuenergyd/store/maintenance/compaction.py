"""Merges iterations of long jobs into blocks, so that after months of training reports are fast and the history small.

The first and last iterations of a job stay single, as do those with a stored timeline. Between them, consecutive
iterations with the same plan and regularity become one row with sums and medians. Iterations that are compared with a
neighbouring full-speed block become a row of their own, so that savings can be computed from rows as from iterations.
"""

import math
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

from sqlalchemy import Connection, delete, exists, func, insert, select

from gpuenergyd.core.job.measurements.brackets import REACH
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store import schema

BLOCK_ITERATIONS = 200
BLOCK_LENGTH = timedelta(minutes=10)
"""Maximum duration of a block, which keeps drift visible and assigns energy to the right hour."""
KEPT_WHILE_RECENT = 1000
"""Number of single iterations kept at the start and end of a job that is running or ended recently."""
KEPT_LATER = 64
"""Number of single iterations kept at the start and end of a job that ended earlier."""
_RECENTLY = timedelta(days=1)
_MIN_COMPACTED = 2 * BLOCK_ITERATIONS
_MAX_PER_TRANSACTION = 100_000
"""Limits how long one transaction blocks the writer."""


def compact_iterations(connection: Connection, now: datetime, *, host: str | None = None) -> bool:
    """Merge single iterations into blocks in the open transaction; return whether there is more to do.

    With `host`, only its jobs are compacted; since many hosts then share the history, running jobs keep as few single
    iterations as ended ones.
    """
    jobs, iterations = schema.jobs, schema.iterations
    counts = (
        select(iterations.c.job_id, func.count(), jobs.c.ended_at)
        .join(jobs, jobs.c.job_id == iterations.c.job_id, isouter=True)
        .where(*(() if host is None else (jobs.c.host == host,)))
        .group_by(iterations.c.job_id, jobs.c.ended_at)
        .having(func.count() > 2 * KEPT_LATER + _MIN_COMPACTED)
    )
    left = _MAX_PER_TRANSACTION
    for job_id, num_iterations, ended_at in connection.execute(counts).all():
        is_recent = ended_at is None or ended_at > now - _RECENTLY
        num_kept = KEPT_WHILE_RECENT if is_recent and host is None else KEPT_LATER
        if num_iterations > 2 * num_kept + _MIN_COMPACTED:
            left -= _compact_job(connection, job_id, num_kept, at_most=left)
        if left <= 0:
            return True
    return False


def _compact_job(connection: Connection, job_id: str, num_kept: int, *, at_most: int) -> int:
    """Compact one job; return how many iterations were read."""
    table = schema.iterations
    own = select(table.c.iteration_index).where(table.c.job_id == job_id)
    first = connection.execute(own.order_by(table.c.iteration_index).offset(num_kept).limit(1)).scalar()
    last = connection.execute(own.order_by(table.c.iteration_index.desc()).offset(num_kept).limit(1)).scalar()
    if first is None or last is None or first > last:
        return 0
    has_timeline = exists().where(
        schema.iteration_spans.c.job_id == table.c.job_id,
        schema.iteration_spans.c.iteration_index == table.c.iteration_index,
    )
    between = (table.c.job_id == job_id, table.c.iteration_index >= first, table.c.iteration_index <= last)
    rows = connection.execute(
        select(table).where(*between, ~has_timeline).order_by(table.c.iteration_index).limit(at_most)
    ).all()
    blocks = list(_blocks(rows))
    if not blocks:
        return len(rows)
    connection.execute(insert(schema.iteration_blocks), blocks)
    until = rows[-1].iteration_index
    connection.execute(delete(table).where(*between, table.c.iteration_index <= until, ~has_timeline))
    return len(rows)


def _blocks(rows: Sequence[Any]) -> Iterator[dict[str, Any]]:
    beside = _beside_full_speed(rows)
    key = [(row.plan_id, row.plan_purpose, row.is_regular, at) for row, at in zip(rows, beside, strict=True)]
    for _, alike in groupby(zip(key, rows, strict=True), key=itemgetter(0)):
        block: list[Any] = []
        for _, row in alike:
            if block and (len(block) == BLOCK_ITERATIONS or row.started_at - block[0].started_at >= BLOCK_LENGTH):
                yield _block(block)
                block = []
            block.append(row)
        yield _block(block)


def _beside_full_speed(rows: Sequence[Any]) -> list[int]:
    """Return 1 for rows compared with the full-speed block before them, -1 for the one after, otherwise 0."""
    after = list(_distances(rows))
    before = list(_distances(rows[::-1]))[::-1]
    return [
        0 if min(since, until) > REACH or not since else 1 if since < until else -1
        for since, until in zip(after, before, strict=True)
    ]


def _distances(rows: Sequence[Any]) -> Iterator[float]:
    """Yield the distance of each row, in iterations, to the last full-speed row before it."""
    last = None
    for row in rows:
        if row.plan_purpose == PlanPurpose.BASELINE:
            last = row.iteration_index
        yield math.inf if last is None else abs(row.iteration_index - last)


def _block(rows: Sequence[Any]) -> dict[str, Any]:
    first = rows[0]
    energies_j = [row.energy_j for row in rows if row.energy_j is not None]
    return {
        "job_id": first.job_id,
        "first_iteration_index": first.iteration_index,
        "started_at": first.started_at,
        "plan_id": first.plan_id,
        "plan_purpose": first.plan_purpose,
        "is_regular": first.is_regular,
        "num_iterations": len(rows),
        "sum_time_s": sum(row.iteration_time_s for row in rows),
        "median_time_s": median(row.iteration_time_s for row in rows),
        "num_measured": len(energies_j),
        "sum_energy_j": sum(energies_j) if energies_j else None,
        "median_energy_j": median(energies_j) if energies_j else None,
        "num_estimated": sum(row.energy_low_j is not None for row in rows),
    }
