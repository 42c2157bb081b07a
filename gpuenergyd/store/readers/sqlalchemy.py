"""Reading the history through SQLAlchemy: on PostgreSQL, and within the writer's own transaction."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import SQLAlchemyError

from gpuenergyd.errors import StoreError
from gpuenergyd.store.readers.sqlite import Reader, one_line


class EngineReader(Reader):
    """Reads by a connection that is open."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.has_medians = connection.dialect.name == "postgresql"

    def is_one_of(self, column: str, values: Sequence[str]) -> Mapping[str, object]:
        """Return the condition that a column holds one of many values."""
        if self._connection.dialect.name != "postgresql":
            return super().is_one_of(column, values)
        return {f"{column} = ANY(?)": list(values)}

    def _fetch(self, sql: str, values: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        result = self._connection.execute(text(sql), dict(values))
        return list(result.keys()), result.all()

    def tables(self) -> frozenset[str]:
        """Return the names of the tables."""
        return frozenset(inspect(self._connection).get_table_names())

    def application_id(self) -> int | None:
        """Return what an SQLite file says whose it is."""
        if self._connection.dialect.name != "sqlite":
            return None
        return int(self._connection.exec_driver_sql("PRAGMA application_id").scalar_one())


class EngineSource:
    """Any database that SQLAlchemy reads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @contextmanager
    def reading(self) -> Iterator[Reader]:
        """Connect for one short read."""
        try:
            with self._engine.connect() as connection:
                yield EngineReader(connection)
        except SQLAlchemyError as error:
            raise StoreError(f"the history cannot be read: {one_line(error)}") from None

    def close(self) -> None:
        """Let go of the connections."""
        self._engine.dispose()
