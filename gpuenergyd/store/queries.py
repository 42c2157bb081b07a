"""What can be asked of the history, while the daemon runs and after it. Nothing here writes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, Engine, Row, or_, select
from sqlalchemy.exc import SQLAlchemyError

from gpuenergyd.core.observation import IterationObservation, RankEnergy
from gpuenergyd.core.plan import ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.core.savings import Interval, measured_saving
from gpuenergyd.core.telemetry import ObservedSpan
from gpuenergyd.errors import StoreError
from gpuenergyd.store import schema
from gpuenergyd.store.blobs import decode_clocks, decode_spans
from gpuenergyd.store.database import Contents, contents, one_line, reading_engine


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One job in figures; None is what was not measured or does not exist yet.

    `energy_j` is the sum over the `num_measured_iterations` regular iterations whose energy is known. Baseline figures
    are medians over all regular iterations at full speed, later blocks included, tuned ones over those under a tuned
    plan; predictions are those of the last tuned plan. Intervals hold the ratio with 95 % confidence, drift taken out.
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


@dataclass(frozen=True, slots=True)
class IterationRow:
    """One iteration as recorded."""

    iteration_index: int
    started_at: datetime
    iteration_time_s: float
    energy_j: float | None
    plan_id: str | None
    plan_purpose: PlanPurpose | None
    is_regular: bool


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A plan as it was given to the ranks, oldest first; the same plan may be given more than once."""

    plan: ClockPlan
    plan_epoch: int
    issued_at: datetime
    apply_at_iteration: int


@dataclass(frozen=True, slots=True)
class ControlEvent:
    """Somebody changed something: who, what, why, before and after."""

    at: datetime
    action: str
    actor: str
    job_id: str | None
    gpu_uuid: str | None
    reason: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Rollup:
    """What one GPU did in one bucket of time for one job (empty: for nobody)."""

    bucket_s: int
    gpu_uuid: str
    started_at: datetime
    job_id: str
    energy_j: float | None
    mean_power_w: float | None
    max_power_w: float | None
    mean_sm_clock_mhz: float | None
    num_samples: int


