"""Readers convert values by column name, and summaries can cover a part of a job."""

from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.plan import BASELINE_PLAN_ID, PlanPurpose
from gpuenergyd.store import HistoryWriter, open_history
from gpuenergyd.store.reader import INSTANTS, epoch_us, instant_from_us
from gpuenergyd.store.records import IterationRecord
from gpuenergyd.store.schema import UtcInstant, metadata
from tests.store.test_history import START, job


def test_readers_convert_exactly_the_instant_columns_of_the_schema() -> None:
    columns = [column for table in metadata.tables.values() for column in table.columns]

    assert {column.name for column in columns if isinstance(column.type, UtcInstant)} == INSTANTS
    assert all(isinstance(column.type, UtcInstant) for column in columns if column.name in INSTANTS)


def test_an_instant_is_stored_to_the_microsecond() -> None:
    at = datetime(2038, 1, 19, 3, 14, 8, 999_999, tzinfo=UTC)

    assert instant_from_us(epoch_us(at)) == at
    assert instant_from_us(None) is None


def test_a_summary_of_a_time_range_compares_the_iterations_in_it(writer: HistoryWriter, place: str) -> None:
    """A plan that saves 10 % first and 20 % later, with blocks at full speed in both halves."""
    writer.write(job())
    for k in range(120):
        is_tuned = k >= 10 and k % 20 < 16
        writer.write(
            IterationRecord(
                "j1",
                k,
                START + timedelta(seconds=k),
                1.0,
                (90.0 if k < 60 else 80.0) if is_tuned else 100.0,
                "tuned-1" if is_tuned else BASELINE_PLAN_ID,
                PlanPurpose.TUNED if is_tuned else PlanPurpose.BASELINE,
                is_regular=True,
            )
        )
    assert writer.flush(20.0)
    middle = START + timedelta(seconds=60)

    with open_history(place) as history:
        (whole,) = history.job_summaries()
        (early,) = history.job_summaries(until=middle, within_range_only=True)
        (late,) = history.job_summaries(since=middle, within_range_only=True)
        (too_late,) = history.job_summaries(since=START + timedelta(seconds=100), within_range_only=True)
        (all_of_it,) = history.job_summaries(since=START, within_range_only=True)

    assert (whole.num_iterations, early.num_iterations, late.num_iterations) == (120, 60, 60)
    assert (early.num_tuned_iterations, late.num_tuned_iterations, too_late.num_tuned_iterations) == (38, 48, 16)
    assert [own.num_baseline_iterations for own in (whole, early, late)] == [34, 34, 34]
    assert late.saving_ratio == pytest.approx(0.2)
    assert too_late.saving_ratio is None
    assert (early.duration_s, late.duration_s) == (60.0, 60.0)
    assert all_of_it == whole


def test_a_history_in_a_read_only_folder_can_be_read(tmp_path: Path) -> None:
    """SQLite can make none of its own files there; without any, nobody writes, and the file is read as it lies."""
    path = tmp_path / "history.sqlite3"
    writer = HistoryWriter(path)
    writer.start()
    writer.write(job())
    writer.close()

    with open_history(path, has_no_writer=True) as history:
        (summary,) = history.job_summaries()

    assert summary.job_id == "j1"
    assert {field.name for field in fields(summary)} >= {"job_id", "saving_ratio"}
    assert [each.name for each in tmp_path.iterdir()] == ["history.sqlite3"]
