"""Reading the history without SQLAlchemy where it is an SQLite file: a report starts in half the time.

What is read is said once, as a short `SELECT` that SQLite and PostgreSQL both understand; `SqliteSource` asks the
standard library, `store.engine_reading` any other database through SQLAlchemy. Columns come back by name: instants
aware and in UTC, booleans as booleans.
"""

import json
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar
from urllib.parse import quote

from gpuenergyd.errors import StoreError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_REVISION = "0006"
"""The newest revision in migrations/; revisions are numbered, so text order is age."""

APPLICATION_ID = 0x6745_6E72
"""SQLite's application_id of our files: a foreign database is told apart before anything is written to it."""

INSTANTS = frozenset(
    {
        *("at", "started_at", "ended_at", "joined_at", "issued_at", "decided_at", "learned_at", "fetched_at"),
        "seen_at",
        *("valid_from", "valid_to", "grid_from"),
    }
)
"""The columns that hold instants, as whole microseconds since 1970."""

Row: TypeAlias = Any
"""One row, its columns as attributes."""

Record = TypeVar("Record", bound="DataclassInstance")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_BUSY_TIMEOUT_S = 5.0


class Contents(StrEnum):
    """What a database holds, seen by this version."""

    NOTHING = "nothing"
    CURRENT = "current"
    OLDER = "older"
    NEWER = "newer"
    FOREIGN = "foreign"


class Reader(ABC):
    """One short read of a database."""

    @abstractmethod
    def _fetch(self, sql: str, values: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        """Return names and rows of what a statement selects; it names its values as `:name`."""

    @abstractmethod
    def tables(self) -> frozenset[str]:
        """Return the names of the tables."""

    @abstractmethod
    def application_id(self) -> int | None:
        """Return what an SQLite file says whose it is, 0 where it says nothing; None for any other database."""

    has_medians = False
    """Whether the database works out medians (`percentile_cont`)."""

    def is_one_of(self, column: str, values: Sequence[str]) -> Mapping[str, object]:
        """Return the condition that a column holds one of many values, as `where` takes it."""
        in_list = f"{column} IN (SELECT value FROM json_each(?))"  # noqa: S608  a column of ours
        return {in_list: json.dumps(list(values))}

    def select(
        self,
        columns: str | Sequence[str],
        table: str,
        where: Mapping[str, object] | None = None,
        *,
        group_by: str = "",
        order_by: str = "",
        limit: int | None = None,
    ) -> list[Row]:
        """Return rows; `where` maps conditions, a `?` in each, to their values; None is no condition."""
        names, rows = self._rows(columns, table, where, group_by=group_by, order_by=order_by, limit=limit)
        return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in rows]

    def records(
        self, kind: type[Record], table: str, where: Mapping[str, object], *, order_by: str
    ) -> tuple[Record, ...]:
        """Return rows as dataclasses whose fields are named like the columns."""
        return tuple(starmap(kind, self.values(names_of(kind), table, where, order_by=order_by)))

    def values(
        self,
        columns: str | Sequence[str],
        table: str,
        where: Mapping[str, object],
        *,
        group_by: str = "",
        order_by: str = "",
    ) -> Sequence[Sequence[Any]]:
        """Return rows without names, for whoever reads thousands of them."""
        return self._rows(columns, table, where, group_by=group_by, order_by=order_by)[1]

    def _rows(
        self,
        columns: str | Sequence[str],
        table: str,
        where: Mapping[str, object] | None,
        *,
        group_by: str = "",
        order_by: str = "",
        limit: int | None = None,
    ) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        conditions, values = [], {}
        for number, (condition, value) in enumerate((where or {}).items()):
            if value is not None:
                conditions.append("(" + condition.replace("?", f":v{number}") + ")")
                values[f"v{number}"] = _stored(value)
        listed = columns if isinstance(columns, str) else ", ".join(f'"{name}"' for name in columns)
        parts = [
            ("SELECT", listed),
            ("FROM", table),
            ("WHERE", " AND ".join(conditions)),
            ("GROUP BY", group_by),
            ("ORDER BY", order_by),
            ("LIMIT", "" if limit is None else str(limit)),
        ]
        names, rows = self._fetch(" ".join(f"{word} {part}" for word, part in parts if part), values)
        reads = {k: read for k, name in enumerate(names) if (read := _read_as(name)) is not None}
        if not reads or not rows:
            return names, rows
        read_columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
        for k, read in reads.items():
            # Few different ones stand in many rows: GPUs share their hours, and truths are two.
            meanings = {stored: read(stored) for stored in set(read_columns[k])}
            read_columns[k] = [meanings[stored] for stored in read_columns[k]]
        return names, list(zip(*read_columns, strict=True))

    def first(self, column: str, table: str, where: Mapping[str, object] | None = None, *, order_by: str = "") -> Any:
        """Return one column of the first row, None without any."""
        rows = self.select(column, table, where, order_by=order_by, limit=1)
        return getattr(rows[0], column.strip('"')) if rows else None


