"""The series buffer holds a minute only as long as it may still change."""

from datetime import UTC, datetime, timedelta

from gpuenergyd.store.records import SampleRecord
from gpuenergyd.store.writing.series_buffer import SeriesBuffer

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def minutes_held_after_an_hour(write_every_s: int) -> int:
    """Return how many minutes the buffer holds after an hour of samples with regular writes."""
    buffer = SeriesBuffer()
    for second in range(3600):
        buffer.add(SampleRecord("GPU-a", BEGIN + timedelta(seconds=second), 300.0, 300.0 * second, 1410, 50.0))
        if second % write_every_s == 0:
            buffer.mark_written(buffer.due(second, is_all=False), second)
    return len(buffer._minutes)


def test_a_minute_written_before_it_was_complete_is_dropped_once_complete() -> None:
    assert minutes_held_after_an_hour(write_every_s=10) <= 3


def test_complete_minutes_are_dropped_after_writing() -> None:
    assert minutes_held_after_an_hour(write_every_s=1) <= 3
