"""Access through SQLAlchemy: for PostgreSQL, and for reads inside the writer's transaction."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from gpuenergyd.errors import StoreError
from gpuenergyd.store.readers.reader import Reader, short_message


class EngineReader(Reader):
    """Reads through an open SQLAlchemy connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.supports_median = connection.dialect.name == "postgresql"

    def in_condition(self, column: str, values: Sequence[str]) -> Mapping[str, object]:
        """Return the condition that a column has one of many values, in the form of `where`."""
        if self._connection.dialect.name != "postgresql":
            return super().in_condition(column, values)
        return {f"{column} = ANY(?)": list(values)}

    def _fetch(self, sql: str, values: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        result = self._connection.execute(text(sql), dict(values))
        return list(result.keys()), result.all()

    def tables(self) -> frozenset[str]:
        return frozenset(inspect(self._connection).get_table_names())

    def application_id(self) -> int | None:
        """Return the application_id of an SQLite file, 0 if unset; None for other databases."""
        if self._connection.dialect.name != "sqlite":
            return None
        return int(self._connection.exec_driver_sql("PRAGMA application_id").scalar_one())


class EngineDatabase:
    """A database that is read through an SQLAlchemy engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Open a connection for one short read."""
        try:
            with self._engine.connect() as connection:
                yield EngineReader(connection)
        except SQLAlchemyError as error:
            raise StoreError(f"cannot read the history: {short_message(error)}") from None

    def close(self) -> None:
        self._engine.dispose()
