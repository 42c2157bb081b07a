"""The writer upgrades the history of every earlier version without losing data."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, insert, inspect

from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history
from gpuenergyd.store.database import MIGRATIONS, create_tables, migrate, reading_engine, writing_engine
from gpuenergyd.store.readers.reader import SCHEMA_REVISION, SchemaState, epoch_us, schema_state
from gpuenergyd.store.readers.sqlalchemy import EngineReader
from gpuenergyd.store.schema import metadata
from tests.store.test_history import job

BEGIN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
REVISIONS = sorted(path.stem[1:5] for path in (MIGRATIONS / "versions").glob("r[0-9]*.py"))
EARLIER = [revision for revision in REVISIONS if revision != SCHEMA_REVISION]
JOB: dict[str, Any] = {
    "job_id": "old-1",
    "job_name": "old",
    "run_key": "run",
    "dp_rank": 0,
    "policy": "bubble-aware",
    "schedule_name": "1f1b",
    "framework": "torch",
    "is_simulated": False,
    "num_ranks": 1,
    "num_microbatches": 8,
    "max_slowdown_ratio": 0.0,
    "uid": 1000,
    "started_at": epoch_us(BEGIN),
    "ended_at": epoch_us(BEGIN + timedelta(hours=2)),
    "end_reason": "released",
}


def rollup(bucket_s: int, at: datetime, energy_j: float) -> dict[str, Any]:
    return {
        "bucket_s": bucket_s,
        "gpu_uuid": "GPU-0",
        "started_at": epoch_us(at),
        "job_id": "old-1",
        "energy_j": energy_j,
        "mean_power_w": energy_j / bucket_s,
        "max_power_w": 2 * energy_j / bucket_s,
        "mean_sm_clock_mhz": 1410.0,
        "num_samples": bucket_s * 10,
        "measured_s": float(bucket_s),
        "estimated_s": 0.0,
        "missing_s": 0.0,
    }


def iteration(index: int) -> dict[str, Any]:
    is_tuned = index >= 5
    return {
        "job_id": "old-1",
        "iteration_index": index,
        "started_at": epoch_us(BEGIN + timedelta(seconds=index)),
        "iteration_time_s": 1.0,
        "energy_j": 80.0 if is_tuned else 100.0,
        "plan_id": "tuned-1" if is_tuned else BASELINE_PLAN_ID,
        "plan_purpose": str(PlanPurpose.TUNED if is_tuned else PlanPurpose.BASELINE),
        "is_regular": True,
    }


def write_as(connection: Connection, revision: str) -> None:
    """Make the tables of a revision and write two hours of a job, as far as that version had columns for it."""
    migrate(connection, revision)
    held = MetaData()
    held.reflect(connection)

    def write(table: str, *rows: dict[str, Any]) -> None:
        columns = held.tables[table].columns
        connection.execute(insert(held.tables[table]), [{k: v for k, v in row.items() if k in columns} for row in rows])

    write("jobs", JOB)
    write("iterations", *(iteration(index) for index in range(10)))
    write("gpu_rollups", *(rollup(60, BEGIN + timedelta(minutes=minute), 60.0) for minute in range(120)))
    if revision == "0002":  # it began to keep hours half way through this one
        write("gpu_rollups", rollup(3600, BEGIN + timedelta(hours=1), 1800.0))
    if revision >= "0003":
        write("gpu_rollups", *(rollup(3600, BEGIN + timedelta(hours=hour), 3600.0) for hour in range(2)))


def test_revisions_are_numbered_consecutively() -> None:
    assert [f"{number:04d}" for number in range(1, len(REVISIONS) + 1)] == REVISIONS
    assert REVISIONS[-1] == SCHEMA_REVISION


def tables_in(connection: Connection) -> dict[str, Any]:
    """Return all that the database knows of its tables, in an order that does not depend on their making."""
    seen = inspect(connection)
    columns = ("name", "type", "nullable", "default", "autoincrement")
    return {
        table: {
            "columns": [tuple(str(column.get(key)) for key in columns) for column in seen.get_columns(table)],
            "key": seen.get_pk_constraint(table)["constrained_columns"],
            "indexes": sorted(str((i["name"], i["column_names"], i["unique"])) for i in seen.get_indexes(table)),
            "options": seen.get_table_options(table) if connection.dialect.name == "sqlite" else {},
        }
        for table in seen.get_table_names()
    }


def test_a_new_history_has_the_same_tables_as_a_migrated_one(place: str, other_place: str) -> None:
    """It is made at once, for what carries out migrations takes long to load; nothing tells it from a migrated one."""
    made = []
    for where, make in ((place, create_tables), (other_place, migrate)):
        engine = writing_engine(where, busy_timeout_s=5)
        with engine.begin() as connection:
            make(connection)
            made.append((tables_in(connection), schema_state(EngineReader(connection))))
            migrate(connection)  # finds nothing to do
        engine.dispose()

    assert made[0] == made[1]
    assert made[0][1] is SchemaState.CURRENT


@pytest.mark.parametrize("revision", EARLIER)
def test_a_history_of_every_earlier_version_is_upgraded_and_keeps_its_data(revision: str, place: str) -> None:
    """Its job, its iterations and its joules are there, its minutes are added up to hours once, and writing goes on."""
    engine = writing_engine(place, busy_timeout_s=5)
    with engine.begin() as connection:
        write_as(connection, revision)
    engine.dispose()

    writer = HistoryWriter(place, WriterOptions(batch_s=0.01))
    writer.start()
    writer.write(job("new-1"))
    assert writer.flush(30.0)
    writer.close()

    assert writer.status().reason is None
    with open_history(place) as history:
        old, new = sorted(history.job_summaries(), key=lambda summary: summary.job_id, reverse=True)
        hours = history.rollups(bucket_s=3600)
        parts = history.energy_sums()
    assert (old.job_id, new.job_id) == ("old-1", "new-1")
    assert (old.num_baseline_iterations, old.num_tuned_iterations, old.energy_j) == (5, 5, 900.0)
    assert old.saving_ratio == pytest.approx(0.2)
    assert [(hour.started_at, hour.energy_j, hour.num_samples) for hour in hours] == [
        (BEGIN + timedelta(hours=number), 3600.0, 36_000) for number in range(2)
    ]
    assert [hour.mean_power_w for hour in hours] == pytest.approx([1.0, 1.0])
    assert sum(part.energy_j or 0.0 for part in parts) == pytest.approx(7200.0)
    with reading_engine(place).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
