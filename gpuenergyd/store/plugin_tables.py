"""Tables of plugins in the history database, next to those of gpuenergyd."""

from pathlib import Path

from sqlalchemy import Engine, MetaData

from gpuenergyd.errors import StoreError
from gpuenergyd.store.database import create_tables, migrate, reader_of, writing_engine
from gpuenergyd.store.maintenance.advisory_locks import lock_schema
from gpuenergyd.store.reader import SchemaState, schema_state
from gpuenergyd.store.schema import metadata


def open_plugin_tables(path_or_url: str | Path, tables: MetaData, *, busy_timeout_s: float) -> Engine:
    """Return an engine of the history database with a plugin's tables, which are created if missing.

    A plugin upgrades its own tables.

    Raises:
        StoreError: the database belongs to another program, or a table has the name of one of gpuenergyd's.
        OSError: the folder of an SQLite file cannot be created.
        sqlalchemy.exc.SQLAlchemyError: the database fails.
    """
    if taken := sorted(tables.tables.keys() & metadata.tables.keys()):
        raise StoreError(f"table {taken[0]!r} of a plugin has the name of a table of gpuenergyd")
    engine = writing_engine(path_or_url, busy_timeout_s=busy_timeout_s)
    with engine.begin() as connection:
        lock_schema(connection)
        state = schema_state(reader_of(connection))
        if state is SchemaState.EMPTY:
            create_tables(connection)
        elif state is SchemaState.OLDER:
            migrate(connection)
        elif state is not SchemaState.CURRENT:
            raise StoreError(f"the history database has an unusable schema: {state}")
        tables.create_all(connection)
    return engine
