"""The writer survives kills, full disks, locks and overload: it loses no accepted record and never raises."""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpuenergyd.core.measurement.telemetry import ObservedSpan
from gpuenergyd.core.pipeline.graph import InstructionKind
from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history
from gpuenergyd.store.records import ControlEventRecord, IterationRecord, JobRecord, RollupRecord
from tests.support.small_disk import fill, remount, small_disk
from tests.support.waiting import wait_until

START = datetime(2026, 3, 1, tzinfo=UTC)
SPANS = (ObservedSpan(0, InstructionKind.F, 0, 0, 0.0, 0.5, 1000.0),)


def event(index: int) -> ControlEventRecord:
    return ControlEventRecord(START + timedelta(seconds=index), "lease", "test", None, None, str(index))


def rollup(index: int) -> RollupRecord:
    return RollupRecord(1, "GPU-a", START + timedelta(seconds=index), "", 1.0, 1.0, 1.0, 1.0, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite3"


def reasons(path: Path) -> list[str]:
    with open_history(path) as history:
        return [event.reason for event in history.control_events()]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "8m") as disk:
        yield disk


@pytest.mark.fault(18)
def test_a_full_disk_degrades_and_writing_continues_once_there_is_space(disk: Path) -> None:
    path = disk / "history.sqlite3"
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0, retry_s=0.05))
    writer.start()
    writer.write(event(0))
    assert writer.flush(10)
    ballast = fill(disk)

    for index in range(1, 3000):
        writer.write(event(index))
    assert not writer.flush(0.5)
    trouble = writer.status().reason
    ballast.unlink()
    recovered = writer.flush(20)
    writer.close()

    assert trouble is not None
    assert "disk" in trouble
    assert recovered
    assert writer.status().reason is None
    assert reasons(path) == [str(i) for i in range(3000)]


@pytest.mark.fault(18)
def test_on_a_full_disk_the_reserve_is_used_for_important_records_and_readings_are_dropped(disk: Path) -> None:
    path = disk / "history.sqlite3"
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0, retry_s=0.05, reserve_bytes=2**20))
    writer.start()
    writer.write(event(0))
    assert writer.flush(10)
    reserved_bytes = Path(f"{path}.reserve").stat().st_size
    ballast = fill(disk)

    for index in range(1, 1000):
        writer.write(event(index))
    assert writer.flush(20)
    full = writer.status()
    writer.write(rollup(0))
    shed = writer.status()
    ballast.unlink()
    wait_until(lambda: writer.status().reason is None)
    writer.write(rollup(1))
    writer.close()

    assert reserved_bytes == 2**20
    assert full.reason is not None
    assert "disk full" in full.reason
    assert shed.num_rows_dropped == full.num_rows_dropped + 1
    assert Path(f"{path}.reserve").stat().st_size == 2**20
    assert reasons(path) == [str(i) for i in range(1000)]
    with open_history(path) as history:
        assert len(history.rollups(bucket_s=1)) == 1


@pytest.mark.fault(18)
def test_a_read_only_disk_is_reported_until_a_write_succeeds(disk: Path) -> None:
    """With a write-ahead log beside it, as a reader leaves it, the database can be opened but not written."""
    path = disk / "history.sqlite3"
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0, retry_s=0.05))
    writer.start()
    writer.write(event(0))
    assert writer.flush(10)
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
        reader.execute("SELECT count(*) FROM sqlite_master").fetchone()
        writer.write(event(1))
        assert writer.flush(10)
    remount(disk, "ro")
    try:
        writer.write(event(2))
        wait_until(lambda: writer.status().reason is not None)
        troubles = set()
        for _ in range(60):
            troubles.add(writer.status().reason)
            time.sleep(0.005)
    finally:
        remount(disk, "rw")
    recovered = writer.flush(20)
    reason = writer.status().reason
    writer.close()

    assert troubles == {"attempt to write a readonly database"}
    assert recovered
    assert reason is None
    assert reasons(path) == ["0", "1", "2"]


@pytest.mark.fault(21)
def test_a_write_ahead_log_that_grows_under_a_long_reader_is_reported_and_truncated_afterwards(path: Path) -> None:
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0, retry_s=0.01, max_wal_bytes=2**20))
    writer.start()
    writer.write(event(0))
    assert writer.flush(10)
    reader = sqlite3.connect(path, isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM control_events").fetchone()
    num_events = 1

    while writer.status().reason is None:
        for _ in range(500):
            writer.write(event(num_events))
            num_events += 1
        assert writer.flush(20)
    reported = writer.status().reason
    reader.execute("ROLLBACK")
    reader.close()
    writer.write(event(num_events))
    wait_until(lambda: writer.status().reason is None)
    writer.close()

    assert reported is not None
    assert "write-ahead log exceeds 1 MiB" in reported
    assert not Path(f"{path}-wal").exists()
    assert len(reasons(path)) == num_events + 1


@pytest.mark.fault(20)
def test_corruption_after_an_unclean_stop_is_found_at_start_and_reported_until_the_next_start(path: Path) -> None:
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0))
    writer.start()
    for index in range(2000):
        writer.write(event(index))
    assert writer.flush(20)
    writer.close()
    reader = sqlite3.connect(path)  # what a killed writer leaves: a database with its write-ahead log
    reader.execute("CREATE TABLE t (i)")
    Path(f"{path}-wal").write_bytes(Path(f"{path}-wal").read_bytes())
    with path.open("r+b") as file:
        file.seek(16 * 4096)
        file.write(b"\xa5" * 20 * 4096)

    writer = HistoryWriter(path, WriterOptions(batch_s=0.0, retry_s=0.01))
    writer.start()
    writer.write(event(0))
    assert writer.flush(10)
    reported = writer.status().reason
    writer.close()
    reader.close()

    (kept,) = [p for p in path.parent.glob("history.sqlite3.corrupt-*") if not p.name.endswith(("-wal", "-shm"))]
    assert reported is not None
    assert f"sqlite3 {kept} .recover" in reported
    assert reasons(path) == ["0"]


