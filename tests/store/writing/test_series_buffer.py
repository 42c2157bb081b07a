"""Minutes on their way to the database are held while they fill, and not a moment longer than they may change."""

from datetime import UTC, datetime, timedelta

from gpuenergyd.store.records import SampleRecord
from gpuenergyd.store.writing.series_buffer import SeriesBuffer

BEGIN = datetime(2026, 1, 1, tzinfo=UTC)


def held_after_hour(write_every_s: int) -> int:
    """Return how many minutes are held after an hour of samples, when all that changed is written so often."""
    buffer = SeriesBuffer()
    for second in range(3600):
        buffer.take(SampleRecord("GPU-a", BEGIN + timedelta(seconds=second), 300.0, 300.0 * second, 1410, 50.0))
        if second % write_every_s == 0:
            buffer.written(buffer.due(second, is_all=False), second)
    return buffer.num_minutes


def test_a_minute_whose_last_points_were_written_before_it_was_over_is_forgotten_too() -> None:
    assert held_after_hour(write_every_s=10) <= 3


def test_minutes_written_as_they_come_are_forgotten() -> None:
    assert held_after_hour(write_every_s=1) <= 3
