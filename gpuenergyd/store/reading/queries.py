"""`History`: the public query interface. Queries work while the daemon runs and never write."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpuenergyd.core.carbon.intensity import CarbonForecast
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.errors import StoreError
from gpuenergyd.store.encoding.compressed_json import decode_clocks, decode_spans
from gpuenergyd.store.encoding.series import RAW_TIER, SECOND_TIER, series_points
from gpuenergyd.store.reader import Reader, Row, SchemaState, column_names, schema_state
from gpuenergyd.store.reading import carbon_queries
from gpuenergyd.store.reading.carbon_queries import StoredIntensity
from gpuenergyd.store.reading.energy_sums import EnergySum, HostEnergyRow, energy_sums, host_energy
from gpuenergyd.store.reading.iterations import IterationRow, Iterations, all_iterations, iteration_rows
from gpuenergyd.store.reading.stored_summaries import read_summaries
from gpuenergyd.store.reading.summaries import JobSummary, MedianIteration, median_baseline
from gpuenergyd.store.reading.time_range import ALL_TIME, TimeRange
from gpuenergyd.store.records import (
    ControlEventRecord,
    EstimateRecord,
    PastJobRecord,
    PlanRecord,
    RankRecord,
    RollupRecord,
    SampleRecord,
    TargetRecord,
    merge_rollups,
)
from gpuenergyd.store.sqlite_file import plain_sqlite_path, reading_file, require_file

_JOBS = "jobs LEFT JOIN job_summaries ON job_summaries.job_id = jobs.job_id"
_JOB_COLUMNS = "jobs.*, job_summaries.version AS summary_version, job_summaries.summary AS stored_summary"

_MAX_JOBS_PER_QUERY = 250
"""Limits the memory of a query."""


class History:
    """An open history; close it or use it in a `with` statement.

    Every query raises StoreError if the history cannot be read.
    """

    def __init__(
        self, reading: Callable[[], AbstractContextManager[Reader]], close: Callable[[], None] = lambda: None
    ) -> None:
        """Read through `reading`, which opens a connection for one short read; `close` closes what remains open."""
        self._reading = reading
        self._close = close

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._close()

    def schema_state(self) -> SchemaState:
        """Return the schema compared with this version's; queries require the current one."""
        with self._reading() as reader:
            return schema_state(reader)

    def job_summaries(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        job: str | None = None,
        *,
        within_range_only: bool = False,
    ) -> tuple[JobSummary, ...]:
        """Return the summaries of jobs that ran in a time range, oldest first; `job` is the ID or name of a job.

        A summary covers the whole job, or only its part within the range; the baseline is always that of the whole job.
        """
        wanted = {
            # If the clock was set back while a job ran, the job ends before it started.
            "jobs.ended_at IS NULL OR jobs.ended_at >= ? OR jobs.started_at >= ?": since,
            "jobs.started_at < ? OR jobs.ended_at < ?": until,
            "jobs.job_id = ? OR jobs.job_name = ?": job,
        }
        time_range = TimeRange(since, until) if within_range_only else ALL_TIME
        with self._reading() as reader:
            rows = reader.select(_JOB_COLUMNS, _JOBS, wanted, order_by="jobs.started_at, jobs.job_id")
            return read_summaries(reader, rows, time_range)

    def ranks(self, job_ids: Sequence[str]) -> tuple[RankRecord, ...]:
        """Return the ranks of jobs, sorted by job and stage."""
        found: list[RankRecord] = []
        with self._reading() as reader:
            for k in range(0, len(job_ids), _MAX_JOBS_PER_QUERY):
                of_jobs = reader.in_condition("job_id", job_ids[k : k + _MAX_JOBS_PER_QUERY])
                found += reader.records(RankRecord, "ranks", of_jobs, order_by="job_id, pp_rank")
        return tuple(found)

    def iterations(self, job_id: str) -> tuple[IterationRow, ...]:
        """Return the iterations of a job that are still stored singly, in order."""
        with self._reading() as reader:
            return iteration_rows(reader, job_id)

    def all_iterations(self, job_id: str) -> tuple[Iterations, ...]:
        """Return all iterations of a job in order, including blocks of merged iterations."""
        with self._reading() as reader:
            return tuple(all_iterations(reader, job_id))

    def spans(self, job_id: str, iteration_index: int) -> tuple[ObservedSpan, ...]:
        """Return the measured timeline of one iteration; empty if none is stored."""
        own = {"job_id = ?": job_id, "iteration_index = ?": iteration_index}
        with self._reading() as reader:
            blob = reader.first_value("spans", "iteration_spans", own)
            return decode_spans(blob) if blob is not None else ()

    def iterations_with_spans(self, job_id: str) -> tuple[int, ...]:
        """Return the indices of the iterations whose timeline is stored."""
        with self._reading() as reader:
            rows = reader.select(
                "iteration_index", "iteration_spans", {"job_id = ?": job_id}, order_by="iteration_index"
            )
            return tuple(row.iteration_index for row in rows)

    def plans(self, job_id: str) -> tuple[PlanRecord, ...]:
        """Return the plans of a job, oldest first."""
        with self._reading() as reader:
            baseline = median_baseline(reader, job_id)
            rows = reader.select("*", "plans", {"job_id = ?": job_id}, order_by="plan_epoch")
            return tuple(_plan_record(row, baseline) for row in rows)

    def control_events(self, job_id: str | None = None) -> tuple[ControlEventRecord, ...]:
        """Return entries of the audit log, oldest first; for all jobs if `job_id` is None."""
        with self._reading() as reader:
            return reader.records(ControlEventRecord, "control_events", {"job_id = ?": job_id}, order_by="event_id")

    def last_recorded_at(self) -> datetime | None:
        """Return the time of the latest control event, None if there is none."""
        with self._reading() as reader:
            newest: datetime | None = reader.first_value("at", "control_events", order_by="event_id DESC")
        return newest

    def rollups(
        self, *, bucket_s: int, since: datetime | None = None, until: datetime | None = None, job_id: str | None = None
    ) -> tuple[RollupRecord, ...]:
        """Return the energy and power of GPUs per time bucket, sorted by GPU and time."""
        with self._reading() as reader:
            return rollups(reader, bucket_s, TimeRange(since, until), job_id)

    def energy_sums(
        self,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        by_gpu: bool = False,
        by_time: bool = False,
        by_host: bool = False,
        is_split: Callable[[datetime], bool] | None = None,
    ) -> tuple[EnergySum, ...]:
        """Return the GPU energy of each job, optionally by GPU, host or period; uses hourly rollups where possible.

        By time, hours for which `is_split` returns True are returned as minutes if those are still stored.
        """
        with self._reading() as reader:
            return tuple(
                energy_sums(
                    reader, since=since, until=until, by_gpu=by_gpu, by_time=by_time, by_host=by_host, is_split=is_split
                )
            )

    def host_energy(self, *, since: datetime | None = None, until: datetime | None = None) -> tuple[HostEnergyRow, ...]:
        """Return the energy of processors and memory per hour, by host, domain and time."""
        with self._reading() as reader:
            return host_energy(reader, since, until)

    def samples(
        self, gpu_uuid: str, *, since: datetime | None = None, until: datetime | None = None
    ) -> tuple[SampleRecord, ...]:
        """Return the raw samples of one GPU that are still stored, oldest first."""
        with self._reading() as reader:
            return samples(reader, gpu_uuid, TimeRange(since, until))

    def intensities(
        self, *, since: datetime | None = None, until: datetime | None = None, zone: str | None = None
    ) -> tuple[StoredIntensity, ...]:
        """Return the carbon intensities valid in a range of host time, oldest first."""
        with self._reading() as reader:
            return carbon_queries.intensities(reader, since, until, zone)

    def job_spans(self) -> dict[str, tuple[datetime, datetime | None]]:
        """Return start and end of every job; the end is None while it runs."""
        with self._reading() as reader:
            rows = reader.values(("job_id", "started_at", "ended_at"), "jobs", {})
        return {job_id: (started_at, ended_at) for job_id, started_at, ended_at in rows}

    def target_host_power_w(self) -> dict[str, float]:
        """Return, by job, the power per GPU that its targets assumed for the rest of the host, if any."""
        of_jobs = (
            "(SELECT job_id, max(host_power_w) AS host_power_w FROM targets WHERE host_power_w > 0 GROUP BY job_id) t"
        )
        columns = "t.job_id, max(t.host_power_w) / count(DISTINCT ranks.gpu_uuid) AS power_w"
        with self._reading() as reader:
            rows = reader.values(columns, f"{of_jobs} JOIN ranks ON ranks.job_id = t.job_id", {}, group_by="t.job_id")
        return {row[0]: row[1] for row in rows}

    def forecasts(self, zone: str, since: datetime) -> tuple[CarbonForecast, ...]:
        """Return the forecasts of a zone issued since an instant of grid time, oldest first."""
        with self._reading() as reader:
            return carbon_queries.forecasts(reader, zone, since)

    def estimates(self, ids: Sequence[str]) -> tuple[EstimateRecord, ...]:
        """Return the newest estimates of what plans save, for jobs or for pipelines across hosts."""
        with self._reading() as reader:
            rows = reader.values(column_names(EstimateRecord), "estimates", reader.in_condition("job_id", ids))
            return tuple(EstimateRecord(*row) for row in rows)

    def targets(self, job_id: str) -> tuple[TargetRecord, ...]:
        """Return the iteration time targets of a job, oldest first; empty without a target policy."""
        with self._reading() as reader:
            return carbon_queries.targets(reader, job_id)

    def past_jobs(self, key_prefix: str, *, limit: int | None = None) -> tuple[PastJobRecord, ...]:
        """Return the newest encoded records of past jobs whose key has this prefix, without deleted ones."""
        with self._reading() as reader:
            rows = reader.select(
                column_names(PastJobRecord),
                "models",
                {"signature LIKE ?": key_prefix + "%", "length(model) > ?": 0},
                order_by="learned_at DESC, signature",
                limit=limit,
            )
        return tuple(PastJobRecord(r.signature, r.job_id, r.learned_at, bytes(r.model)) for r in rows)


