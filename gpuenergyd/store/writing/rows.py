"""Converts records to rows and writes them with one multi-row statement per table."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from textwrap import shorten
from typing import Any, assert_never

from sqlalchemy import Connection, Table, bindparam, case, delete, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from gpuenergyd.core.carbon.intensity import CarbonSignal, SampleStatus
from gpuenergyd.store import schema
from gpuenergyd.store.encoding.compressed_json import (
    encode_clocks,
    encode_hours,
    encode_points,
    encode_spans,
    encode_tags,
)
from gpuenergyd.store.maintenance.stored_summaries import delete_summaries
from gpuenergyd.store.records import (
    MAX_REASON_CHARS,
    ControlEventRecord,
    EstimateRecord,
    EstimatesWithdrawn,
    ForecastRecord,
    HostRollupRecord,
    IntensityRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    JobResumedRecord,
    PastJobRecord,
    PlanRecord,
    RankRecord,
    Record,
    RollupRecord,
    SampleRecord,
    TargetRecord,
    merge_host_rollups,
    merge_rollups,
)

RowValues = dict[str, Any]

_END_COLUMNS = ("ended_at", "end_reason", "outcome", "outcome_reason")
_ABANDONED = "the daemon stopped before the job"


def insert_records(connection: Connection, records: Iterable[Record], *, host: str = "") -> int:
    """Write the records of a host in the open transaction; return the number of rows."""
    by_table: dict[str, list[RowValues]] = defaultdict(list)
    ends: list[RowValues] = []
    for record in _merged_rollups(records):
        match record:
            case JobEndRecord():
                ends.append(_end_row(record))
            case JobResumedRecord():
                ends.append({"ended_job_id": record.job_id, **dict.fromkeys(_END_COLUMNS)})
            case EstimatesWithdrawn():
                own = _estimates_of(record.signal)
                conditions = (schema.intensities.c[name] == value for name, value in own.items())
                connection.execute(delete(schema.intensities).where(*conditions))
                earlier = by_table.pop("intensities", [])  # in the same batch
                if kept := [row for row in earlier if not own.items() <= row.items()]:
                    by_table["intensities"] = kept
            case _:
                table, row = _row(record, host)
                by_table[table].append(row)
        if isinstance(record, IterationRecord) and record.spans:
            by_table["iteration_spans"].append(
                {
                    "job_id": record.job_id,
                    "iteration_index": record.iteration_index,
                    "spans": encode_spans(record.spans),
                }
            )
    changed_jobs = {row["job_id"] for table in ("iterations", "estimates") for row in by_table.get(table, ())}
    changed_jobs |= {row["ended_job_id"] for row in ends}
    delete_summaries(connection, changed_jobs)
    num_rows = len(ends)
    # All hosts write tables and rows in the same order; otherwise two transactions could deadlock.
    for name, rows in sorted(by_table.items()):
        num_rows += _upsert(connection, schema.metadata.tables[name], rows)
    if ends:
        statement = update(schema.jobs).where(schema.jobs.c.job_id == bindparam("ended_job_id"))
        values: RowValues = {name: bindparam(name) for name in _END_COLUMNS}
        connection.execute(statement.values(**values), ends)
    return num_rows


def _estimates_of(signal: CarbonSignal) -> RowValues:
    """Return the column values common to all estimates of a signal."""
    return {
        "zone": signal.zone,
        "source": signal.source,
        "kind": signal.kind,
        "factor": signal.factor,
        "status": SampleStatus.ESTIMATED,
    }


def replace_series(connection: Connection, rows: list[RowValues]) -> None:
    """Write packed minutes, replacing existing ones."""
    if rows:
        _upsert(connection, schema.gpu_series, rows)


def record_gpu_hosts(connection: Connection, gpu_uuids: Iterable[str], *, host: str) -> None:
    """Record that GPUs are in a host, even if they were in another one before."""
    now = datetime.now(tz=UTC)
    rows = [{"gpu_uuid": gpu_uuid, "host": host, "seen_at": now} for gpu_uuid in gpu_uuids]
    if rows:
        _upsert(connection, schema.gpu_hosts, rows)


def close_abandoned_jobs(connection: Connection, *, host: str | None) -> None:
    """End the jobs that an earlier daemon of a host (None: any host) left open, at the time of their last record."""
    jobs, iterations = schema.jobs, schema.iterations
    last_start = (
        select(func.max(iterations.c.started_at))
        .where(iterations.c.job_id == jobs.c.job_id)
        .correlate(jobs)
        .scalar_subquery()
    )
    connection.execute(
        update(jobs)
        .where(jobs.c.ended_at.is_(None), *(() if host is None else (jobs.c.host == host,)))
        .values(
            ended_at=func.coalesce(last_start, jobs.c.started_at),
            end_reason=_ABANDONED,
            outcome="unknown",
            outcome_reason=_ABANDONED,
        )
    )


def _merged_rollups(records: Iterable[Record]) -> Iterator[Record]:
    """Yield records with one rollup per bucket, because PostgreSQL copies a row on every update."""
    gpu_buckets: dict[tuple[Any, ...], list[RollupRecord]] = defaultdict(list)
    host_buckets: dict[tuple[Any, ...], list[HostRollupRecord]] = defaultdict(list)
    for record in records:
        match record:
            case RollupRecord():
                gpu_buckets[record[:4]].append(record)
            case HostRollupRecord():
                host_buckets[record.bucket_s, record.started_at, record.domain].append(record)
            case _:
                yield record
    yield from map(merge_rollups, gpu_buckets.values())
    yield from map(merge_host_rollups, host_buckets.values())


def _row(record: Record, host: str) -> tuple[str, RowValues]:  # noqa: C901, PLR0911, PLR0912  one flat case per record type
    match record:
        case RollupRecord():
            return "gpu_rollups", record._asdict()
        case HostRollupRecord():
            return "host_rollups", {**_fields(record), "host": host}
        case IterationRecord():
            row = _fields(record)
            del row["spans"]
            return "iterations", row
        case EstimateRecord():
            return "estimates", _fields(record)
        case JobRecord():
            return "jobs", {**_fields(record), "tags": encode_tags(record.tags), "host": host or None}
        case RankRecord():
            return "ranks", _fields(record)
        case PlanRecord():
            return "plans", _plan_row(record)
        case ControlEventRecord():
            texts = {name: _fitting(getattr(record, name)) for name in ("reason", "before", "after")}
            return "control_events", {**_fields(record), **texts}
        case TargetRecord():
            row = {**_fields(record), "reason": _fitting(record.reason)}
            row["frontier"] = encode_points(record.frontier) if record.frontier is not None else None
            return "targets", row
        case IntensityRecord():
            return "intensities", _fields(record)
        case ForecastRecord(forecast=forecast):
            row = {name: getattr(forecast, name) for name in ("zone", "model", "issued_at", "unit")}
            return "forecasts", {**row, "hours": encode_hours(forecast.hours)}
        case PastJobRecord():
            return "models", _fields(record)
        case JobEndRecord() | JobResumedRecord() | SampleRecord() | EstimatesWithdrawn():
            raise TypeError(f"{type(record).__name__} has no row of its own")
        case _:
            assert_never(record)


def _fitting(reason: str) -> str:
    """Return a text that fits its column, shortened at a word boundary."""
    return reason if len(reason) <= MAX_REASON_CHARS else shorten(reason, MAX_REASON_CHARS, placeholder=" ...")


def _plan_row(record: PlanRecord) -> RowValues:
    plan, predicted, saving = record.plan, record.plan.predicted, record.plan.predicted_saving
    return {
        "job_id": record.job_id,
        "plan_epoch": record.plan_epoch,
        "plan_id": plan.plan_id,
        "purpose": plan.purpose,
        "reason": _fitting(plan.reason),
        "issued_at": record.issued_at,
        "apply_at_iteration": record.apply_at_iteration,
        "predicted_iteration_time_s": predicted.iteration_time_s if predicted else None,
        "predicted_energy_j": predicted.energy_j if predicted else None,
        "lower_bound_j": predicted.lower_bound_j if predicted else None,
        "clocks": encode_clocks(plan.ranks),
        "predicted_saving_ratio": saving.ratio if saving else None,
        "predicted_saving_low_ratio": saving.low_ratio if saving else None,
        "predicted_saving_high_ratio": saving.high_ratio if saving else None,
    }


def _end_row(record: JobEndRecord) -> RowValues:
    return {
        "ended_job_id": record.job_id,
        "ended_at": record.ended_at,
        "end_reason": _fitting(record.end_reason),
        "outcome": record.outcome or None,
        "outcome_reason": _fitting(record.outcome_reason) or None,
    }


def _fields(record: Any) -> RowValues:
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}


def _upsert(connection: Connection, table: Table, rows: list[RowValues]) -> int:
    """Insert rows, replacing existing ones; rollups are added to existing ones. Return the number of rows."""
    if table is schema.control_events:
        connection.execute(insert(table), rows)
        return len(rows)
    make: Callable[[Table], Any] = sqlite_insert
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as make  # noqa: PLC0415  slow to load; most hosts use SQLite
    key = [column.name for column in table.primary_key]
    # The last of several rows with the same key wins.
    by_key = {tuple(row[name] for name in key): row for row in rows}
    rows = [row for _, row in sorted(by_key.items(), key=lambda item: item[0])]
    statement = make(table)
    new: Mapping[str, Any] = {column.name: statement.excluded[column.name] for column in table.columns}
    if table in {schema.gpu_rollups, schema.host_rollups}:
        updated = _sum_of_rollups(table, new)
    else:
        updated = {name: value for name, value in new.items() if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=updated), rows)
    return len(rows)


def _sum_of_rollups(table: Table, new: Mapping[str, Any]) -> RowValues:
    """Return the sum of a stored rollup and a new one, after the daemon restarted or the job left and returned."""
    old = table.c

    def known_sum(name: str) -> Any:
        return func.coalesce(old[name] + new[name], old[name], new[name])

    def mean(name: str) -> Any:
        weighted = old[name] * old.num_samples + new[name] * new["num_samples"]
        num_samples = old.num_samples + new["num_samples"]
        return func.coalesce(weighted / func.nullif(num_samples, 0), old[name], new[name])

    def larger(name: str) -> Any:
        return case((old[name].is_(None), new[name]), (new[name] > old[name], new[name]), else_=old[name])

    merges: Mapping[str, Callable[[str], Any]] = {
        "energy_j": known_sum,
        "estimated_j": known_sum,
        "assumed_host_j": known_sum,
        "mean_power_w": mean,
        "mean_sm_clock_mhz": mean,
        "max_power_w": larger,
        **dict.fromkeys(("num_samples", "measured_s", "estimated_s", "missing_s"), lambda name: old[name] + new[name]),
    }
    return {name: merge(name) for name, merge in merges.items() if name in old}
