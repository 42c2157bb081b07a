"""Foreign, newer, empty and read-only SQLite files are recognised before anything is written."""

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


def test_a_read_only_copy_of_the_history_can_be_read(writer: HistoryWriter, path: Path) -> None:
    writer.write(job())
    writer.close()
    moved = path.with_name("copy.sqlite3")
    moved.write_bytes(path.read_bytes())
    moved.chmod(0o400)

    with open_history(moved) as history:
        found = history.job_summaries()

    assert [summary.job_id for summary in found] == ["j1"]
    assert writer.status().reason is None


@pytest.mark.parametrize("before", [None, 0o644, 0o666])
def test_others_cannot_read_the_history_nor_its_log(path: Path, before: int | None) -> None:
    if before is not None:
        path.parent.mkdir()
        path.touch()
        path.chmod(before)
    writer = HistoryWriter(path, WriterOptions(batch_s=0.01))
    writer.start()
    writer.write(job())
    assert writer.flush(10)
    reader = sqlite3.connect(path)  # while it is open, SQLite keeps the log
    reader.execute("SELECT count(*) FROM jobs").fetchone()
    writer.write(job("j2"))
    assert writer.flush(10)
    rights = {file.name: file.stat().st_mode & 0o007 for file in path.parent.iterdir()}
    reader.close()
    writer.close()

    assert "history.sqlite3-wal" in rights
    assert set(rights.values()) == {0}


def test_the_error_for_a_missing_file_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no history at .*absent\.sqlite3"):
        open_history(tmp_path / "absent.sqlite3")
    with pytest.raises(StoreError, match=r"cannot read the history .*: File name too long"):
        open_history(tmp_path / ("long" * 99))


def test_a_file_that_is_not_a_database_is_rejected(tmp_path: Path) -> None:
    rubbish = tmp_path / "rubbish.sqlite3"
    rubbish.write_bytes(b"no database at all, but long enough to be taken for one" * 40)

    with pytest.raises(StoreError, match="file is not a database"):
        open_history(rubbish)


@pytest.mark.fault(20)
def test_a_database_of_another_program_is_rejected_and_not_changed(tmp_path: Path) -> None:
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
def test_a_newer_schema_is_reported_to_readers_and_not_changed(writer: HistoryWriter, path: Path) -> None:
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


def test_a_new_history_is_created_without_log_output_of_alembic(tmp_path: Path) -> None:
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


def test_the_error_for_an_empty_file_states_that_it_is_empty(tmp_path: Path) -> None:
    (tmp_path / "history.sqlite3").touch()

    with pytest.raises(StoreError, match="is empty: no daemon has written a history to it yet"):
        open_history(tmp_path / "history.sqlite3")


@pytest.mark.parametrize("url", ["mysql://gpu:secret@db/history", "postgres://gpu:secret@db/history"])
def test_a_database_of_another_kind_is_refused_with_the_valid_kinds(url: str) -> None:
    with pytest.raises(StoreError, match="is not supported; valid are the path of an SQLite file") as refused:
        open_history(url)

    assert "secret" not in str(refused.value)
    assert "pip install" not in str(refused.value)
