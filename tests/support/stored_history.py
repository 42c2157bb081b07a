"""A history with records of a test's own, written as a daemon writes them."""

from pathlib import Path
from typing import TypeVar

from gpuenergyd.store import HistoryWriter, WriterOptions
from gpuenergyd.store.records import Record
from tests.support.waiting import LIMIT_S

_FLUSH_LIMIT_S = LIMIT_S
PathOrUrl = TypeVar("PathOrUrl", str, Path)


def write_records(path_or_url: PathOrUrl, *records: Record, host: str | None = None) -> PathOrUrl:
    """Write records of a host to a new or existing history and return its path or URL."""
    writer = HistoryWriter(path_or_url, WriterOptions(host=host, batch_s=0.0))
    writer.start()
    for record in records:
        writer.write(record)
    assert writer.flush(_FLUSH_LIMIT_S)
    writer.close()
    return path_or_url