def open_history(path_or_url: str | Path, *, has_no_writer: bool = False) -> History:
    """Open a history for reading; if it has no writer, no file is created in its folder.

    Raises:
        StoreError: the file is missing, corrupt, not a history, or written by another version.
    """
    history = _history(path_or_url, has_no_writer=has_no_writer)
    try:
        state = history.schema_state()
    except StoreError as error:
        raise StoreError(f"{path_or_url}: {error}") from None
    if state is SchemaState.CURRENT:
        return history
    history.close()
    match state:
        case SchemaState.EMPTY:
            raise StoreError(f"{path_or_url} is empty: no daemon has written a history to it yet")
        case SchemaState.FOREIGN:
            raise StoreError(f"{path_or_url} is not a gpuenergyd history")
        case SchemaState.OLDER:
            raise StoreError(
                f"{path_or_url} was written by an older version of gpuenergyd; start the daemon once to upgrade it"
            )
        case SchemaState.UNSUPPORTED:
            raise StoreError(f"{path_or_url} was written by gpuenergyd before 0.1.0; only that version can read it")
        case SchemaState.NEWER:
            raise StoreError(f"{path_or_url} was written by a newer version of gpuenergyd; use that version to read it")


def _history(path_or_url: str | Path, *, has_no_writer: bool) -> History:
    path = plain_sqlite_path(path_or_url)
    if path is None:
        from gpuenergyd.store.database import reading_engine, reading_server, sqlite_path  # noqa: PLC0415  slow to load

        path = sqlite_path(path_or_url)
        if path is None:
            engine = reading_engine(path_or_url, keeps_connection=True)
            return History(partial(reading_server, engine), engine.dispose)
    require_file(path)
    return History(partial(reading_file, path, has_no_writer=has_no_writer))


