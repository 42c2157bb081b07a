"""Tables of plugins in the history database: created beside ours, on SQLite and PostgreSQL alike."""

from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, Table

from docs.site.house_map import ROOT
from gpuenergyd.errors import StoreError
from gpuenergyd.store import HistoryWriter, WriterOptions, open_history
from gpuenergyd.store.plugin_tables import open_plugin_tables
from gpuenergyd.store.schema import jobs
from tests.support.documents import blocks

PAGE = ROOT / "docs" / "how-to" / "write-a-plugin.md"


def test_the_tables_of_the_documents_keep_their_rows_beside_a_history(place: str) -> None:
    (text,) = (block.text for block in blocks(PAGE) if "open_plugin_tables" in block.text)
    names: dict[str, object] = {}
    exec(text, names)
    note, notes = names["note"], names["notes"]
    assert callable(note)
    assert callable(notes)

    note(place, "GPU-0", "loud fan")
    writer = HistoryWriter(place, WriterOptions(batch_s=0.01))
    writer.start()
    assert writer.flush(30.0)
    writer.close()
    note(place, "GPU-1", "new")

    assert writer.status().reason is None
    assert notes(place) == {"GPU-0": "loud fan", "GPU-1": "new"}
    with open_history(place) as history:
        assert not history.job_summaries()


def test_a_table_with_the_name_of_one_of_ours_is_refused(tmp_path: Path) -> None:
    tables = MetaData()
    Table(jobs.name, tables)

    with pytest.raises(StoreError, match="table 'jobs' of a plugin has the name of a table of gpuenergyd"):
        open_plugin_tables(tmp_path / "history.sqlite3", tables, busy_timeout_s=1.0)


def test_a_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sqlite3"
    _create_foreign_table(open_plugin_tables(path, MetaData(), busy_timeout_s=1.0))

    with pytest.raises(StoreError, match="unusable schema: foreign"):
        open_plugin_tables(path, MetaData(), busy_timeout_s=1.0)


def _create_foreign_table(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql("DROP TABLE alembic_version")
        connection.exec_driver_sql("PRAGMA application_id=0")
    engine.dispose()
