"""Blocks of iterations give the same sums as single iterations, and close medians."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, func, select, update

from gpuenergyd.core.measurement.robust import weighted_median
from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store import HistoryWriter, JobSummary, WriterOptions, open_history, schema
from gpuenergyd.store.database import writing_engine
from gpuenergyd.store.maintenance.compaction import KEPT_LATER, KEPT_WHILE_RECENT, compact_iterations
from gpuenergyd.store.maintenance.stored_summaries import store_summaries
from gpuenergyd.store.records import IterationRecord, JobEndRecord, JobRecord, JobResumedRecord
from gpuenergyd.store.schema import iteration_blocks, iterations
from gpuenergyd.store.writing.rows import insert_records
from tests.support.sample_history import START, write_sample_history

NOW = datetime(2026, 6, 1, tzinfo=UTC)
SPANS = (ObservedSpan(0, InstructionKind.F, 0, 0, 0.0, 0.5, 1000.0),)
LATER = START + timedelta(hours=1)


def write_long_job(path: str, num_iterations: int, *, ended_at: datetime | None) -> None:
    begun = NOW - timedelta(days=10)
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0))
    writer.start()
    writer.write(JobRecord("j", "long", "1", 0, "p", "1f1b", "", True, 1, 1, 0.0, 0, begun))
    for k in range(num_iterations):
        is_baseline = k < 10 or k % 500 < 4
        purpose = PlanPurpose.BASELINE if is_baseline else PlanPurpose.TUNED
        writer.write(
            IterationRecord(
                "j",
                k,
                begun + timedelta(seconds=k),
                1.0 + 0.001 * (k % 7),
                None if k % 11 == 0 else (100.0 if is_baseline else 85.0) + 0.01 * (k % 13),
                f"{purpose}-1",
                purpose,
                is_regular=k % 97 != 0,
                energy_low_j=80.0 if k % 3 == 0 else None,
                spans=SPANS if k % 1000 == 5 else (),
            )
        )
    if ended_at is not None:
        writer.write(JobEndRecord("j", ended_at, "released"))
    assert writer.flush(60)
    writer.close()


def summary_of(path: str) -> JobSummary:
    with open_history(path) as history:
        (summary,) = history.job_summaries()
    return summary


def compact(path: str) -> tuple[int, int]:
    """Return how many single iterations and how many blocks are left."""
    engine = writing_engine(path, busy_timeout_s=1)
    with engine.begin() as connection:
        while compact_iterations(connection, NOW):
            pass
        counts = tuple(
            connection.execute(select(func.count()).select_from(t)).scalar_one() for t in (iterations, iteration_blocks)
        )
    engine.dispose()
    return counts[0], counts[1]


@pytest.mark.parametrize(
    ("ended_at", "kept"), [(None, KEPT_WHILE_RECENT), (NOW - timedelta(days=3), KEPT_LATER)], ids=["running", "ended"]
)
def test_compaction_keeps_the_summary_of_a_long_job_in_few_rows(
    place: str, ended_at: datetime | None, kept: int
) -> None:
    write_long_job(place, 6000, ended_at=ended_at)
    before = summary_of(place)

    num_single, num_blocks = compact(place)

    after = summary_of(place)
    with open_history(place) as history:
        timelines = history.iterations_with_spans("j")
        singles = {row.iteration_index for row in history.iterations("j")}
    assert num_single <= 2 * kept + len(timelines)
    assert num_blocks < 400
    assert set(timelines) <= singles
    for name in (
        "num_iterations",
        "num_measured_iterations",
        "num_estimated_iterations",
        "num_tuned_iterations",
        "num_baseline_iterations",
    ):
        assert getattr(after, name) == getattr(before, name)
    assert after.energy_j == pytest.approx(before.energy_j, rel=1e-12)
    assert after.duration_s == pytest.approx(before.duration_s, abs=0.02)
    assert after.iteration_time_s == pytest.approx(before.iteration_time_s, rel=1e-3)
    assert after.saving_ratio == pytest.approx(before.saving_ratio, abs=1e-4)
    assert before.saving_interval is not None
    assert after.saving_interval == pytest.approx(before.saving_interval, abs=1e-3)


def test_compacting_again_changes_nothing(place: str) -> None:
    write_long_job(place, 3000, ended_at=NOW - timedelta(days=3))

    assert compact(place) == compact(place)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 6)), min_size=1, max_size=30))
def test_a_weighted_median_is_the_median_of_the_repeated_values(values: list[tuple[float, int]]) -> None:
    spread = [value for value, weight in values for _ in range(weight)]

    assert weighted_median(values) == pytest.approx(median(spread))


def test_the_median_of_no_values_is_none() -> None:
    assert weighted_median([]) is None


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