def _plan_record(row: Row, baseline: MedianIteration) -> PlanRecord:
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
    return PlanRecord(row.job_id, row.plan_epoch, plan, row.issued_at, row.apply_at_iteration)


def rollups(reader: Reader, bucket_s: int, time_range: TimeRange, job_id: str | None) -> tuple[RollupRecord, ...]:
    """Return the rollups of one bucket length, sorted by GPU and time; all jobs and idle time if `job_id` is None."""
    if bucket_s == 1:
        return _seconds(reader, time_range, job_id)
    where = {
        "bucket_s = ?": bucket_s,
        "started_at >= ?": time_range.since,
        "started_at < ?": time_range.until,
        "job_id = ?": job_id,
    }
    # Reading in the order of the table's key is free; the stable sort by GPU keeps that order within each GPU.
    rows = reader.values(RollupRecord._fields, "gpu_rollups", where, order_by="started_at, gpu_uuid, job_id")
    return tuple(sorted(map(RollupRecord._make, rows), key=attrgetter("gpu_uuid")))


def samples(reader: Reader, gpu_uuid: str, time_range: TimeRange) -> tuple[SampleRecord, ...]:
    """Return the raw samples of one GPU that are still stored, oldest first."""
    points = _packed_points(reader, time_range, {"tier = ?": RAW_TIER, "gpu_uuid = ?": gpu_uuid})
    return tuple(SampleRecord(gpu_uuid, at, **values) for _, at, values in points)


def _packed_points(
    reader: Reader, time_range: TimeRange, where: Mapping[str, object]
) -> Iterator[tuple[Row, datetime, dict[str, Any]]]:
    """Yield (packed minute, instant, values), sorted by GPU and time."""
    first_minute = time_range.since - timedelta(minutes=1) if time_range.since is not None else None
    where = {**where, "started_at >= ?": first_minute, "started_at < ?": time_range.until}
    for row in reader.select("*", "gpu_series", where, order_by="gpu_uuid, started_at, job_id"):
        for at, values in series_points(row.tier, row.started_at, row.points):
            if time_range.contains(at):
                yield row, at, values


def _seconds(reader: Reader, time_range: TimeRange, job_id: str | None) -> tuple[RollupRecord, ...]:
    """Return one-second rollups; a job that left a GPU and returned within a second gets one rollup for it."""
    parts: dict[tuple[str, datetime, str], list[RollupRecord]] = defaultdict(list)
    for row, at, values in _packed_points(reader, time_range, {"tier = ?": SECOND_TIER, "job_id = ?": job_id}):
        second = at.replace(microsecond=0)
        named: dict[str, Any] = {name: value or 0.0 if name.endswith("_s") else value for name, value in values.items()}
        part = RollupRecord(1, row.gpu_uuid, second, row.job_id, **named)
        parts[row.gpu_uuid, second, row.job_id].append(part)
    return tuple(map(merge_rollups, parts.values()))
