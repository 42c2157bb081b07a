"""The one thread that writes the history. Its trouble is counted, retried and shown, and never reaches GPU control.

Records wait in a bounded queue and go out in batches, one transaction each. When the database cannot keep up
the queue sheds rollups and timelines first, then everything, and counts what it shed. On a full disk a reserve is given
up, and what it makes room for is jobs, plans and control events.
"""

import logging
import socket
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError, InterfaceError, OperationalError, SQLAlchemyError

from gpuenergyd.errors import StoreError
from gpuenergyd.store.database import (
    check_after_unclean_stop,
    create,
    is_sqlite,
    reading_engine,
    set_aside,
    sqlite_path,
    upgrade,
    writing_engine,
)
from gpuenergyd.store.maintenance.advisory_locks import await_turn, takes_turn
from gpuenergyd.store.maintenance.retention import Retention, forget_old, give_back_space
from gpuenergyd.store.maintenance.space import SpaceWatch
from gpuenergyd.store.readers.sqlalchemy import EngineReader
from gpuenergyd.store.readers.sqlite import Contents, contents, one_line
from gpuenergyd.store.records import HostRollupRecord, IterationRecord, Record, RollupRecord, SampleRecord
from gpuenergyd.store.writing.rows import close_abandoned_jobs, insert_records, note_gpus, replace_series
from gpuenergyd.store.writing.series_buffer import SeriesBuffer, is_packed

log = logging.getLogger(__name__)

_MAX_BATCH = 20_000
_IMPORTANT_WITHIN_S = 0.1
"""Jobs, plans and control events are soon in the database; samples wait for a batch."""
_STUCK_AFTER_S = 60.0
_FIRST_TIDY_S = 60.0
_FILE_TIDY_S = 3600.0
_SERVER_TIDY_S = 600.0
"""A fleet's reports are as fast as its iterations are few: each host soon puts its own together."""
_FILE_BATCH_S = 1.0
_FILE_SERIES_S = 10.0
"""How often a file of this host takes readings and minutes that are still filling: nobody else waits for it."""
_SERVER_SERIES_S = 300.0
"""A server gets minutes once they are over: a fleet shares it, and each version of a row is a copy there."""
_DAMAGE = ("malformed", "not a database", "disk image")


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """How the writer is; `reason` None when all is well."""

    path: str
    num_rows_written: int
    num_rows_dropped: int
    num_records_waiting: int
    reason: str | None


