"""A writer killed with SIGKILL leaves an intact database with all acknowledged records."""

import os
import random
import shutil
import signal
import sqlite3
import struct
import tempfile
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpuenergyd.core.pipeline.plan import PlanPurpose
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history
from gpuenergyd.store.records import IterationRecord, JobRecord, RollupRecord, SampleRecord
from tests.support.thorough import thorough

START = datetime(2026, 3, 1, tzinfo=UTC)
BATCH = 40
_NEEDED_BYTES = 256 * 2**20


def _write_until_killed(path: Path, acknowledgements: int, first_index: int) -> None:
    """Write batches without end; tell the parent the last index of each batch that is in the database."""
    writer = HistoryWriter(path, WriterOptions(batch_s=0.0))
    writer.start()
    index = first_index
    while True:
        for _ in range(BATCH):
            at = START + timedelta(seconds=index)
            writer.write(
                IterationRecord("j", index, at, 1.0, 100.0 + index, "b", PlanPurpose.BASELINE, is_regular=True)
            )
            writer.write(SampleRecord("GPU-a", at, 100.0, 1.0 * index, 1410, 50.0))
            writer.write(RollupRecord(1, "GPU-a", at, "j", 1.0, 1.0, 1.0, 1.0, 1))
            index += 1
        if writer.flush(30):
            os.write(acknowledgements, struct.pack("<q", index - 1))


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[Path]:
    """A folder that no disk holds up: SIGKILL leaves the same behind there, and the disk has no part in it."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < _NEEDED_BYTES:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="gpuenergyd-kills-", dir=memory) as folder:
        yield Path(folder)


@pytest.mark.kill
@pytest.mark.parametrize("num_kills", [25, *thorough(150)])
def test_no_acknowledged_batch_is_lost_and_the_database_stays_intact(in_memory: Path, num_kills: int) -> None:
    path = in_memory / "history.sqlite3"
    with_job = HistoryWriter(path, WriterOptions(batch_s=0.0))
    with_job.start()
    with_job.write(JobRecord("j", "killed", "1", 0, "p", "1f1b", "", True, 1, 1, 0.0, 0, START))
    assert with_job.flush(30)
    with_job.close()
    noise = random.Random(11)
    next_index = 0
    acknowledged: set[int] = set()

    for _ in range(num_kills):
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the child starts its own thread and no other
            pid = os.fork()
        if pid == 0:
            os.close(reading)
            try:
                _write_until_killed(path, writing, next_index)
            finally:
                os._exit(1)
        os.close(writing)
        # Killed after a number of batches, at a moment within the next one.
        for _ in range(noise.choice((0, 0, 1, 2))):
            acknowledged |= _batch(os.read(reading, 8))
        for _ in range(noise.randrange(20_000)):
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        while output := os.read(reading, 8):
            acknowledged |= _batch(output)
        os.close(reading)
        next_index += 20 * BATCH

    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()
    assert len(acknowledged) > BATCH * num_kills / 2
    with open_history(path) as history:
        iterations = {row.iteration_index for row in history.iterations("j")}
        seconds = {round((r.started_at - START).total_seconds()) for r in history.rollups(bucket_s=1)}
        sampled = {round((s.at - START).total_seconds()) for s in history.samples("GPU-a")}
    assert acknowledged <= iterations
    assert acknowledged <= seconds
    assert acknowledged <= sampled


def _batch(output: bytes) -> set[int]:
    """Return the indices that one acknowledgement is about."""
    (last,) = struct.unpack("<q", output)
    return set(range(last - BATCH + 1, last + 1))
