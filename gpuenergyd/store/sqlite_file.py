"""Reads SQLite files with the standard library only, because without SQLAlchemy a report starts in half the time."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gpuenergyd.errors import StoreError
from gpuenergyd.store.reader import Reader, short_message

_BUSY_TIMEOUT_S = 5.0


@contextmanager
def reading_file(path: Path, *, has_no_writer: bool = False) -> Iterator[Reader]:
    """Open an SQLite file for one short read, while the writer runs or afterwards.

    Raises:
        StoreError: the file cannot be read; raised on entry or inside the block.
    """
    try:
        with closing(connect_read_only(path, has_no_writer=has_no_writer)) as connection:

            def fetch(sql: str, values: Mapping[str, Any]) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
                cursor = connection.execute(sql, values)
                return [column[0] for column in cursor.description], cursor.fetchall()

            yield Reader(fetch)
    except sqlite3.Error as error:
        raise StoreError(f"cannot read the history: {short_message(error)}") from None


def require_file(path: Path) -> None:
    """Check that a history is there; raise StoreError if it is not, or this user may not look."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"no history at {path}") from None
    except OSError as error:
        raise StoreError(f"cannot read the history {path}: {error.strerror}") from None
    if not path.is_file():
        raise StoreError(f"no history at {path}")


def connect_read_only(path: Path, *, has_no_writer: bool = False) -> sqlite3.Connection:
    """Connect to an SQLite file; without a writer, SQLite's auxiliary files are not created either."""
    # In a read-only folder SQLite cannot create the files that WAL mode needs. If there is no -wal file, there is no
    # writer, and the database file can be read on its own.
    uri = f"file:{quote(str(path.absolute()))}?mode=ro"
    if has_no_writer and not path.with_name(path.name + "-wal").exists():
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


def plain_sqlite_path(path_or_url: str | Path) -> Path | None:
    """Return the path given as a path or a plain `sqlite:///` URL, None for any other URL."""
    if isinstance(path_or_url, Path) or "://" not in path_or_url:
        return Path(path_or_url)
    name = path_or_url.removeprefix("sqlite:///")
    is_plain = name not in {path_or_url, "", ":memory:"} and "?" not in name and "%" not in name
    return Path(name) if is_plain else None
