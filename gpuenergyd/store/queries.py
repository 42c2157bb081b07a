"""What can be asked of the history, while the daemon runs and after it. Nothing here writes."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sqlalchemy import Connection, Engine, Row, Select, Table, or_, select
from sqlalchemy.exc import SQLAlchemyError

from gpuenergyd.core.carbon import CarbonForecast
from gpuenergyd.core.plan import ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.core.telemetry import ObservedSpan
from gpuenergyd.errors import StoreError
from gpuenergyd.store import carbon_queries, schema
from gpuenergyd.store.blobs import decode_clocks, decode_spans
from gpuenergyd.store.carbon_queries import StoredIntensity, TargetRow
from gpuenergyd.store.database import Contents, contents, one_line, reading_engine
from gpuenergyd.store.energy_sums import EnergySum, HostEnergyRow, energy_sums, host_energy
from gpuenergyd.store.kept_summaries import summary_of
from gpuenergyd.store.series_buffer import RAW_TIER, SECOND_TIER, series_points
from gpuenergyd.store.summaries import (
    IterationRow,
    Iterations,
    JobSummary,
    Typical,
    all_iterations,
    baseline_of,
    iteration_rows,
)


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
    """What one GPU did in one bucket of time for one job (empty: for nobody).

    `energy_j` was measured, during `measured_s`; `estimated_j` was not, during `estimated_s`.
    """

    bucket_s: int
    gpu_uuid: str
    started_at: datetime
    job_id: str
    energy_j: float | None
    mean_power_w: float | None
    max_power_w: float | None
    mean_sm_clock_mhz: float | None
    num_samples: int
    estimated_j: float | None = None
    measured_s: float = 0.0
    estimated_s: float = 0.0
    missing_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One raw sample of one GPU, rounded as it is kept."""

    gpu_uuid: str
    at: datetime
    power_w: float | None
    total_energy_j: float | None
    sm_clock_mhz: float | None
    temperature_celsius: float | None


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
        kept = schema.job_figures
        query = (
            select(jobs, kept.c.version.label("kept_version"), kept.c.figures.label("kept_figures"))
            .join(kept, kept.c.job_id == jobs.c.job_id, isouter=True)
            .order_by(jobs.c.started_at, jobs.c.job_id)
        )
        if since is not None:
            query = query.where(or_(jobs.c.ended_at.is_(None), jobs.c.ended_at >= since))
        if until is not None:
            query = query.where(jobs.c.started_at < until)
        if job is not None:
            query = query.where(or_(jobs.c.job_id == job, jobs.c.job_name == job))
        with self._reading() as connection:
            return tuple(summary_of(connection, row) for row in connection.execute(query).all())

    def iterations(self, job_id: str) -> tuple[IterationRow, ...]:
        """Return a job's iterations in order; of a long job those that have not become blocks yet.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return iteration_rows(connection, job_id)

    def all_iterations(self, job_id: str) -> tuple[Iterations, ...]:
        """Return a job's iterations in order, those of a long job that have become blocks among them.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return tuple(all_iterations(connection, job_id))

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
            baseline = baseline_of(connection, job_id)
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
        with self._reading() as connection:
            if bucket_s == 1:
                return _seconds(connection, since, until, gpu_uuid, job_id)
            table = schema.gpu_rollups
            query = (
                select(*[table.c[name] for name in Rollup.__dataclass_fields__])
                .where(table.c.bucket_s == bucket_s)
                .order_by(table.c.gpu_uuid, table.c.started_at)
            )
            wanted = _within(query, table, since, until, gpu_uuid, job_id)
            return tuple(Rollup(*row) for row in connection.execute(wanted))

    def energy_sums(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        by_gpu: bool = False,
        by_time: bool = False,
        in_minutes: bool = False,
    ) -> tuple[EnergySum, ...]:
        """Return what GPUs used by job, and by GPU or time where asked; from hours as far as the span allows.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return tuple(
                energy_sums(connection, since=since, until=until, by_gpu=by_gpu, by_time=by_time, in_minutes=in_minutes)
            )

    def host_energy(self, *, since: datetime | None = None, until: datetime | None = None) -> tuple[HostEnergyRow, ...]:
        """Return what processors and memory of the host used in each hour, by domain and then time.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return tuple(host_energy(connection, since, until))

    def samples(
        self, gpu_uuid: str, *, since: datetime | None = None, until: datetime | None = None
    ) -> tuple[Sample, ...]:
        """Return the raw samples of one GPU that are still kept, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return tuple(
                Sample(gpu_uuid, at, **values)
                for _, at, values in _points(connection, RAW_TIER, since, until, gpu_uuid, None)
            )

    def intensities(
        self, *, since: datetime | None = None, until: datetime | None = None, zone: str | None = None
    ) -> tuple[StoredIntensity, ...]:
        """Return the carbon intensities that held in a span of the host's time, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return carbon_queries.intensities(connection, since, until, zone)

    def forecasts(self, zone: str, since: datetime) -> tuple[CarbonForecast, ...]:
        """Return the forecasts of a zone issued from an instant of the grid on, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return carbon_queries.forecasts(connection, zone, since)

    def targets(self, job_id: str) -> tuple[TargetRow, ...]:
        """Return what was owed to a job, oldest first; empty where no target policy was asked.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._reading() as connection:
            return carbon_queries.targets(connection, job_id)

    def model(self, signature: str) -> bytes | None:
        """Return what the last run of a signature showed, None when nothing is known or it was forgotten.

        Raises:
            StoreError: the history cannot be read.
        """
        models = schema.models
        with self._reading() as connection:
            kept = connection.execute(select(models.c.model).where(models.c.signature == signature)).scalar()
        return bytes(kept) if kept else None

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


