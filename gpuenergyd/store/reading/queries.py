"""What can be asked of the history, while the daemon runs and after it. Nothing here writes."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from gpuenergyd.core.carbon.intensity import CarbonForecast
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.plan import ClockPlan, PlanPrediction, PlanPurpose
from gpuenergyd.errors import StoreError
from gpuenergyd.store.encoding.compressed_json import decode_clocks, decode_spans
from gpuenergyd.store.encoding.series import RAW_TIER, SECOND_TIER, series_points
from gpuenergyd.store.readers.sqlite import (
    Contents,
    Reader,
    Row,
    Source,
    SqliteSource,
    contents,
    plain_sqlite_path,
)
from gpuenergyd.store.reading import carbon_queries
from gpuenergyd.store.reading.carbon_queries import StoredIntensity, TargetRow
from gpuenergyd.store.reading.energy_sums import EnergySum, HostEnergyRow, energy_sums, host_energy
from gpuenergyd.store.reading.iterations import IterationRow, Iterations, all_iterations, iteration_rows
from gpuenergyd.store.reading.stored_summaries import summaries_of
from gpuenergyd.store.reading.summaries import (
    WHOLE,
    Counted,
    JobSummary,
    Typical,
    baseline_of,
)

_JOBS = "jobs LEFT JOIN job_figures ON job_figures.job_id = jobs.job_id"
_JOB_COLUMNS = "jobs.*, job_figures.version AS kept_version, job_figures.figures AS kept_figures"


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


class Rollup(NamedTuple):
    """What one GPU did in one bucket of time for one job (empty: for nobody).

    `energy_j` was measured, during `measured_s`; `estimated_j` was not, during `estimated_s`. A tuple, for a dataclass
    takes four times as long to make, and these come in thousands.
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

    def __init__(self, source: Source) -> None:
        self._source = source

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the database."""
        self._source.close()

    def job_summaries(
        self,
        since: datetime | None = None,
        until: datetime | None = None,
        job: str | None = None,
        *,
        counts_only_span: bool = False,
    ) -> tuple[JobSummary, ...]:
        """Return the jobs that ran in a span of time, oldest first; `job` is a job's id or name.

        Their figures are those of the whole job, or of its part within the span, against the whole job's baseline.

        Raises:
            StoreError: the history cannot be read.
        """
        wanted = {
            # A clock that was set back while a job ran lets it end before it began.
            "jobs.ended_at IS NULL OR jobs.ended_at >= ? OR jobs.started_at >= ?": since,
            "jobs.started_at < ? OR jobs.ended_at < ?": until,
            "jobs.job_id = ? OR jobs.job_name = ?": job,
        }
        counted = Counted(since, until) if counts_only_span else WHOLE
        with self._source.reading() as reader:
            rows = reader.select(_JOB_COLUMNS, _JOBS, wanted, order_by="jobs.started_at, jobs.job_id")
            return summaries_of(reader, rows, counted)

    def iterations(self, job_id: str) -> tuple[IterationRow, ...]:
        """Return a job's iterations in order; of a long job those that have not become blocks yet.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            return iteration_rows(reader, job_id)

    def all_iterations(self, job_id: str) -> tuple[Iterations, ...]:
        """Return a job's iterations in order, those of a long job that have become blocks among them.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            return tuple(all_iterations(reader, job_id))

    def spans(self, job_id: str, iteration_index: int) -> tuple[ObservedSpan, ...]:
        """Return the measured timeline of one iteration; empty when none was kept.

        Raises:
            StoreError: the history cannot be read.
        """
        own = {"job_id = ?": job_id, "iteration_index = ?": iteration_index}
        with self._source.reading() as reader:
            blob = reader.first("spans", "iteration_spans", own)
            return decode_spans(blob) if blob is not None else ()

    def iterations_with_spans(self, job_id: str) -> tuple[int, ...]:
        """Return the indices of the iterations whose timeline was kept.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            rows = reader.select(
                "iteration_index", "iteration_spans", {"job_id = ?": job_id}, order_by="iteration_index"
            )
            return tuple(row.iteration_index for row in rows)

    def plans(self, job_id: str) -> tuple[PlanRow, ...]:
        """Return the plans of a job, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            baseline = baseline_of(reader, job_id)
            rows = reader.select("*", "plans", {"job_id = ?": job_id}, order_by="plan_epoch")
            return tuple(_plan(row, baseline) for row in rows)

    def control_events(
        self, job_id: str | None = None, since: datetime | None = None, until: datetime | None = None
    ) -> tuple[ControlEvent, ...]:
        """Return who changed what, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        wanted = {"job_id = ?": job_id, "at >= ?": since, "at < ?": until}
        with self._source.reading() as reader:
            return reader.records(ControlEvent, "control_events", wanted, order_by="event_id")

    def last_recorded_at(self) -> datetime | None:
        """Return when the newest control event was recorded, None before the first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            newest: datetime | None = reader.first("at", "control_events", order_by="event_id DESC")
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
        with self._source.reading() as reader:
            if bucket_s == 1:
                return _seconds(reader, since, until, gpu_uuid, job_id)
            wanted = {"bucket_s = ?": bucket_s, **_within(since, until, gpu_uuid, job_id)}
            # In the order of the table's key, which costs nothing; sorting by GPU keeps it within each GPU.
            rows = reader.values(Rollup._fields, "gpu_rollups", wanted, order_by="started_at, gpu_uuid, job_id")
            return tuple(sorted(map(Rollup._make, rows), key=attrgetter("gpu_uuid")))

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
        """Return what GPUs used by job, and by GPU, host or time where asked; from hours as far as the span allows.

        By time, hours that `is_split` names by their begin come in minutes, as long as those are kept.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            return tuple(
                energy_sums(
                    reader, since=since, until=until, by_gpu=by_gpu, by_time=by_time, by_host=by_host, is_split=is_split
                )
            )

    def host_energy(self, *, since: datetime | None = None, until: datetime | None = None) -> tuple[HostEnergyRow, ...]:
        """Return what processors and memory used in each hour, by host, domain and then time.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            return host_energy(reader, since, until)

    def samples(
        self, gpu_uuid: str, *, since: datetime | None = None, until: datetime | None = None
    ) -> tuple[Sample, ...]:
        """Return the raw samples of one GPU that are still kept, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            return tuple(
                Sample(gpu_uuid, at, **values)
                for _, at, values in _points(reader, RAW_TIER, since, until, gpu_uuid, None)
            )

    def intensities(
        self, *, since: datetime | None = None, until: datetime | None = None, zone: str | None = None
    ) -> tuple[StoredIntensity, ...]:
        """Return the carbon intensities that held in a span of the host's time, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            return carbon_queries.intensities(reader, since, until, zone)

    def forecasts(self, zone: str, since: datetime) -> tuple[CarbonForecast, ...]:
        """Return the forecasts of a zone issued from an instant of the grid on, oldest first.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            return carbon_queries.forecasts(reader, zone, since)

    def targets(self, job_id: str) -> tuple[TargetRow, ...]:
        """Return what was owed to a job, oldest first; empty where no target policy was asked.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            return carbon_queries.targets(reader, job_id)

    def model(self, signature: str) -> bytes | None:
        """Return what the last run of a signature showed, None when nothing is known or it was forgotten.

        Raises:
            StoreError: the history cannot be read.
        """
        with self._source.reading() as reader:
            kept = reader.first("model", "models", {"signature = ?": signature})
        return bytes(kept) if kept else None


def open_history(path_or_url: str | Path, *, nobody_writes: bool = False) -> History:
    """Open a history for reading; where nobody writes, its folder is not touched at all.

    Raises:
        StoreError: nothing there, damaged, not ours, or written by another version.
    """
    source = _source(path_or_url, nobody_writes=nobody_writes)
    try:
        with source.reading() as reader:
            held = contents(reader)
    except StoreError as error:
        reason = str(error).removeprefix("the history cannot be read: ")
        raise StoreError(f"{path_or_url} cannot be read as a history: {reason}") from None
    match held:
        case Contents.CURRENT:
            return History(source)
        case Contents.NOTHING:
            raise StoreError(f"{path_or_url} is empty: no daemon has written a history there yet")
        case Contents.FOREIGN:
            raise StoreError(f"{path_or_url} is not a history of gpuenergyd")
        case Contents.OLDER:
            raise StoreError(f"{path_or_url} was written by an older gpuenergyd; start the daemon once to upgrade it")
        case Contents.NEWER:
            raise StoreError(f"{path_or_url} was written by a newer gpuenergyd; read it with that version")


def _source(path_or_url: str | Path, *, nobody_writes: bool) -> Source:
    path = plain_sqlite_path(path_or_url)
    if path is None:
        from gpuenergyd.store.database import reading_engine, sqlite_path  # noqa: PLC0415  SQLAlchemy is slow to load
        from gpuenergyd.store.readers.sqlalchemy import EngineSource  # noqa: PLC0415  as above

        path = sqlite_path(path_or_url)
        if path is None:
            return EngineSource(reading_engine(path_or_url, keeps_connection=True))
    if not path.is_file():
        raise StoreError(f"no history at {path}")
    return SqliteSource(path, nobody_writes=nobody_writes)


def _within(
    since: datetime | None, until: datetime | None, gpu_uuid: str | None, job_id: str | None
) -> dict[str, object]:
    return {"started_at >= ?": since, "started_at < ?": until, "gpu_uuid = ?": gpu_uuid, "job_id = ?": job_id}


def _points(
    reader: Reader,
    tier: int,
    since: datetime | None,
    until: datetime | None,
    gpu_uuid: str | None,
    job_id: str | None,
) -> Iterator[tuple[Row, datetime, dict[str, Any]]]:
    """Yield (packed minute, instant, values) of one tier, by GPU and then time."""
    minute = since - timedelta(minutes=1) if since is not None else None
    wanted = {"tier = ?": tier, **_within(minute, until, gpu_uuid, job_id)}
    for row in reader.select("*", "gpu_series", wanted, order_by="gpu_uuid, started_at, job_id"):
        for at, values in series_points(tier, row.started_at, row.points):
            if (since is None or at >= since) and (until is None or at < until):
                yield row, at, values


def _seconds(
    reader: Reader, since: datetime | None, until: datetime | None, gpu_uuid: str | None, job_id: str | None
) -> tuple[Rollup, ...]:
    """Return one-second buckets; a job that came, went and came again within one has its parts added up."""
    parts: dict[tuple[str, datetime, str], list[Rollup]] = defaultdict(list)
    for row, at, values in _points(reader, SECOND_TIER, since, until, gpu_uuid, job_id):
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


def _plan(row: Row, baseline: Typical) -> PlanRow:
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
