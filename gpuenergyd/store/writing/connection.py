"""Opens the database for writing, rejects foreign and newer databases and replaces a corrupt file."""

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DatabaseError

from gpuenergyd.errors import StoreError
from gpuenergyd.store.database import (
    check_after_unclean_stop,
    create_tables,
    is_sqlite,
    migrate,
    move_aside,
    reader_of,
    reading_engine,
    sqlite_path,
    writing_engine,
)
from gpuenergyd.store.maintenance.advisory_locks import lock_schema
from gpuenergyd.store.reader import SchemaState, schema_state, short_message
from gpuenergyd.store.writing.rows import close_abandoned_jobs

log = logging.getLogger(__name__)

_CORRUPTION_SIGNS = ("malformed", "not a database", "disk image")


def is_corruption(error: Exception) -> bool:
    """Return whether a database error means that an SQLite file is corrupt."""
    return any(sign in str(error) for sign in _CORRUPTION_SIGNS)


@dataclass(slots=True)
class WriterConnection:
    """The writer's database; used by the writer thread, except for `problems`."""

    path_or_url: str | Path
    host: str
    busy_timeout_s: float
    engine: Engine | None = None
    is_refused: bool = False
    """Whether the database belongs to another program or to a newer version."""
    _problem: str | None = None
    _corruption: str | None = None
    _has_opened: bool = False
    _guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def path(self) -> Path | None:
        """The path of an SQLite file, None for other databases."""
        return sqlite_path(self.path_or_url)

    @property
    def cleanup_host(self) -> str | None:
        """The host whose jobs this writer cleans up; None (all jobs) for a file, whose host may have been renamed."""
        return None if is_sqlite(self.path_or_url) else self.host

    def problems(self) -> tuple[str | None, str | None]:
        """Return the current problem, and the corruption found since the start; each None if there is none."""
        with self._guard:
            return self._problem, self._corruption

    def open(self) -> bool:
        """Open the database unless it is open; return whether it is."""
        if self.engine is not None:
            return True
        path = self.path
        try:
            self._check_before_opening(path)
            engine = writing_engine(self.path_or_url, busy_timeout_s=self.busy_timeout_s)
            if path is not None:
                check_after_unclean_stop(engine, path)
            with engine.begin() as connection:
                self._prepare(connection)
        except DatabaseError as error:
            self.report(short_message(error))
            if path is not None and path.is_file() and is_corruption(error):
                self.replace_corrupt_file(path)
            return False
        except (OSError, StoreError) as error:
            self.report(short_message(error))
            return False
        if not self._has_opened:
            self.report(None)
        # A reopened database may still be read-only; the problem is cleared only by a successful write.
        self.engine, self._has_opened = engine, True
        return True

    def close(self) -> None:
        """Close the database; `open` opens it again."""
        if self.engine is not None:
            self.engine.dispose()
            self.engine = None

    def report(self, problem: str | None) -> None:
        """Record and log the current problem if it changed; None means that writing works."""
        with self._guard:
            has_changed = problem != self._problem
            self._problem = problem
        if has_changed:
            if problem is None:
                log.info("history: writing")
            else:
                log.warning("history: %s", problem)

    def replace_corrupt_file(self, path: Path) -> None:
        """Move a corrupt file away, so that a new database is created."""
        try:
            moved = move_aside(path)
        except OSError as error:
            self.report(short_message(error))
            return
        log.error("history: %s is corrupt; moved it to %s and started a new one", path, moved)
        with self._guard:
            self._corruption = (
                f"the database was corrupt; moved it to {moved} and started a new one; `sqlite3 {moved} .recover` shows"
                " what can be recovered"
            )

    def _check_before_opening(self, path: Path | None) -> None:
        """Refuse a foreign, newer or unsupported file before accessing it otherwise."""
        if path is not None and path.is_file() and path.stat().st_size > 0:
            with reading_engine(path).connect() as connection:
                self._refuse_unless_writable(schema_state(reader_of(connection)))

    def _prepare(self, connection: Connection) -> None:
        lock_schema(connection)
        state = schema_state(reader_of(connection))
        self._refuse_unless_writable(state)
        if state is SchemaState.EMPTY:
            create_tables(connection)
        elif state is SchemaState.OLDER:
            migrate(connection)
        if not self._has_opened:
            # Jobs recorded by an older version may have no host.
            close_abandoned_jobs(connection, host=None if state is SchemaState.OLDER else self.cleanup_host)

    def _refuse_unless_writable(self, state: SchemaState) -> None:
        if state is SchemaState.NEWER:
            self.is_refused = True
            raise StoreError("the history was written by a newer version of gpuenergyd; nothing is recorded")
        if state is SchemaState.UNSUPPORTED:
            self.is_refused = True
            raise StoreError(
                f"{self.path_or_url} was written by gpuenergyd before 0.1.0 and cannot be upgraded; nothing is recorded"
                " until it is moved away"
            )
        if state is SchemaState.FOREIGN:
            self.is_refused = True
            raise StoreError(f"{self.path_or_url} belongs to another program; nothing is recorded")