class HistoryWriter:
    """Owns the write connection; `write` never blocks and never raises."""

    def __init__(
        self,
        path_or_url: str | Path,
        *,
        host: str | None = None,
        batch_s: float | None = None,
        server_batch_s: float = 10.0,
        retry_s: float = 2.0,
        busy_timeout_s: float = 1.0,
        max_waiting: int = 50_000,
        tidy_period_s: float | None = None,
        reserve_bytes: int = 0,
        max_write_ahead_bytes: int = 256 * 2**20,
        retention: Retention = Retention(),  # noqa: B008  frozen
    ) -> None:
        """`host` names this host among those that share the history; readings wait for `batch_s` at most.

        Without that: a second for a file, `server_batch_s` for a server.
        """
        self._path_or_url = path_or_url
        self._host = host or socket.gethostname()
        is_file = is_sqlite(path_or_url)
        self._batch_s = batch_s if batch_s is not None else _FILE_BATCH_S if is_file else server_batch_s
        self._retry_s = retry_s
        self._busy_timeout_s = busy_timeout_s
        self._max_waiting = max_waiting
        usual_period_s = _FILE_TIDY_S if is_file else _SERVER_TIDY_S
        self._tidy_period_s = usual_period_s if tidy_period_s is None else tidy_period_s
        self._retention = retention
        self._reserve_bytes = reserve_bytes
        self._max_write_ahead_bytes = max_write_ahead_bytes
        self._space: SpaceWatch | None = None
        self._tidy_at_mono_s = time.monotonic() + min(_FIRST_TIDY_S, self._tidy_period_s)
        self._changed = threading.Condition()
        self._waiting: deque[Record] = deque()
        self._series = SeriesBuffer(write_every_s=_FILE_SERIES_S if is_file else _SERVER_SERIES_S)
        self._known_gpus: set[str] = set()
        self._has_opened = False
        self._in_hand = 0
        self._has_unpacked = False
        self._taken_mono_s = 0.0
        self._due_mono_s = 0.0
        self._num_written = 0
        self._num_dropped = 0
        self._reason: str | None = None
        self._damage: str | None = None
        self._is_closing = False
        self._is_hurried = False
        self._is_refused = False
        self._engine: Engine | None = None
        self._thread = threading.Thread(target=self._run, name="history-writer", daemon=True)

    def start(self) -> None:
        """Begin to write; the database is opened by the thread."""
        self._thread.start()

    def write(self, record: Record) -> None:
        """Take a record for the next batch."""
        with self._changed:
            num_waiting = len(self._waiting)
            if self._is_refused or self._is_closing or num_waiting >= self._max_waiting:
                self._num_dropped += 1
                return
            if num_waiting >= self._max_waiting // 2 or self._is_short_of_space():
                if isinstance(record, RollupRecord | SampleRecord):
                    self._num_dropped += 1
                    return
                if isinstance(record, IterationRecord) and record.spans:
                    record = replace(record, spans=())
                    self._num_dropped += 1
            self._waiting.append(record)
            is_sample = isinstance(record, RollupRecord | SampleRecord | IterationRecord | HostRollupRecord)
            due_s = time.monotonic() + (self._batch_s if is_sample else min(self._batch_s, _IMPORTANT_WITHIN_S))
            if num_waiting == 0 or due_s < self._due_mono_s:
                self._due_mono_s = due_s
                self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Write what waits now; return whether all of it is in the database."""
        until = time.monotonic() + timeout_s
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._is_all_written() or not self._thread.is_alive(),
                timeout=max(0.0, until - time.monotonic()),
            )
            self._is_hurried = False
            return self._is_all_written()

    def _is_all_written(self) -> bool:
        return not self._waiting and not self._in_hand and not self._has_unpacked

    def is_moving(self) -> bool:
        """Return whether the thread lives, or has nothing left to do, and is not stuck with one batch."""
        with self._changed:
            if self._is_refused or self._is_closing:
                return True
            is_stuck = self._in_hand > 0 and time.monotonic() - self._taken_mono_s > _STUCK_AFTER_S
            return self._thread.is_alive() and not is_stuck

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what waits, once more at most, and end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def status(self) -> WriterStatus:
        """Return how the writer is."""
        path = sqlite_path(self._path_or_url)
        notices = self._space.notices if self._space is not None else ()
        with self._changed:
            return WriterStatus(
                path=str(path) if path is not None else str(self._path_or_url).split("://")[0],
                num_rows_written=self._num_written,
                num_rows_dropped=self._num_dropped,
                num_records_waiting=len(self._waiting) + self._in_hand,
                reason="; ".join(r for r in (self._reason, *notices, self._damage) if r) or None,
            )

    # --- the thread ---

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:
            log.exception("history: the writer failed; nothing more is recorded")
            with self._changed:
                self._is_refused = True
                self._num_dropped += len(self._waiting) + self._in_hand
                self._waiting.clear()
                self._in_hand = 0
                self._reason = f"the writer failed: {one_line(error)}"
                self._changed.notify_all()

    def _write_all(self) -> None:
        while not self._ensure_open():
            if self._pause():
                return
        while (batch := self._take()) or self._series.has_unwritten:
            try:
                num_rows, num_bad = self._store(batch)
            except (OperationalError, InterfaceError, DatabaseError, OSError, StoreError) as error:
                self._put_back(batch, one_line(error))
                if self._after_trouble(error) or self._pause():
                    return
                continue
            with self._changed:
                self._num_written += num_rows
                self._num_dropped += num_bad
                self._in_hand = 0
                self._has_unpacked = self._series.has_unwritten
                self._changed.notify_all()
            self._say(f"{num_bad} records did not fit the database" if num_bad else None)
            if self._space is not None:
                self._space.look()
            self._tidy()
        self._dispose()

    def _await_records(self) -> None:
        while True:
            limit_s = self._retry_s if self._space is not None and self._space.notices else None
            with self._changed:
                if self._changed.wait_for(self._is_wanted, limit_s):
                    return
            if self._space is not None:
                self._space.look()

    def _is_wanted(self) -> bool:
        return bool(self._waiting) or self._is_closing or (self._is_hurried and self._has_unpacked)

    def _is_short_of_space(self) -> bool:
        return self._space is not None and self._space.is_short

    def _take(self) -> list[Record]:
        self._await_records()
        with self._changed:
            while not (self._is_closing or self._is_hurried or len(self._waiting) >= _MAX_BATCH):
                left_s = self._due_mono_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), _MAX_BATCH))]
            self._in_hand = len(batch)
            self._taken_mono_s = time.monotonic()
            return batch

    def _put_back(self, batch: Iterable[Record], reason: str) -> None:
        with self._changed:
            self._waiting.extendleft(reversed(list(batch)))
            self._in_hand = 0
        self._say(reason)

    def _pause(self) -> bool:
        """Wait before the next try; return whether there will be none."""
        with self._changed:
            is_last = self._is_closing
            if not is_last:
                self._changed.wait_for(lambda: self._is_closing, timeout=self._retry_s)
            if is_last or self._is_refused:
                self._num_dropped += len(self._waiting)
                self._waiting.clear()
                self._changed.notify_all()
                return True
            return False

    def _after_trouble(self, error: Exception) -> bool:
        self._dispose()
        path = sqlite_path(self._path_or_url)
        if path is not None and any(sign in str(error) for sign in _DAMAGE):
            self._replace_damaged(path)
        elif self._space is not None and self._space.is_full():
            self._space.give_up_reserve()
        while not self._ensure_open():
            if self._pause():
                return True
        return False

    def _store(self, batch: list[Record]) -> tuple[int, int]:
        """Return rows written and records that no database would take."""
        assert self._engine is not None
        plain = []
        for record in batch:
            if is_packed(record):
                self._series.take(record)
            else:
                plain.append(record)
        num_packed = len(batch) - len(plain)
        try:
            new_gpus = {record.gpu_uuid for record in batch if isinstance(record, RollupRecord)} - self._known_gpus
            with self._packing_series(self._engine) as connection:
                note_gpus(connection, new_gpus, host=self._host)
                num_rows = num_packed + insert_records(connection, plain, host=self._host)
        except OperationalError:
            raise
        except (DatabaseError, ValueError, OverflowError, TypeError) as error:
            if any(sign in str(error) for sign in _DAMAGE):
                raise
            log.warning("history: a batch was refused (%s), its records are tried one by one", one_line(error))
        else:
            self._known_gpus |= new_gpus
            return num_rows, 0
        with self._packing_series(self._engine):
            num_rows, num_bad = num_packed, 0
        for record in plain:
            try:
                with self._engine.begin() as connection:
                    num_rows += insert_records(connection, [record], host=self._host)
            except OperationalError:
                raise
            except (DatabaseError, ValueError, OverflowError, TypeError):
                num_bad += 1
        return num_rows, num_bad

    @contextmanager
    def _packing_series(self, engine: Engine) -> Iterator[Connection]:
        """Begin a transaction that also writes the packed minutes that are due."""
        mono_s = time.monotonic()
        with self._changed:
            is_all = self._is_hurried or self._is_closing
        keys = self._series.due(mono_s, is_all=is_all)
        with engine.begin() as connection:
            yield connection
            replace_series(connection, list(self._series.rows(connection, keys)))
        self._series.written(keys, mono_s)

    def _tidy(self) -> None:
        """Forget what is too old, now and then, and never while records wait."""
        now_s = time.monotonic()
        with self._changed:
            is_busy = bool(self._waiting) or self._is_closing
        if is_busy or now_s < self._tidy_at_mono_s or self._engine is None:
            return
        try:
            with self._engine.begin() as connection:
                has_more = takes_turn(connection) and forget_old(
                    connection, datetime.now(tz=UTC), self._retention, host=self._own_jobs
                )
            give_back_space(self._engine)
        except (SQLAlchemyError, sqlite3.Error) as error:
            # Deleting needs space too: on a full disk the next try comes with the next period.
            log.warning("history: not tidied: %s", one_line(error))
            has_more = False
        self._tidy_at_mono_s = now_s if has_more else now_s + self._tidy_period_s

    # --- opening ---

    def _ensure_open(self) -> bool:
        if self._engine is not None:
            return True
        path = sqlite_path(self._path_or_url)
        try:
            self._refuse_strangers(path)
            engine = writing_engine(self._path_or_url, busy_timeout_s=self._busy_timeout_s)
            if path is not None:
                check_after_unclean_stop(engine, path)
            with engine.begin() as connection:
                self._prepare(connection)
        except DatabaseError as error:
            self._say(one_line(error))
            if path is not None and path.is_file() and any(sign in str(error) for sign in _DAMAGE):
                self._replace_damaged(path)
            return False
        except (OSError, StoreError) as error:
            self._say(one_line(error))
            return False
        self._engine, self._has_opened = engine, True
        self._say(None)
        if path is not None and self._space is None:
            self._space = SpaceWatch(path, self._reserve_bytes, self._max_write_ahead_bytes, self._retry_s)
            self._space.reserve.hold()
        return True

    @property
    def _own_jobs(self) -> str | None:
        """Whose jobs this writer looks after: in a file all of them, whatever the host was called then."""
        return None if is_sqlite(self._path_or_url) else self._host

    def _refuse_strangers(self, path: Path | None) -> None:
        """Look before anything is touched: what is not ours, or newer than us, stays as it is to the last byte."""
        if path is not None and path.is_file() and path.stat().st_size > 0:
            with reading_engine(path).connect() as connection:
                self._require_ours(contents(EngineReader(connection)))

    def _prepare(self, connection: Connection) -> None:
        await_turn(connection)
        held = contents(EngineReader(connection))
        self._require_ours(held)
        if held is Contents.NOTHING:
            create(connection)
        elif held is not Contents.CURRENT:
            upgrade(connection)
        if not self._has_opened:
            # Of jobs that an older version wrote the host is not known.
            is_upgraded = held is Contents.OLDER
            close_abandoned_jobs(connection, host=None if is_upgraded else self._own_jobs)

    def _require_ours(self, held: Contents) -> None:
        match held:
            case Contents.CURRENT | Contents.NOTHING | Contents.OLDER:
                pass
            case Contents.NEWER:
                self._is_refused = True
                raise StoreError("the history was written by a newer gpuenergyd; nothing is recorded")
            case Contents.FOREIGN:
                self._is_refused = True
                raise StoreError(f"{self._path_or_url} belongs to another program; nothing is recorded")

    def _replace_damaged(self, path: Path) -> None:
        try:
            kept = set_aside(path)
        except OSError as error:
            self._say(one_line(error))
            return
        log.error("history: %s was damaged; it lies at %s now, and a new one begins", path, kept)
        remedy = f"`sqlite3 {kept} .recover` shows what can be saved"
        with self._changed:
            self._damage = f"the database was damaged and set aside, a new one has begun; {remedy}"

    def _dispose(self) -> None:
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None

    def _say(self, reason: str | None) -> None:
        with self._changed:
            is_news = reason != self._reason
            self._reason = reason
        if is_news:
            if reason is None:
                log.info("history: writing")
            else:
                log.warning("history: %s", reason)
