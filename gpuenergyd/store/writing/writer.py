"""The writer thread, which writes batches of records, retries after errors and deletes expired rows.

Its problems are counted and shown in the status, and never affect GPU control. Records wait in a bounded queue, and
each batch is one transaction. When the disk is full, a reserve file is deleted to make room for jobs, plans and events.
"""

import logging
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError, InterfaceError, OperationalError, SQLAlchemyError

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import StoreError
from gpuenergyd.store.database import is_sqlite, sqlite_path
from gpuenergyd.store.maintenance.advisory_locks import try_lock_cleanup
from gpuenergyd.store.maintenance.retention import Retention, delete_expired, release_free_pages
from gpuenergyd.store.maintenance.space import DiskMonitor
from gpuenergyd.store.reader import short_message
from gpuenergyd.store.records import Record, RollupRecord
from gpuenergyd.store.writing.connection import WriterConnection, is_corruption
from gpuenergyd.store.writing.record_queue import RecordQueue
from gpuenergyd.store.writing.rows import insert_records, record_gpu_hosts, replace_series
from gpuenergyd.store.writing.series_buffer import SeriesBuffer, is_packed

log = logging.getLogger(__name__)

_FIRST_CLEANUP_S = 60.0
_FILE_CLEANUP_S = 3600.0
_SERVER_CLEANUP_S = 600.0
"""Short, because reports of a fleet are fast if each host soon merges its iterations."""
_FILE_BATCH_S = 1.0
_FILE_SERIES_S = 10.0
"""Interval at which incomplete minutes are written to a file."""
_SERVER_SERIES_S = 300.0
"""A server gets only complete minutes, because PostgreSQL copies a row on each update and a fleet shares the server."""


@dataclass(frozen=True, slots=True)
class WriterOptions:
    """Options of the writer; the default for None may depend on whether the history is a file or on a server."""

    host: str | None = None
    """Name of this host among those that share the history; default: the system's host name."""
    batch_s: float | None = None
    """How long readings wait for a batch; default: 1 s for a file, `server_batch_s` for a server."""
    server_batch_s: float = 10.0
    retry_s: float = 2.0
    busy_timeout_s: float = 1.0
    max_waiting: int = 50_000
    """Capacity of the queue, in records."""
    cleanup_period_s: float | None = None
    reserve_bytes: int = 0
    max_wal_bytes: int = 256 * 2**20
    """Size of the write-ahead log above which a problem is reported."""
    retention: Retention = field(default_factory=Retention)


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """Status of the writer; `reason` describes its problems, None without any."""

    path: str
    num_rows_written: int
    num_rows_dropped: int
    num_records_waiting: int
    reason: str | None


