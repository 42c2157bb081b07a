"""The writer upgrades a history of version 0.1.0 without losing data, and refuses earlier ones."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, MetaData, insert, inspect

from gpuenergyd.core.carbon.intensity import IntensityBasis
from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.errors import StoreError
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history
from gpuenergyd.store.database import create_tables, migrate, reader_of, reading_engine, writing_engine
from gpuenergyd.store.encoding.compressed_json import encode_clocks
from gpuenergyd.store.reader import APPLICATION_ID, SchemaState, epoch_us, schema_state
from gpuenergyd.store.schema import metadata
from tests.store.test_history import job

BEGIN = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
SCHEMA_OF_0_1_0 = Path(__file__).with_name("schema_0_1_0.sql").read_text(encoding="utf-8")
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


TARGET: dict[str, Any] = {
    "job_id": "old-1",
    "decided_at": epoch_us(BEGIN),
    "policy": "green-hours",
    "permitted_time_s": 1.1,
    "reason": "test",
    "rung": "forecast",
    "intensity": 200.0,
    "unit": "gCO2e/kWh",
    "budget_ratio": 0.1,
    "host_power_w": 0.0,
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
    is_tuned = index >= 6 and index % 10 < 8
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


def create_tables_of_0_1_0(connection: Connection) -> None:
    """Create the tables of version 0.1.0 in an empty database."""
    statements = SCHEMA_OF_0_1_0
    if connection.dialect.name == "postgresql":
        statements = statements.replace(" WITHOUT ROWID", "").replace("BLOB", "BYTEA")
        statements = statements.replace("event_id INTEGER", "event_id SERIAL")
    else:
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
    for statement in statements.split(";\n"):
        if statement:
            connection.exec_driver_sql(statement)


def write_history_of_0_1_0(connection: Connection) -> None:
    """Create a history of version 0.1.0: two hours of one job with a target and two plans, one of them predicted."""
    create_tables_of_0_1_0(connection)
    held = MetaData()
    held.reflect(connection)

    def write(table: str, *rows: dict[str, Any]) -> None:
        connection.execute(insert(held.tables[table]), list(rows))

    write("jobs", JOB)
    write("iterations", *(iteration(index) for index in range(60)))
    write("gpu_rollups", *(rollup(60, BEGIN + timedelta(minutes=minute), 60.0) for minute in range(120)))
    write("gpu_rollups", *(rollup(3600, BEGIN + timedelta(hours=hour), 3600.0) for hour in range(2)))
    write("job_figures", {"job_id": "old-1", "version": 1, "figures": '{"would_save_ratio": null}'})
    write("plans", *(plan(epoch, purpose) for epoch, purpose in enumerate(("would_be", "tuned"))))
    write("targets", TARGET)


def plan(epoch: int, purpose: str) -> dict[str, Any]:
    return {
        "job_id": "old-1",
        "plan_epoch": epoch,
        "plan_id": f"plan-{epoch}",
        "purpose": purpose,
        "reason": "test",
        "issued_at": epoch_us(BEGIN),
        "apply_at_iteration": 5,
        "clocks": encode_clocks(()),
    }


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


def test_a_database_with_nothing_but_a_view_is_empty(place: str) -> None:
    """Such as `pg_stat_statements`, which hosted servers often have in the schema `public`."""
    engine = writing_engine(place, busy_timeout_s=5)
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE VIEW statements AS SELECT 1 AS calls")
        state = schema_state(reader_of(connection))
    engine.dispose()

    assert state is SchemaState.EMPTY


def test_a_new_history_has_the_same_tables_as_an_upgraded_one(place: str, other_place: str) -> None:
    made = []
    for where, is_upgraded in ((place, False), (other_place, True)):
        engine = writing_engine(where, busy_timeout_s=5)
        with engine.begin() as connection:
            if is_upgraded:
                create_tables_of_0_1_0(connection)
                assert schema_state(reader_of(connection)) is SchemaState.OLDER
                migrate(connection)
            else:
                create_tables(connection)
            made.append((tables_in(connection), schema_state(reader_of(connection))))
            migrate(connection)  # finds nothing to do
        engine.dispose()

    assert made[0] == made[1]
    assert made[0][1] is SchemaState.CURRENT


def test_a_history_of_0_1_0_is_upgraded_and_keeps_its_data(place: str) -> None:
    """Its job, iterations, energy, plans and targets remain, its summary is computed again, and writing goes on."""
    engine = writing_engine(place, busy_timeout_s=5)
    with engine.begin() as connection:
        write_history_of_0_1_0(connection)
    engine.dispose()
    with pytest.raises(StoreError, match="start the daemon once to upgrade it"):
        open_history(place)

    writer = HistoryWriter(place, WriterOptions(batch_s=0.01))
    writer.start()
    writer.write(job("new-1"))
    assert writer.flush(30.0)
    writer.close()

    assert writer.status().reason is None
    with open_history(place) as history:
        old, new = sorted(history.job_summaries(), key=lambda summary: summary.job_id, reverse=True)
        hours = history.rollups(bucket_s=3600)
        sums = history.energy_sums()
        plans = history.plans("old-1")
        (target,) = history.targets("old-1")
    assert (old.job_id, new.job_id) == ("old-1", "new-1")
    assert (old.num_baseline_iterations, old.num_tuned_iterations, old.energy_j) == (18, 42, 18 * 100.0 + 42 * 80.0)
    assert old.saving_ratio == pytest.approx(0.2)
    assert [(hour.started_at, hour.energy_j, hour.num_samples) for hour in hours] == [
        (BEGIN + timedelta(hours=number), 3600.0, 36_000) for number in range(2)
    ]
    assert sum(part.energy_j or 0.0 for part in sums) == pytest.approx(7200.0)
    assert [record.plan.purpose for record in plans] == [PlanPurpose.PREDICTED, PlanPurpose.TUNED]
    assert target.basis is IntensityBasis.FORECAST
    with reading_engine(place).connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_a_history_of_a_version_before_0_1_0_is_refused_with_one_clear_error(place: str) -> None:
    engine = writing_engine(place, busy_timeout_s=5)
    with engine.begin() as connection:
        create_tables_of_0_1_0(connection)
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0005'")
    engine.dispose()

    with pytest.raises(StoreError, match=r"before 0\.1\.0; only that version can read it"):
        open_history(place)
    writer = HistoryWriter(place, WriterOptions(batch_s=0.01))
    writer.start()
    writer.write(job("new-1"))
    writer.close()

    assert "before 0.1.0 and cannot be upgraded" in str(writer.status().reason)
    with writing_engine(place, busy_timeout_s=5).connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar() == 0


def test_savings_of_a_regression_are_deleted_and_computed_from_brackets(place: str) -> None:
    engine = writing_engine(place, busy_timeout_s=5)
    with engine.begin() as connection:
        write_history_of_0_1_0(connection)
        migrate(connection, "0013")
        held = MetaData()
        held.reflect(connection)
        wrong = {"job_id": "old-1", "since_iteration": 0, "baseline_time_s": 1.0, "saving_ratio": 0.5}
        connection.execute(insert(held.tables["estimates"]), wrong)
        migrate(connection)
    engine.dispose()

    with open_history(place) as history:
        (summary,) = history.job_summaries()
    assert summary.saving_ratio == pytest.approx(0.2)
