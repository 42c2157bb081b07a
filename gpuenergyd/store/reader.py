"""Reads the database: `SELECT` statements, value conversion and schema state.

Statements are written once, in SQL that SQLite and PostgreSQL both understand. Columns are returned by name, instants
as timezone-aware UTC datetimes and booleans as bool.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from itertools import starmap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from gpuenergyd.printable import printable_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA_REVISION = "0017"
"""The latest revision in migrations/; revision numbers sort as text."""

OLDEST_REVISION = "0006"
"""The revision of 0.1.0, the oldest in migrations/; databases of earlier versions cannot be upgraded."""

APPLICATION_ID = 0x6745_6E72
"""SQLite application_id of history files; any other id identifies a foreign database before anything is written."""

INSTANTS = frozenset(
    {
        *("at", "started_at", "ended_at", "joined_at", "issued_at", "decided_at", "learned_at", "fetched_at"),
        "seen_at",
        *("valid_from", "valid_to", "grid_from"),
    }
)
"""The columns that hold instants, as whole microseconds since 1970."""

_TEXTS = frozenset(
    {
        *("job_name", "run_key", "policy", "schedule_name", "framework", "gpu_model_name", "plan_id", "host", "actor"),
        *("reason", "end_reason", "outcome_reason", "before", "after", "zone", "source"),
    }
)
"""The columns with text chosen by users or other programs; earlier versions stored any characters."""

Row: TypeAlias = Any
"""One row, with its columns as attributes."""

Record = TypeVar("Record", bound="DataclassInstance")

Fetch: TypeAlias = Callable[[str, Mapping[str, Any]], tuple[Sequence[str], Sequence[Sequence[Any]]]]
"""Runs a statement with named parameters; returns column names and rows."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class SchemaState(StrEnum):
    """The schema of a database compared with this version's."""

    EMPTY = "empty"
    CURRENT = "current"
    OLDER = "older"
    UNSUPPORTED = "unsupported"
    """Written before version 0.1.0; cannot be upgraded."""
    NEWER = "newer"
    FOREIGN = "foreign"


class Reader:
    """An open read connection.

    SQLite files are read with the standard library, because importing SQLAlchemy doubles the start-up time of a report.
    The writer's own transaction and servers are read through SQLAlchemy (`store.database.reader_of`).
    """

    def __init__(self, fetch: Fetch, *, is_server: bool = False) -> None:
        """Read through `fetch`, from an SQLite file or a PostgreSQL server."""
        self._fetch = fetch
        self._is_server = is_server

    @property
    def supports_median(self) -> bool:
        """Whether the database can compute medians (`percentile_cont`)."""
        return self._is_server

    def tables(self) -> frozenset[str]:
        """Return the names of the tables without views, including tables that this user may not read."""
        of_server = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        of_file = "SELECT name FROM sqlite_master WHERE type = 'table'"
        _, rows = self._fetch(of_server if self._is_server else of_file, {})
        return frozenset(name for (name,) in rows)

    def application_id(self) -> int | None:
        """Return the application_id of an SQLite file, 0 if unset; None for other databases."""
        return None if self._is_server else int(self._fetch("PRAGMA application_id", {})[1][0][0])

    def in_condition(self, column: str, values: Sequence[str]) -> Mapping[str, object]:
        """Return the condition that a column has one of many values, in the format of `where`."""
        if self._is_server:
            return {f"{column} = ANY(?)": list(values)}
        in_list = f"{column} IN (SELECT value FROM json_each(?))"  # noqa: S608  a column name of the schema
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
        """Return rows; `where` maps conditions with one `?` each to values; conditions with value None are left out."""
        names, rows = self._rows(columns, table, where, group_by=group_by, order_by=order_by, limit=limit)
        return [SimpleNamespace(**dict(zip(names, row, strict=True))) for row in rows]

    def records(
        self, kind: type[Record], table: str, where: Mapping[str, object], *, order_by: str
    ) -> tuple[Record, ...]:
        """Return rows as instances of a dataclass whose fields are named like the columns."""
        return tuple(starmap(kind, self.values(column_names(kind), table, where, order_by=order_by)))

    def values(
        self,
        columns: str | Sequence[str],
        table: str,
        where: Mapping[str, object],
        *,
        group_by: str = "",
        order_by: str = "",
    ) -> Sequence[Sequence[Any]]:
        """Return rows as plain tuples, which is faster for thousands of rows."""
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
                placeholder = f"%(v{number})s" if self._is_server else f":v{number}"
                conditions.append(f"({condition.replace('?', placeholder)})")
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
        reads = {k: read for k, name in enumerate(names) if (read := _converter(name)) is not None}
        if not reads or not rows:
            return names, rows
        read_columns: list[Sequence[Any]] = list(zip(*rows, strict=True))
        for k, read in reads.items():
            # Convert each distinct value once, because rows share their hours, and booleans have two values.
            converted = {stored: read(stored) for stored in set(read_columns[k])}
            read_columns[k] = [converted[stored] for stored in read_columns[k]]
        return names, list(zip(*read_columns, strict=True))

    def first_value(
        self, column: str, table: str, where: Mapping[str, object] | None = None, *, order_by: str = ""
    ) -> Any:
        """Return one column of the first row, None without rows."""
        rows = self.select(column, table, where, order_by=order_by, limit=1)
        return getattr(rows[0], column.strip('"')) if rows else None


def schema_state(reader: Reader) -> SchemaState:
    """Return the state of a database's schema."""
    tables = reader.tables()
    if reader.application_id() not in {None, 0, APPLICATION_ID}:
        return SchemaState.FOREIGN
    if not tables:
        return SchemaState.EMPTY
    is_history = {"alembic_version", "control_events"} <= set(tables)
    revision = reader.first_value("version_num", "alembic_version") if is_history else None
    if revision is None:
        return SchemaState.FOREIGN
    if revision == SCHEMA_REVISION:
        return SchemaState.CURRENT
    if str(revision) > SCHEMA_REVISION:
        return SchemaState.NEWER
    return SchemaState.OLDER if str(revision) >= OLDEST_REVISION else SchemaState.UNSUPPORTED


def epoch_us(at: datetime) -> int:
    """Return an instant as microseconds since 1970, the format in which instants are stored."""
    since = at.astimezone(UTC) - _EPOCH
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def instant_from_us(stored_us: Any | None) -> datetime | None:
    """Return the instant stored as microseconds since 1970."""
    return None if stored_us is None else _EPOCH + timedelta(microseconds=int(stored_us))


def short_message(error: Exception) -> str:
    """Return the first line of a database error, without SQL and links."""
    original = getattr(error, "orig", None) or error
    return (str(original).splitlines() or [type(original).__name__])[0]


def column_names(kind: "type[DataclassInstance]") -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _converter(name: str) -> Callable[[Any], Any] | None:
    """Return the function that converts a stored value of a column, None if none is needed."""
    if name in INSTANTS:
        return instant_from_us
    if name in _TEXTS:
        return lambda stored: None if stored is None else printable_line(stored)
    return bool if name.startswith("is_") else None


def _stored(value: object) -> object:
    if isinstance(value, datetime):
        return epoch_us(value)
    return value.value if isinstance(value, Enum) else value
