"""An SQLite history as a file: what lies there is told apart before anything is written to it."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpuenergyd.errors import StoreError
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history
from tests.store.test_history import job


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.sqlite3"


@pytest.fixture
def writer(path: Path) -> Iterator[HistoryWriter]:
    writer = HistoryWriter(path, WriterOptions(batch_s=0.01))
    writer.start()
    yield writer
    writer.close()


def test_the_history_is_read_after_the_writer_in_a_folder_that_cannot_be_written(
    writer: HistoryWriter, path: Path
) -> None:
    writer.write(job())
    writer.close()
    moved = path.with_name("copy.sqlite3")
    moved.write_bytes(path.read_bytes())
    moved.chmod(0o400)

    with open_history(moved) as history:
        found = history.job_summaries()

    assert [summary.job_id for summary in found] == ["j1"]
    assert writer.status().reason is None


def test_a_file_that_is_not_there_says_where_it_was_sought(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no history at .*absent\.sqlite3"):
        open_history(tmp_path / "absent.sqlite3")


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish.sqlite3"
    rubbish.write_bytes(b"no database at all, but long enough to be taken for one" * 40)

    with pytest.raises(StoreError, match="file is not a database"):
        open_history(rubbish)


@pytest.mark.fault(20)
def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.sqlite3"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE bookmarks (url TEXT)")
    connection.close()

    writer = HistoryWriter(foreign)
    writer.start()
    writer.write(job())
    writer.close()

    with pytest.raises(StoreError, match="not a gpuenergyd history"):
        open_history(foreign)
    assert "another program" in (writer.status().reason or "")
    assert writer.status().num_rows_dropped == 1
    connection = sqlite3.connect(foreign)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]
    connection.close()


@pytest.mark.fault(20)
def test_a_newer_schema_is_named_to_readers_and_not_written_to(writer: HistoryWriter, path: Path) -> None:
    writer.write(job())
    writer.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()

    following = HistoryWriter(path)
    following.start()
    following.write(job("j2"))
    following.close()

    with pytest.raises(StoreError, match="newer version of gpuenergyd"):
        open_history(path)
    assert "newer" in (following.status().reason or "")
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
    connection.close()


def test_a_new_history_is_made_without_a_word(tmp_path: Path) -> None:
    code = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from gpuenergyd.store import HistoryWriter, WriterOptions
writer = HistoryWriter(sys.argv[1])
writer.start()
writer.close(60.0)
"""
    made = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "history.sqlite3")], capture_output=True, text=True, check=True
    )

    assert (tmp_path / "history.sqlite3").is_file()
    assert "alembic" not in made.stderr


def test_an_empty_file_is_said_to_be_empty(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite3").touch()

    with pytest.raises(StoreError, match="is empty: no daemon has written a history to it yet"):
        open_history(tmp_path / "history.sqlite3")
