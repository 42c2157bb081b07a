"""Opens, creates and migrates the database; moves a corrupt file aside."""

import contextlib
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator, Mapping, Sequence
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
from gpuenergyd.store.reader import APPLICATION_ID, SCHEMA_REVISION, Reader, short_message
from gpuenergyd.store.schema import metadata
from gpuenergyd.store.sqlite_file import connect_read_only, require_file

_SERVER = "postgresql"
MIGRATIONS = Path(__file__).with_name("migrations")
_OWN_RIGHTS, _RIGHTS_OF_OTHERS = 0o600, 0o007
_WAL_SIZE_LIMIT_BYTES = 16 * 2**20
"""Size to which SQLite truncates the write-ahead log after a long reader let it grow."""


@lru_cache(maxsize=8)
def sqlite_path(path_or_url: str | Path) -> Path | None:
    """Return the path of an SQLite history, None for other databases; raise StoreError for an invalid URL."""
    if isinstance(path_or_url, Path) or "://" not in path_or_url:
        return Path(path_or_url)
    try:
        url = make_url(path_or_url)
    except ArgumentError as error:
        raise StoreError(f"{path_or_url!r} is not a database URL: {error}") from None
    if url.get_backend_name() != "sqlite":
        return None
    if not url.database or url.database == ":memory:":
        raise StoreError(
            f"{path_or_url!r}: the history needs a file, e.g. sqlite:////var/lib/gpuenergyd/history.sqlite3"
        )
    return Path(url.database)


def is_sqlite(path_or_url: str | Path) -> bool:
    """Return whether the path or URL names an SQLite file; an invalid URL is reported when it is opened."""
    try:
        return sqlite_path(path_or_url) is not None
    except StoreError:
        return False


def _make_private(path: Path) -> None:
    """Create an SQLite file that others cannot read, or remove others' rights to a file from an earlier version.

    SQLite gives the files next to it the same rights. Errors are reported later, when the file is opened.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _OWN_RIGHTS)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if mode & _RIGHTS_OF_OTHERS:
                os.fchmod(fd, mode & ~_RIGHTS_OF_OTHERS)
        finally:
            os.close(fd)


def writing_engine(path_or_url: str | Path, *, busy_timeout_s: float) -> Engine:
    """Return an engine for the writer; creates the folder of an SQLite file.

    Raises:
        StoreError: unsupported database.
        OSError: the folder cannot be created.
    """
    path = sqlite_path(path_or_url)
    if path is None:
        return _engine(str(path_or_url))
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    _make_private(path)
    engine = create_engine(
        f"sqlite:///{path}", poolclass=NullPool, connect_args={"timeout": busy_timeout_s, "check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        # Transactions are started explicitly and include DDL: an incomplete schema never becomes visible.
        connection.isolation_level = None
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")  # writes to the file even if nothing changes
        for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"journal_size_limit={_WAL_SIZE_LIMIT_BYTES}"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def reading_engine(path_or_url: str | Path, *, keeps_connection: bool = False) -> Engine:
    """Return a read-only engine; it can be used while the writer runs.

    `keeps_connection` reuses one connection to a server, because a report of a fleet runs thousands of queries.

    Raises:
        StoreError: the file is missing, or the database is not supported.
    """
    path = sqlite_path(path_or_url)
    if path is None:
        return _engine(str(path_or_url), is_read_only=True, keeps_connection=keeps_connection)
    require_file(path)

    def connect() -> sqlite3.Connection:
        return connect_read_only(path)

    return create_engine("sqlite://", creator=connect, poolclass=NullPool)


def reader_of(connection: Connection) -> Reader:
    """Return a reader in the open transaction of a connection."""

    def fetch(sql: str, values: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        result = connection.exec_driver_sql(sql, dict(values))
        return list(result.keys()), result.all()

    return Reader(fetch, is_server=connection.dialect.name == _SERVER)


@contextlib.contextmanager
def reading_server(engine: Engine) -> Iterator[Reader]:
    """Open a server's history for one short read.

    Raises:
        StoreError: the database cannot be read; raised on entry or inside the block.
    """
    try:
        with engine.connect() as connection:
            yield reader_of(connection)
    except SQLAlchemyError as error:
        raise StoreError(f"cannot read the history: {short_message(error)}") from None


def create_tables(connection: Connection) -> None:
    """Create the tables in an empty database, in the open transaction.

    Migrations are used only for upgrades, because importing Alembic takes longer than the rest of a first start.
    """
    _set_application_id(connection)
    metadata.create_all(connection)
    revisions = Table("alembic_version", MetaData(), Column("version_num", String(32), nullable=False))
    revisions.append_constraint(PrimaryKeyConstraint("version_num", name="alembic_version_pkc"))
    revisions.create(connection)
    connection.execute(insert(revisions), {"version_num": SCHEMA_REVISION})


def migrate(connection: Connection, revision: str = "head") -> None:
    """Upgrade an earlier schema to this version's, or to a given earlier revision, in the open transaction."""
    logging.getLogger("alembic").setLevel(logging.WARNING)  # before the import, which logs
    from alembic import command  # noqa: PLC0415  slow to import, needed only for an outdated schema
    from alembic.config import Config  # noqa: PLC0415  as above

    _set_application_id(connection)
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def _set_application_id(connection: Connection) -> None:
    """Mark an SQLite file as a history database."""
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")


def check_after_unclean_stop(engine: Engine, path: Path) -> None:
    """Check the integrity of a database whose last writer was killed and left a write-ahead log.

    Raises:
        DatabaseError: the database is corrupt.
    """
    if wal_bytes(path) == 0:
        return
    with engine.connect() as connection:
        found = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
    if found != "ok":
        raise DatabaseError(None, None, sqlite3.DatabaseError(f"database disk image is malformed: {found}"))


def wal_bytes(path: Path) -> int:
    """Return the size of the write-ahead log of a database, 0 without one."""
    try:
        return path.with_name(path.name + "-wal").stat().st_size
    except OSError:
        return 0


def move_aside(path: Path) -> Path:
    """Rename a corrupt database with its -wal and -shm files; return the new path."""
    stamp = datetime.now(tz=UTC).strftime("%Y%m%dT%H%M%S")
    moved = path.with_name(f"{path.name}.corrupt-{stamp}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(moved.with_name(moved.name + suffix))
    return moved


def _engine(url: str, *, is_read_only: bool = False, keeps_connection: bool = False) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != _SERVER:
            raise StoreError(
                f"{_printable(url)}: {parsed.get_backend_name()} is not supported; valid are the path of an SQLite"
                f" file, sqlite:////ABSOLUTE/PATH and {_SERVER}://USER:PASSWORD@HOST/DATABASE"
            )
        if parsed.drivername == _SERVER:
            parsed = parsed.set(drivername="postgresql+psycopg")
        options = {"postgresql_readonly": True} if is_read_only else {}
        pool: dict[str, Any] = {"pool_size": 1} if keeps_connection else {"poolclass": NullPool}
        return create_engine(parsed, execution_options=options, **pool)
    except ImportError as error:
        raise StoreError(f"{_printable(url)}: {error}; pip install 'gpuenergyd[postgresql]'") from None
    except SQLAlchemyError as error:
        raise StoreError(f"{_printable(url)} is not a database URL: {short_message(error)}") from None


def _printable(url: str) -> str:
    """Return a URL for messages: quoted, without the password."""
    try:
        return repr(make_url(url).render_as_string(hide_password=True))
    except ArgumentError:
        return "the database URL"