@pytest.mark.fault(19)
def test_records_wait_for_a_locked_database_and_none_is_lost(path: Path) -> None:
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0, retry_s=0.05, busy_timeout_s=0.05))
    writer.start()
    writer.write(event(0))
    assert writer.flush(10)
    backup = sqlite3.connect(path, isolation_level=None)
    backup.execute("BEGIN EXCLUSIVE")

    writer.write(event(1))
    assert not writer.flush(0.5)
    trouble = writer.status().reason
    backup.execute("ROLLBACK")
    backup.close()
    assert writer.flush(10)
    writer.close()

    assert trouble is not None
    assert "locked" in trouble
    assert reasons(path) == ["0", "1"]


@pytest.mark.fault(20)
def test_a_corrupt_database_is_moved_aside_and_replaced(path: Path) -> None:
    path.write_bytes(b"this was a database once, and now it is not any more" * 100)

    writer = HistoryWriter(path, WriterOptions(batch_s=0.0, retry_s=0.01))
    writer.start()
    writer.write(event(0))
    assert writer.flush(10)
    writer.close()

    assert reasons(path) == ["0"]
    (kept,) = path.parent.glob("history.sqlite3.corrupt-*")
    assert kept.read_bytes().startswith(b"this was a database once")


@pytest.mark.fault(19)
def test_a_full_queue_drops_samples_first_and_counts_them(path: Path) -> None:
    writer = HistoryWriter(path, WriterOptions(max_waiting=10))
    for index in range(5):
        writer.write(rollup(index))
    writer.write(rollup(5))
    iteration = IterationRecord("j", 1, START, 1.0, 1.0, None, PlanPurpose.TUNED, is_regular=True, spans=SPANS)
    writer.write(iteration)
    for index in range(9):
        writer.write(event(index))
    dropped_while_full = writer.status().num_rows_dropped

    writer.start()
    assert writer.flush(10)
    writer.close()

    assert dropped_while_full == 1 + 1 + 5
    with open_history(path) as history:
        assert len(history.rollups(bucket_s=1)) == 5
        assert len(history.iterations("j")) == 1
        assert history.iterations_with_spans("j") == ()
    assert reasons(path) == ["0", "1", "2", "3"]


def test_a_record_that_the_database_rejects_does_not_block_the_others(path: Path) -> None:
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0))
    writer.write(event(0))
    writer.write(JobRecord("j", "n", "r", 2**70, "p", "s", "f", False, 1, 1, 0.0, 0, START))
    writer.write(event(1))

    writer.start()
    assert writer.flush(10)
    writer.close()

    assert reasons(path) == ["0", "1"]
    assert writer.status().num_rows_dropped == 1


def test_a_folder_that_cannot_be_created_degrades_and_the_writer_still_closes(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    writer = HistoryWriter(blocker / "history.sqlite3", WriterOptions(retry_s=0.01))

    writer.start()
    writer.write(event(0))
    flushed = writer.flush(0.2)
    writer.close()

    assert not flushed
    assert writer.status().reason is not None
    assert writer.status().num_rows_dropped == 1
    assert "history-writer" not in {thread.name for thread in threading.enumerate()}


def test_a_reader_sees_records_while_the_writer_runs(path: Path) -> None:
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0))
    writer.start()
    writer.write(event(0))
    assert writer.flush(10)

    with open_history(path) as history:
        first = len(history.control_events())
        writer.write(event(1))
        assert writer.flush(10)
        second = len(history.control_events())
    writer.close()

    assert (first, second) == (1, 2)


def test_an_unexpected_error_in_the_writer_is_reported_and_blocks_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> int:
        raise RuntimeError("never thought of")

    monkeypatch.setattr("gpuenergyd.store.writing.writer.insert_records", fail)
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0))
    writer.start()
    writer.write(event(0))
    writer.flush(10)
    writer.write(event(1))
    writer.close()

    assert writer.status().reason == "the writer failed: never thought of"
    assert writer.status().num_rows_dropped == 2


def test_a_control_event_does_not_wait_for_a_batch_of_samples(path: Path) -> None:
    writer = HistoryWriter(path, WriterOptions(batch_s=3600.0))
    writer.start()
    writer.write(rollup(0))
    writer.write(event(0))

    wait_until(lambda: writer.status().num_rows_written == 2)
    writer.write(rollup(1))
    still_waiting = writer.status().num_records_waiting
    writer.close()

    assert still_waiting == 1
    assert reasons(path) == ["0"]