class History:
    """An open history; close it, or use it in a `with` statement."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    def job_summaries(
        self, since: datetime | None = None, until: datetime | None = None, job: str | None = None
    ) -> tuple[JobSummary, ...]:
        """Return the jobs that ran in a span of time, oldest first; `job` is a job's id or name.

        Raises:
            StoreError: the history cannot be read.
        """
        jobs = schema.jobs
        query = select(jobs).order_by(jobs.c.started_at, jobs.c.job_id)
        if since is not None:
            query = query.where(or_(jobs.c.ended_at.is_(None), jobs.c.ended_at >= since))
        if until is not None:
            query = query.where(jobs.c.started_at < until)
        if job is not None:
            query = query.where(or_(jobs.c.job_id == job, jobs.c.job_name == job))
        with self._reading() as connection:
            return tuple(_summary(connection, row) for row in connection.execute(query).all())

    def iterations(self, job_id: str) -> tuple[IterationRow, ...]:
        """Return a job's iterations in order.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return _iterations(connection, job_id)

    def spans(self, job_id: str, iteration_index: int) -> tuple[ObservedSpan, ...]:
        """Return the measured timeline of one iteration; empty when none was kept.

        Raises:
            StoreError: the history cannot be read.
        """
        table = schema.iteration_spans
        query = select(table.c.spans).where(table.c.job_id == job_id, table.c.iteration_index == iteration_index)
        with self._reading() as connection:
            blob = connection.execute(query).scalar()
            return decode_spans(blob) if blob is not None else ()

    def iterations_with_spans(self, job_id: str) -> tuple[int, ...]:
        """Return the indices of the iterations whose timeline was kept.

        Raises:
            StoreError: the history cannot be read.
        """
        table = schema.iteration_spans
        query = select(table.c.iteration_index).where(table.c.job_id == job_id).order_by(table.c.iteration_index)
        with self._reading() as connection:
            return tuple(connection.execute(query).scalars())

    def plans(self, job_id: str) -> tuple[PlanRow, ...]:
        """Return the plans of a job, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            baseline = _baseline(_iterations(connection, job_id))
            query = select(schema.plans).where(schema.plans.c.job_id == job_id).order_by(schema.plans.c.plan_epoch)
            return tuple(_plan(row, baseline) for row in connection.execute(query))

    def control_events(
        self, job_id: str | None = None, since: datetime | None = None, until: datetime | None = None
    ) -> tuple[ControlEvent, ...]:
        """Return who changed what, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        table = schema.control_events
        query = select(*[table.c[name] for name in ControlEvent.__dataclass_fields__]).order_by(table.c.event_id)
        if job_id is not None:
            query = query.where(table.c.job_id == job_id)
        if since is not None:
            query = query.where(table.c.at >= since)
        if until is not None:
            query = query.where(table.c.at < until)
        with self._reading() as connection:
            return tuple(ControlEvent(*row) for row in connection.execute(query))

    def last_recorded_at(self) -> datetime | None:
        """Return when the newest control event was recorded, None before the first.

        Raises:
            StoreError: the history cannot be read.
        """
        table = schema.control_events
        with self._reading() as connection:
            newest: datetime | None = connection.execute(
                select(table.c.at).order_by(table.c.event_id.desc()).limit(1)
            ).scalar()
        return newest

    def rollups(
        self,
        *,
        bucket_s: int,
        since: datetime | None = None,
        until: datetime | None = None,
        gpu_uuid: str | None = None,
        job_id: str | None = None,
    ) -> tuple[Rollup, ...]:
        """Return what GPUs did per bucket of time, by GPU and then time.

        Raises:
            StoreError: the history cannot be read.
        """
        table = schema.gpu_rollups
        query = (
            select(*[table.c[name] for name in Rollup.__dataclass_fields__])
            .where(table.c.bucket_s == bucket_s)
            .order_by(table.c.gpu_uuid, table.c.started_at)
        )
        if since is not None:
            query = query.where(table.c.started_at >= since)
        if until is not None:
            query = query.where(table.c.started_at < until)
        if gpu_uuid is not None:
            query = query.where(table.c.gpu_uuid == gpu_uuid)
        if job_id is not None:
            query = query.where(table.c.job_id == job_id)
        with self._reading() as connection:
            return tuple(Rollup(*row) for row in connection.execute(query))

    @contextmanager
    def _reading(self) -> Iterator[Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as error:
            raise StoreError(f"the history cannot be read: {one_line(error)}") from None


def open_history(path_or_url: str | Path, *, nobody_writes: bool = False) -> History:
    """Open a history for reading; where nobody writes, its folder is not touched at all.

    Raises:
        StoreError: nothing there, damaged, not ours, or written by another version.
    """
    try:
        engine = reading_engine(path_or_url, nobody_writes=nobody_writes)
        with engine.connect() as connection:
            held = contents(connection)
    except SQLAlchemyError as error:
        raise StoreError(f"{path_or_url} cannot be read as a history: {one_line(error)}") from None
    match held:
        case Contents.CURRENT:
            return History(engine)
        case Contents.NOTHING:
            raise StoreError(f"{path_or_url} is empty: no daemon has written a history there yet")
        case Contents.FOREIGN:
            raise StoreError(f"{path_or_url} is not a history of gpuenergyd")
        case Contents.OLDER:
            raise StoreError(f"{path_or_url} was written by an older gpuenergyd; start the daemon once to upgrade it")
        case Contents.NEWER:
            raise StoreError(f"{path_or_url} was written by a newer gpuenergyd; read it with that version")


def _iterations(connection: Connection, job_id: str) -> tuple[IterationRow, ...]:
    table = schema.iterations
    query = select(*[table.c[name] for name in IterationRow.__dataclass_fields__])
    rows = connection.execute(query.where(table.c.job_id == job_id).order_by(table.c.iteration_index))
    return tuple(
        IterationRow(index, begun, time_s, energy_j, plan_id, PlanPurpose(purpose) if purpose else None, is_regular)
        for index, begun, time_s, energy_j, plan_id, purpose, is_regular in map(tuple, rows)
    )


@dataclass(frozen=True, slots=True)
class _Typical:
    num_iterations: int
    iteration_time_s: float | None
    energy_j: float | None


def _typical(rows: Sequence[IterationRow]) -> _Typical:
    energies = [row.energy_j for row in rows if row.energy_j is not None]
    return _Typical(
        len(rows),
        median(row.iteration_time_s for row in rows) if rows else None,
        median(energies) if energies else None,
    )


def _baseline(rows: Sequence[IterationRow]) -> _Typical:
    return _typical([row for row in rows if row.is_regular and row.plan_purpose is PlanPurpose.BASELINE])


def _summary(connection: Connection, job: Row[Any]) -> JobSummary:
    rows = _iterations(connection, job.job_id)
    regular = [row for row in rows if row.is_regular]
    energies = [row.energy_j for row in regular if row.energy_j is not None]
    baseline = _baseline(rows)
    tuned = _typical([row for row in regular if row.plan_purpose is PlanPurpose.TUNED])
    measured = measured_saving(_observations(regular, PlanPurpose.BASELINE), _observations(regular, PlanPurpose.TUNED))
    profiled = [row for row in rows if row.plan_purpose is PlanPurpose.PROFILE]
    profile_energies = [row.energy_j for row in profiled if row.energy_j is not None]
    plans = schema.plans
    last_tuned = connection.execute(
        select(plans.c.predicted_iteration_time_s, plans.c.predicted_energy_j, plans.c.lower_bound_j)
        .where(plans.c.job_id == job.job_id, plans.c.purpose == PlanPurpose.TUNED)
        .order_by(plans.c.plan_epoch.desc())
        .limit(1)
    ).one_or_none() or (None, None, None)
    ranks = schema.ranks
    gpu_uuids = connection.execute(
        select(ranks.c.gpu_uuid).where(ranks.c.job_id == job.job_id).order_by(ranks.c.pp_rank)
    ).scalars()
    seen_until = rows[-1].started_at + timedelta(seconds=rows[-1].iteration_time_s) if rows else job.started_at
    return JobSummary(
        job_id=job.job_id,
        job_name=job.job_name,
        policy=job.policy,
        schedule_name=job.schedule_name,
        is_simulated=job.is_simulated,
        started_at=job.started_at,
        ended_at=job.ended_at,
        end_reason=job.end_reason,
        num_ranks=job.num_ranks,
        num_microbatches=job.num_microbatches,
        max_slowdown_ratio=job.max_slowdown_ratio,
        uid=job.uid,
        gpu_uuids=tuple(gpu_uuids),
        num_iterations=len(rows),
        num_measured_iterations=len(energies),
        duration_s=max(0.0, ((job.ended_at or seen_until) - job.started_at).total_seconds()),
        energy_j=sum(energies) if energies else None,
        num_baseline_iterations=baseline.num_iterations,
        baseline_time_s=baseline.iteration_time_s,
        baseline_energy_j=baseline.energy_j,
        num_tuned_iterations=tuned.num_iterations,
        iteration_time_s=tuned.iteration_time_s,
        energy_per_iteration_j=tuned.energy_j,
        num_profile_iterations=len(profiled),
        profile_energy_j=sum(profile_energies) if profile_energies else None,
        saving_ratio=_change(baseline.energy_j, tuned.energy_j, sign=-1),
        slowdown_ratio=_change(baseline.iteration_time_s, tuned.iteration_time_s, sign=1),
        predicted_iteration_time_s=last_tuned[0],
        predicted_energy_j=last_tuned[1],
        lower_bound_j=last_tuned[2],
        saving_interval=_bounds(measured.saving_ratio) if measured else None,
        slowdown_interval=_bounds(measured.slowdown_ratio) if measured else None,
    )


def _observations(rows: Sequence[IterationRow], purpose: PlanPurpose) -> list[IterationObservation]:
    """Return what the statistics of the domain want of iterations: when, how long, how much."""
    return [
        IterationObservation(
            iteration_index=row.iteration_index,
            plan_id=row.plan_id,
            iteration_time_s=row.iteration_time_s,
            instruction_samples=(),
            ranks=(RankEnergy(0, row.iteration_time_s, row.energy_j, ()),),
        )
        for row in rows
        if row.plan_purpose is purpose
    ]


def _bounds(interval: Interval | None) -> tuple[float, float] | None:
    return None if interval is None else (interval.low, interval.high)


def _change(before: float | None, after: float | None, *, sign: int) -> float | None:
    return sign * (after / before - 1.0) if before and after is not None else None


def _plan(row: Row[Any], baseline: _Typical) -> PlanRow:
    predicted = None
    if row.predicted_iteration_time_s is not None and row.predicted_energy_j is not None:
        predicted = PlanPrediction(
            row.predicted_iteration_time_s,
            row.predicted_energy_j,
            row.lower_bound_j,
            baseline.iteration_time_s,
            baseline.energy_j,
        )
    plan = ClockPlan(row.plan_id, PlanPurpose(row.purpose), decode_clocks(row.clocks), predicted, row.reason)
    return PlanRow(plan, row.plan_epoch, row.issued_at, row.apply_at_iteration)