class HistoryWriter:
    """Writes the history in its own thread; `write` never blocks and never raises."""

    def __init__(self, path_or_url: str | Path, options: WriterOptions | None = None) -> None:
        options = options or WriterOptions()
        self._options = options
        self._database = WriterConnection(path_or_url, options.host or socket.gethostname(), options.busy_timeout_s)
        is_file = is_sqlite(path_or_url)
        batch_s = options.batch_s
        if batch_s is None:
            batch_s = _FILE_BATCH_S if is_file else options.server_batch_s
        self._queue = RecordQueue(max_waiting=options.max_waiting, batch_s=batch_s)
        self._series = SeriesBuffer(write_every_s=_FILE_SERIES_S if is_file else _SERVER_SERIES_S)
        default_period_s = _FILE_CLEANUP_S if is_file else _SERVER_CLEANUP_S
        self._cleanup_period_s = default_period_s if options.cleanup_period_s is None else options.cleanup_period_s
        self._cleanup_at_mono_s = time.monotonic() + min(_FIRST_CLEANUP_S, self._cleanup_period_s)
        self._disk: DiskMonitor | None = None
        self._known_gpus: set[str] = set()
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="history-writer", daemon=True)

    def start(self) -> None:
        """Start the thread, which opens the database."""
        self._thread.start()

    def write(self, record: Record) -> None:
        """Add a record to the next batch."""
        self._queue.push(record, is_short_of_space=self._disk is not None and self._disk.is_short)

    def flush(self, timeout_s: float) -> bool:
        """Write all waiting records now; return whether they are in the database."""
        return self._queue.flush(timeout_s, is_writing=self._thread.is_alive)

    def is_alive(self) -> bool:
        """Return False if the thread has died or is stuck; True if it has nothing left to do."""
        return self._queue.is_finished() or (self._thread.is_alive() and not self._queue.is_stuck())

    def close(self, timeout_s: float = 5.0) -> None:
        """Try once more to write the waiting records, then stop the thread."""
        self._queue.close()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def status(self) -> WriterStatus:
        path_or_url = self._database.path_or_url
        path = sqlite_path(path_or_url)
        problem, corruption = self._database.problems()
        warnings = self._disk.warnings if self._disk is not None else ()
        num_written, num_dropped, num_waiting = self._queue.counts()
        return WriterStatus(
            path=str(path) if path is not None else str(path_or_url).split("://")[0],
            num_rows_written=num_written,
            num_rows_dropped=num_dropped,
            num_records_waiting=num_waiting,
            reason="; ".join(r for r in (self._failure or problem, *warnings, corruption) if r) or None,
        )

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except Exception as error:
            log.exception("history: the writer failed; nothing more is recorded")
            self._failure = f"the writer failed: {short_message(error)}"
            self._queue.fail()
        finally:
            self._database.close()

    def _write_until_closed(self) -> None:
        if not self._open_with_retries():
            return
        while (batch := self._next_batch()) or self._series.has_unwritten:
            try:
                num_rows, num_bad = self._write_batch(batch)
            except (OperationalError, InterfaceError, DatabaseError, OSError, StoreError) as error:
                self._queue.requeue(batch)
                self._database.report(short_message(error))
                if not self._recover(error) or self._queue.pause(self._options.retry_s):
                    return
                continue
            self._queue.complete_batch(
                num_rows=num_rows, num_dropped=num_bad, has_unwritten_series=self._series.has_unwritten
            )
            self._database.report(f"the database rejected {count_text(num_bad, 'record')}" if num_bad else None)
            if self._disk is not None:
                self._disk.check()
            self._clean_up()

    def _next_batch(self) -> list[Record]:
        while True:
            timeout_s = self._options.retry_s if self._disk is not None and self._disk.warnings else None
            if self._queue.wait(timeout_s):
                return self._queue.next_batch()
            if self._disk is not None:
                self._disk.check()

    def _open_with_retries(self) -> bool:
        """Open the database; return False if the writer is closed or refused before it opens."""
        while not self._database.open():
            if self._database.is_refused:
                self._queue.refuse()
            if self._queue.pause(self._options.retry_s):
                return False
        path = self._database.path
        if path is not None and self._disk is None:
            options = self._options
            disk = DiskMonitor(path, options.reserve_bytes, options.max_wal_bytes, options.retry_s)
            disk.reserve.allocate()
            self._disk = disk
        return True

    def _recover(self, error: Exception) -> bool:
        """Move a corrupt file aside or release the disk reserve, then open the database again."""
        self._database.close()
        path = self._database.path
        if path is not None and is_corruption(error):
            self._database.replace_corrupt_file(path)
        elif self._disk is not None and self._disk.is_full():
            self._disk.release_reserve()
        return self._open_with_retries()

    def _write_batch(self, batch: list[Record]) -> tuple[int, int]:
        """Return the number of rows written, and of records that the database rejected."""
        engine = self._database.engine
        assert engine is not None
        unpacked = []
        for record in batch:
            if is_packed(record):
                self._series.add(record)
            else:
                unpacked.append(record)
        num_packed = len(batch) - len(unpacked)
        host = self._database.host
        try:
            new_gpus = {record.gpu_uuid for record in batch if isinstance(record, RollupRecord)} - self._known_gpus
            with self._writing_series(engine) as connection:
                record_gpu_hosts(connection, new_gpus, host=host)
                num_rows = num_packed + insert_records(connection, unpacked, host=host)
        except OperationalError:
            raise
        except (DatabaseError, ValueError, OverflowError, TypeError) as error:
            if is_corruption(error):
                raise
            log.warning("history: batch rejected (%s); writing its records one by one", short_message(error))
        else:
            self._known_gpus |= new_gpus
            return num_rows, 0
        with self._writing_series(engine):
            num_rows, num_bad = num_packed, 0
        for record in unpacked:
            try:
                with engine.begin() as connection:
                    num_rows += insert_records(connection, [record], host=host)
            except OperationalError:
                raise
            except (DatabaseError, ValueError, OverflowError, TypeError):
                num_bad += 1
        return num_rows, num_bad

    @contextmanager
    def _writing_series(self, engine: Engine) -> Iterator[Connection]:
        """Begin a transaction that also writes the packed minutes whose time has come."""
        mono_s = time.monotonic()
        keys = self._series.due(mono_s, is_all=self._queue.is_flushing_or_closing())
        with engine.begin() as connection:
            yield connection
            replace_series(connection, list(self._series.rows(connection, keys)))
        self._series.mark_written(keys, mono_s)

    def _clean_up(self) -> None:
        """Delete expired rows periodically, never while records are waiting."""
        mono_s = time.monotonic()
        engine = self._database.engine
        if self._queue.is_busy() or mono_s < self._cleanup_at_mono_s or engine is None:
            return
        try:
            with engine.begin() as connection:
                has_more = try_lock_cleanup(connection) and delete_expired(
                    connection, datetime.now(tz=UTC), self._options.retention, host=self._database.cleanup_host
                )
            release_free_pages(engine)
        except (SQLAlchemyError, sqlite3.Error) as error:
            # Deleting needs space too; on a full disk the next attempt is made after the next period.
            log.warning("history: cleanup failed: %s", short_message(error))
            has_more = False
        self._cleanup_at_mono_s = mono_s if has_more else mono_s + self._cleanup_period_s