class Source(Protocol):
    """Where a history is read from."""

    def reading(self) -> AbstractContextManager[Reader]:
        """Connect for one short read.

        Raises:
            StoreError: when entered or within, that the database cannot be read.
        """
        ...

    def close(self) -> None:
        """Let go of the database."""


class SqliteReader(Reader):
    """Reads by the standard library."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def _fetch(self, sql: str, values: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        cursor = self._connection.execute(sql, values)
        return [column[0] for column in cursor.description], cursor.fetchall()

    def tables(self) -> frozenset[str]:
        """Return the names of the tables."""
        rows = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        return frozenset(name for (name,) in rows)

    def application_id(self) -> int | None:
        """Return what the file says whose it is."""
        (found,) = self._connection.execute("PRAGMA application_id").fetchone()
        return int(found)


class SqliteSource:
    """An SQLite file; it is read beside the writer and after it, and never written."""

    def __init__(self, path: Path, *, nobody_writes: bool = False) -> None:
        self._path = path
        self._nobody_writes = nobody_writes

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Connect for one short read."""
        try:
            connection = connect_read_only(self._path, nobody_writes=self._nobody_writes)
            try:
                yield SqliteReader(connection)
            finally:
                connection.close()
        except sqlite3.Error as error:
            raise StoreError(f"the history cannot be read: {one_line(error)}") from None

    def close(self) -> None:
        """Nothing is held between reads."""


def connect_read_only(path: Path, *, nobody_writes: bool = False) -> sqlite3.Connection:
    """Connect to an SQLite file; where nobody writes, not even the files are made that SQLite needs beside a writer."""
    # In a folder that cannot be written SQLite cannot make the files that WAL needs; without a -wal file
    # nobody is writing, and the file may be read as it lies.
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    if nobody_writes and not path.with_name(path.name + "-wal").exists():
        return sqlite3.connect(uri + "&immutable=1", uri=True, check_same_thread=False)
    connection = sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master")
    except sqlite3.OperationalError:
        connection.close()
        if path.with_name(path.name + "-wal").exists():
            raise
        connection = sqlite3.connect(uri + "&immutable=1", uri=True, check_same_thread=False)
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def contents(reader: Reader) -> Contents:
    """Return what a database holds."""
    tables = reader.tables()
    if reader.application_id() not in {None, 0, APPLICATION_ID}:
        return Contents.FOREIGN
    if not tables:
        return Contents.NOTHING
    if "alembic_version" not in tables or "control_events" not in tables:
        return Contents.FOREIGN
    revision = reader.first("version_num", "alembic_version")
    if revision is None:
        return Contents.FOREIGN
    if revision == SCHEMA_REVISION:
        return Contents.CURRENT
    return Contents.NEWER if str(revision) > SCHEMA_REVISION else Contents.OLDER


def plain_sqlite_path(path_or_url: str | Path) -> Path | None:
    """Return the file that a path or a plain `sqlite:///` URL names, None for any other URL."""
    if isinstance(path_or_url, Path) or "://" not in path_or_url:
        return Path(path_or_url)
    name = path_or_url.removeprefix("sqlite:///")
    is_plain = name not in {path_or_url, "", ":memory:"} and "?" not in name and "%" not in name
    return Path(name) if is_plain else None


def micros_of(at: datetime) -> int:
    """Return an instant as it is stored: whole microseconds since 1970, sortable, exact, the same everywhere."""
    since = at.astimezone(UTC) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def instant_of(micros: Any | None) -> datetime | None:
    """Return the instant that was stored."""
    return None if micros is None else _EPOCH + timedelta(microseconds=int(micros))


def one_line(error: Exception) -> str:
    """Return a database error without SQL and links."""
    original = getattr(error, "orig", None) or error
    return (str(original).splitlines() or [type(original).__name__])[0]


def names_of(kind: "type[DataclassInstance]") -> tuple[str, ...]:
    """Return the columns that a dataclass holds."""
    return tuple(field.name for field in fields(kind))


def _read_as(name: str) -> Callable[[Any], Any] | None:
    """Return what makes of a stored value what its column means, None where that is the same."""
    if name in INSTANTS:
        return instant_of
    return bool if name.startswith("is_") else None


def _stored(value: object) -> object:
    if isinstance(value, datetime):
        return micros_of(value)
    return value.value if isinstance(value, Enum) else value
