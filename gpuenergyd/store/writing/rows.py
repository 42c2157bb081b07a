"""Records to rows: one multi-row statement per table, so that a batch is a handful of statements."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Table, bindparam, case, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as sqlite_insert

from gpuenergyd.store import schema
from gpuenergyd.store.encoding.compressed_json import (
    encode_clocks,
    encode_hours,
    encode_points,
    encode_spans,
    encode_tags,
)
from gpuenergyd.store.maintenance.stored_summaries import forget_summaries
from gpuenergyd.store.records import (
    MAX_REASON_CHARS,
    ControlEventRecord,
    ForecastRecord,
    HostRollupRecord,
    IntensityRecord,
    IterationRecord,
    JobEndRecord,
    JobRecord,
    JobResumedRecord,
    ModelRecord,
    PlanRecord,
    RankRecord,
    Record,
    RollupRecord,
    SampleRecord,
    TargetRecord,
    fields_of,
)

Row = dict[str, Any]


def insert_records(connection: Connection, records: Iterable[Record], *, host: str = "") -> int:
    """Write what a host recorded in the transaction that is open; return how many rows that were."""
    by_table: dict[str, list[Row]] = defaultdict(list)
    ends: list[Row] = []
    for record in records:
        match record:
            case JobRecord():
                by_table["jobs"].append({**fields_of(record), "tags": encode_tags(record.tags), "host": host or None})
            case RankRecord():
                by_table["ranks"].append(fields_of(record))
            case IterationRecord():
                row = fields_of(record)
                spans = row.pop("spans")
                by_table["iterations"].append(row)
                if spans:
                    key = {"job_id": record.job_id, "iteration_index": record.iteration_index}
                    by_table["iteration_spans"].append({**key, "spans": encode_spans(spans)})
            case PlanRecord():
                by_table["plans"].append(_plan_row(record))
            case ControlEventRecord():
                row = fields_of(record)
                by_table["control_events"].append(
                    {**row, **{k: row[k][:MAX_REASON_CHARS] for k in ("reason", "before", "after")}}
                )
            case RollupRecord():
                by_table["gpu_rollups"].append(fields_of(record))
            case HostRollupRecord():
                by_table["host_rollups"].append({**fields_of(record), "host": host})
            case SampleRecord():
                raise TypeError("samples are packed with their minute, never rows of their own")
            case IntensityRecord():
                by_table["intensities"].append(fields_of(record))
            case ForecastRecord(forecast=forecast):
                by_table["forecasts"].append(
                    {
                        "zone": forecast.zone,
                        "model": forecast.model,
                        "issued_at": forecast.issued_at,
                        "unit": forecast.unit,
                        "hours": encode_hours(forecast.hours),
                    }
                )
            case TargetRecord():
                row = fields_of(record)
                frontier = encode_points(record.frontier) if record.frontier is not None else None
                row |= {"rung": row.pop("basis"), "reason": record.reason[:MAX_REASON_CHARS], "frontier": frontier}
                by_table["targets"].append(row)
            case ModelRecord():
                by_table["models"].append(fields_of(record))
            case JobEndRecord():
                row = fields_of(record)
                ends.append({**row, "of_job": row.pop("job_id"), "end_reason": record.end_reason[:MAX_REASON_CHARS]})
            case JobResumedRecord():
                ends.append({"of_job": record.job_id, "ended_at": None, "end_reason": None})
    forget_summaries(
        connection, {row["job_id"] for row in by_table.get("iterations", ())} | {row["of_job"] for row in ends}
    )
    num_rows = len(ends)
    # In one order of tables and rows for all hosts: two that wait for each other's rows would never end.
    for name, rows in sorted(by_table.items()):
        num_rows += _upsert(connection, schema.metadata.tables[name], rows)
    if ends:
        statement = update(schema.jobs).where(schema.jobs.c.job_id == bindparam("of_job"))
        connection.execute(
            statement.values(ended_at=bindparam("ended_at"), end_reason=bindparam("end_reason")),
            [{"of_job": e["of_job"], "ended_at": e["ended_at"], "end_reason": e["end_reason"]} for e in ends],
        )
    return num_rows


def replace_series(connection: Connection, rows: list[Row]) -> None:
    """Write packed minutes; one that is already there is replaced."""
    if rows:
        _upsert(connection, schema.gpu_series, rows)


def note_gpus(connection: Connection, gpu_uuids: Iterable[str], *, host: str) -> None:
    """Write that these GPUs are in a host; one that was in another is in this one now."""
    now = datetime.now(tz=UTC)
    rows = [{"gpu_uuid": gpu_uuid, "host": host, "seen_at": now} for gpu_uuid in gpu_uuids]
    if rows:
        _upsert(connection, schema.gpu_hosts, rows)


def close_abandoned_jobs(connection: Connection, *, host: str | None) -> None:
    """End the jobs that an earlier daemon of a host left open, at the last thing that is known of them.

    None: of whichever host.
    """
    jobs, iterations = schema.jobs, schema.iterations
    last_begin = (
        select(func.max(iterations.c.started_at))
        .where(iterations.c.job_id == jobs.c.job_id)
        .correlate(jobs)
        .scalar_subquery()
    )
    connection.execute(
        update(jobs)
        .where(jobs.c.ended_at.is_(None), *(() if host is None else (jobs.c.host == host,)))
        .values(ended_at=func.coalesce(last_begin, jobs.c.started_at), end_reason="the daemon ended before the job")
    )


def _plan_row(record: PlanRecord) -> Row:
    plan, predicted = record.plan, record.plan.predicted
    return {
        "job_id": record.job_id,
        "plan_epoch": record.plan_epoch,
        "plan_id": plan.plan_id,
        "purpose": plan.purpose,
        "reason": plan.reason[:MAX_REASON_CHARS],
        "issued_at": record.issued_at,
        "apply_at_iteration": record.apply_at_iteration,
        "predicted_iteration_time_s": predicted.iteration_time_s if predicted else None,
        "predicted_energy_j": predicted.energy_j if predicted else None,
        "lower_bound_j": predicted.lower_bound_j if predicted else None,
        "clocks": encode_clocks(plan.ranks),
    }


def _upsert(connection: Connection, table: Table, rows: list[Row]) -> int:
    """Insert rows; one that is already there is replaced, a rollup is added to. Return how many rows that were."""
    key = [column.name for column in table.primary_key]
    if table is schema.control_events:
        connection.execute(insert(table), rows)
        return len(rows)
    make: Callable[[Table], Any] = sqlite_insert
    if connection.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert as make  # noqa: PLC0415  slow to load; most hosts have none
    by_key: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        by_key[tuple(row[name] for name in key)].append(row)
    add_up = _ADDED_UP.get(table.name)
    # What comes twice in one batch counts as it came last, pieces of one bucket together.
    rows = [
        own[-1] if add_up is None or len(own) == 1 else add_up(own)
        for _, own in sorted(by_key.items(), key=lambda item: item[0])
    ]
    statement = make(table)
    new: Mapping[str, Any] = {
        column.name: statement.excluded[column.name] for column in table.columns if column.name not in key
    }
    if table is schema.gpu_rollups:
        new = _sum_of_rollups(table, {column.name: statement.excluded[column.name] for column in table.columns})
    if table is schema.host_rollups:
        new = _sum_of_host_rollups(table, {column.name: statement.excluded[column.name] for column in table.columns})
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=new), rows)
    return len(rows)


def _sum_of_rollups(table: Table, new: Mapping[str, Any]) -> dict[str, Any]:
    """Return a bucket that was written in two parts: the daemon restarted inside it, or the job came and went."""
    old = table.c
    num_samples = old.num_samples + new["num_samples"]

    def mean(name: str) -> Any:
        weighted = old[name] * old.num_samples + new[name] * new["num_samples"]
        return func.coalesce(weighted / func.nullif(num_samples, 0), old[name], new[name])

    return {
        "energy_j": func.coalesce(old.energy_j + new["energy_j"], old.energy_j, new["energy_j"]),
        "mean_power_w": mean("mean_power_w"),
        "max_power_w": _larger(old.max_power_w, new["max_power_w"]),
        "mean_sm_clock_mhz": mean("mean_sm_clock_mhz"),
        "num_samples": num_samples,
        "estimated_j": func.coalesce(old.estimated_j + new["estimated_j"], old.estimated_j, new["estimated_j"]),
        **{name: old[name] + new[name] for name in ("measured_s", "estimated_s", "missing_s")},
    }


def _sum_of_host_rollups(table: Table, new: Mapping[str, Any]) -> dict[str, Any]:
    old = table.c
    return {
        "energy_j": func.coalesce(old.energy_j + new["energy_j"], old.energy_j, new["energy_j"]),
        **{name: old[name] + new[name] for name in ("measured_s", "missing_s")},
    }


def _larger(old: Any, new: Any) -> Any:
    return case((old.is_(None), new), (new.is_(None), old), (new > old, new), else_=old)


def _added_rollups(pieces: Sequence[Row]) -> Row:
    """Return one row of a bucket whose pieces came in one batch, as `_sum_of_rollups` would have made it."""
    num_samples = sum(piece["num_samples"] for piece in pieces)

    def mean(name: str) -> float | None:
        known: list[tuple[float, int]] = [
            (piece[name], piece["num_samples"]) for piece in pieces if piece[name] is not None
        ]
        weight = sum(num for _, num in known)
        if not weight:
            return known[0][0] if known else None
        return sum(value * num for value, num in known) / weight

    powers_w = [piece["max_power_w"] for piece in pieces if piece["max_power_w"] is not None]
    return {
        **pieces[0],
        **{name: _known_sum(pieces, name) for name in ("energy_j", "estimated_j")},
        **{name: mean(name) for name in ("mean_power_w", "mean_sm_clock_mhz")},
        "max_power_w": max(powers_w, default=None),
        "num_samples": num_samples,
        **{name: sum(piece[name] for piece in pieces) for name in ("measured_s", "estimated_s", "missing_s")},
    }


def _added_host_rollups(pieces: Sequence[Row]) -> Row:
    return {
        **pieces[0],
        "energy_j": _known_sum(pieces, "energy_j"),
        **{name: sum(piece[name] for piece in pieces) for name in ("measured_s", "missing_s")},
    }


def _known_sum(pieces: Sequence[Row], name: str) -> float | None:
    known: list[float] = [piece[name] for piece in pieces if piece[name] is not None]
    return sum(known) if known else None


_ADDED_UP: Mapping[str, Callable[[Sequence[Row]], Row]] = {
    "gpu_rollups": _added_rollups,
    "host_rollups": _added_host_rollups,
}
"""How pieces of one bucket that come in one batch become one row: adding to a row costs a database a new copy of it."""
