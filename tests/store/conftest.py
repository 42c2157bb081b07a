"""Fixtures that run a test on SQLite and on PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.store import HistoryWriter, WriterOptions
from tests.support.postgresql import PostgresqlServer, postgresql_server


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    with postgresql_server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return where a history may be written, as a path or URL."""
    if request.param == "sqlite":
        return str(tmp_path / "state" / "history.sqlite3")
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.new_database()


@pytest.fixture
def other_place(place: str, request: pytest.FixtureRequest) -> str:
    """Return a second one, of the same kind."""
    if "://" not in place:
        return str(Path(place).with_name("other.sqlite3"))
    server: PostgresqlServer = request.getfixturevalue("postgresql")
    return server.new_database()


@pytest.fixture
def writer(place: str) -> Iterator[HistoryWriter]:
    writer = HistoryWriter(place, WriterOptions(batch_s=0.01))
    writer.start()
    yield writer
    writer.close()
