"""Opening the history's database: what is in it, bringing it up to date, and setting a damaged one aside."""

import logging
import sqlite3
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    create_engine,
    event,
    insert,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from gpuenergyd.errors import StoreError
from gpuenergyd.store.readers.sqlite import APPLICATION_ID, SCHEMA_REVISION, connect_read_only, one_line
from gpuenergyd.store.schema import metadata

MIGRATIONS = Path(__file__).with_name("migrations")
_WRITE_AHEAD_KEPT_BYTES = 16 * 2**20
"""What is left of a write-ahead log that a long reader made grow, once that reader has gone."""


@lru_cache(maxsize=8)
def sqlite_path(path_or_url: str | Path) -> Path | None:
    """Return the file of an SQLite history, None for any other database.

    Raises:
        StoreError: a URL that is none.
    """
    if isinstance(path_or_url, Path) or "://" not in path_or_url:
        return Path(path_or_url)
    try:
        url = make_url(path_or_url)
    except ArgumentError as error:
        raise StoreError(f"{path_or_url!r} is no database URL: {error}") from None
    if url.get_backend_name() != "sqlite":
        return None
    if not url.database or url.database == ":memory:":
        raise StoreError(
            f"{path_or_url!r}: the history needs a file, e.g. sqlite:////var/lib/gpuenergyd/history.sqlite3"
        )
    return Path(url.database)


def is_sqlite(path_or_url: str | Path) -> bool:
    """Return whether this names a file of this host; what names nothing at all is told when it is opened."""
    try:
        return sqlite_path(path_or_url) is not None
    except StoreError:
        return False


def writing_engine(path_or_url: str | Path, *, busy_timeout_s: float) -> Engine:
    """Return an engine for the one writer; the folder of an SQLite file is made.

    Raises:
        StoreError: no such kind of database.
        OSError: the folder cannot be made.
    """
    path = sqlite_path(path_or_url)
    if path is None:
        return _engine(str(path_or_url))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    engine = create_engine(
        f"sqlite:///{path}", poolclass=NullPool, connect_args={"timeout": busy_timeout_s, "check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        # Transactions are ours to begin, tables included: a half-made schema never becomes visible.
        connection.isolation_level = None
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # a write, even where it changes nothing
        for pragma in (
            "journal_mode=WAL",
            "synchronous=NORMAL",
            f"journal_size_limit={_WRITE_AHEAD_KEPT_BYTES}",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def reading_engine(path_or_url: str | Path, *, keeps_connection: bool = False) -> Engine:
    """Return an engine that cannot write; it works beside the writer and after it.

    It may keep a connection to a server: a report of a fleet asks thousands of questions, one after the other.

    Raises:
        StoreError: no file there, or no such kind of database.
    """
    path = sqlite_path(path_or_url)
    if path is None:
        return _engine(str(path_or_url), is_read_only=True, keeps_connection=keeps_connection)
    if not path.is_file():
        raise StoreError(f"no history at {path}")

    def connect() -> sqlite3.Connection:
        return connect_read_only(path)

    return create_engine("sqlite://", creator=connect, poolclass=NullPool)


def create(connection: Connection) -> None:
    """Make the newest tables in an empty database, in the transaction that is open.

    The revisions would end with the same; to load what carries them out takes longer than all else that a first start
    does.
    """
    _claim(connection)
    metadata.create_all(connection)
    revisions = Table("alembic_version", MetaData(), Column("version_num", String(32), nullable=False))
    revisions.append_constraint(PrimaryKeyConstraint("version_num", name="alembic_version_pkc"))
    revisions.create(connection)
    connection.execute(insert(revisions), {"version_num": SCHEMA_REVISION})


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to a revision, in the transaction that is open."""
    logging.getLogger("alembic").setLevel(logging.WARNING)  # before it is loaded, for it talks while it loads
    from alembic import command  # noqa: PLC0415  a reader, and a writer that finds all in order, start without it
    from alembic.config import Config  # noqa: PLC0415  as above

    _claim(connection)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _claim(connection: Connection) -> None:
    """Say in the database, where it has a place for it, whose it is."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")


def check_after_unclean_stop(engine: Engine, path: Path) -> None:
    """Look through a database whose last writer did not end in order, so that damage shows now and not in a month.

    Raises:
        DatabaseError: it is damaged.
    """
    if write_ahead_bytes(path) == 0:
        return
    with engine.connect() as connection:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise DatabaseError(None, None, sqlite3.DatabaseError(f"database disk image is malformed: {found}"))


def write_ahead_bytes(path: Path) -> int:
    """Return the size of a database's write-ahead log, 0 without one."""
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return 0


def set_aside(path: Path) -> Path:
    """Rename a damaged database and its companions, so that a new one can start; return where it lies now."""
    stamp = datetime.now(tz=UTC).strftime("%Y%m%dT%H%M%S")
    kept = path.with_name(f"{path.name}.corrupt-{stamp}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(kept.with_name(kept.name + suffix))
    return kept


def _engine(url: str, *, is_read_only: bool = False, keeps_connection: bool = False) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.drivername == "postgresql":
            parsed = parsed.set(drivername="postgresql+psycopg")
        options = {"postgresql_readonly": True} if is_read_only and parsed.get_backend_name() == "postgresql" else {}
        pool: dict[str, Any] = {"pool_size": 1} if keeps_connection else {"poolclass": NullPool}
        return create_engine(parsed, execution_options=options, **pool)
    except ImportError as error:
        raise StoreError(f"{_shown(url)}: {error}; pip install 'gpuenergyd[postgresql]'") from None
    except SQLAlchemyError as error:
        raise StoreError(f"{_shown(url)} is no database URL: {one_line(error)}") from None


def _shown(url: str) -> str:
    """Return a URL as a person may see it: without the password."""
    try:
        return repr(make_url(url).render_as_string(hide_password=True))
    except ArgumentError:
        return "the database URL"