def _within(
    query: Select[Any],
    table: Table,
    since: datetime | None,
    until: datetime | None,
    gpu_uuid: str | None,
    job_id: str | None,
) -> Select[Any]:
    if since is not None:
        query = query.where(table.c.started_at >= since)
    if until is not None:
        query = query.where(table.c.started_at < until)
    if gpu_uuid is not None:
        query = query.where(table.c.gpu_uuid == gpu_uuid)
    if job_id is not None:
        query = query.where(table.c.job_id == job_id)
    return query


def _points(
    connection: Connection,
    tier: int,
    since: datetime | None,
    until: datetime | None,
    gpu_uuid: str | None,
    job_id: str | None,
) -> Iterator[tuple[Row[Any], datetime, dict[str, Any]]]:
    """Yield (packed minute, instant, values) of one tier, by GPU and then time."""
    table = schema.gpu_series
    query = select(table).where(table.c.tier == tier).order_by(table.c.gpu_uuid, table.c.started_at, table.c.job_id)
    minute = since - timedelta(minutes=1) if since is not None else None
    for row in connection.execute(_within(query, table, minute, until, gpu_uuid, job_id)):
        for at, values in series_points(tier, row.started_at, row.points):
            if (since is None or at >= since) and (until is None or at < until):
                yield row, at, values


def _seconds(
    connection: Connection, since: datetime | None, until: datetime | None, gpu_uuid: str | None, job_id: str | None
) -> tuple[Rollup, ...]:
    """Return one-second buckets; a job that came, went and came again within one has its parts added up."""
    parts: dict[tuple[str, datetime, str], list[Rollup]] = defaultdict(list)
    for row, at, values in _points(connection, SECOND_TIER, since, until, gpu_uuid, job_id):
        second = at.replace(microsecond=0)
        named: dict[str, Any] = {name: value or 0.0 if name.endswith("_s") else value for name, value in values.items()}
        part = Rollup(1, row.gpu_uuid, second, row.job_id, **named)
        parts[row.gpu_uuid, second, row.job_id].append(part)
    return tuple(own[0] if len(own) == 1 else _added(own) for own in parts.values())


def _added(parts: Sequence[Rollup]) -> Rollup:
    first, num_samples = parts[0], sum(part.num_samples for part in parts)

    def total(name: str) -> float | None:
        known = [value for part in parts if (value := getattr(part, name)) is not None]
        return sum(known) if known else None

    def mean(name: str) -> float | None:
        known = [(value, part.num_samples) for part in parts if (value := getattr(part, name)) is not None]
        weight = sum(num for _, num in known)
        return sum(value * num for value, num in known) / weight if weight else None

    powers_w = [part.max_power_w for part in parts if part.max_power_w is not None]
    return Rollup(
        1,
        first.gpu_uuid,
        first.started_at,
        first.job_id,
        total("energy_j"),
        mean("mean_power_w"),
        max(powers_w, default=None),
        mean("mean_sm_clock_mhz"),
        num_samples,
        total("estimated_j"),
        *(sum(getattr(part, name) for part in parts) for name in ("measured_s", "estimated_s", "missing_s")),
    )


def _plan(row: Row[Any], baseline: Typical) -> PlanRow:
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
