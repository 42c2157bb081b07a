"""Stored summaries equal computed ones and are deleted when their job changes."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Connection, func, select, update

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store import open_history, schema
from gpuenergyd.store.database import writing_engine
from gpuenergyd.store.maintenance.stored_summaries import store_summaries
from gpuenergyd.store.reading.summaries import JobSummary
from gpuenergyd.store.records import IterationRecord, JobResumedRecord
from gpuenergyd.store.writing.rows import insert_records
from tests.support.sample_history import START, write_sample_history

LATER = START + timedelta(hours=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_sample_history(tmp_path / "history.sqlite3")


def summary(path: Path) -> JobSummary:
    with open_history(path) as history:
        (found,) = history.job_summaries()
    return found


def num_kept(connection: Connection) -> int:
    return connection.execute(select(func.count()).select_from(schema.job_summaries)).scalar() or 0


def test_a_stored_summary_equals_the_computed_one_and_is_read_instead(path: Path) -> None:
    anew = summary(path)
    engine = writing_engine(path, busy_timeout_s=5)
    with engine.begin() as connection:
        assert store_summaries(connection, LATER) is False
        assert num_kept(connection) == 1
    kept = summary(path)
    with engine.begin() as connection:
        connection.execute(schema.iterations.delete())
    engine.dispose()

    assert kept == anew
    assert summary(path) == anew


def test_a_summary_is_stored_after_the_job_has_ended_and_its_last_records_arrived(path: Path) -> None:
    engine = writing_engine(path, busy_timeout_s=5)
    with engine.begin() as connection:
        store_summaries(connection, START + timedelta(seconds=20))
        assert num_kept(connection) == 0
        connection.execute(update(schema.jobs).values(ended_at=None))
        store_summaries(connection, LATER)
        assert num_kept(connection) == 0
    engine.dispose()


@pytest.mark.parametrize(
    "record",
    [
        JobResumedRecord("gpt-1"),
        IterationRecord("gpt-1", 28, LATER, 0.5, 90.0, "tuned-1", PlanPurpose.TUNED, is_regular=True),
    ],
    ids=lambda record: type(record).__name__,
)
def test_new_records_of_a_job_delete_its_stored_summary(path: Path, record: JobResumedRecord | IterationRecord) -> None:
    engine = writing_engine(path, busy_timeout_s=5)
    with engine.begin() as connection:
        store_summaries(connection, LATER)
        insert_records(connection, [record])
        assert num_kept(connection) == 0
    engine.dispose()


@pytest.mark.parametrize("change", [{"version": 0}, {"summary": '{"num_iterations":1}'}], ids=["version", "names"])
def test_a_stored_summary_of_another_version_is_computed_again(path: Path, change: dict[str, object]) -> None:
    anew = summary(path)
    engine = writing_engine(path, busy_timeout_s=5)
    with engine.begin() as connection:
        store_summaries(connection, datetime.now(tz=UTC))
        connection.execute(update(schema.job_summaries).values(**change))
    engine.dispose()

    assert summary(path) == anew
