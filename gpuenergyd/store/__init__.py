"""The history database: jobs, iterations, plans, energy, carbon intensities and the audit log.

database     opens, creates and migrates the database; moves a corrupt file aside
encoding     formats of binary columns
maintenance  compaction, retention, stored summaries, disk space
migrations   schema revisions (Alembic)
readers      database access for queries: SQLite without SQLAlchemy, other databases through it
reading      queries and job summaries
records      the values that are written to the history
schema       the tables
writing      the writer thread and how records become rows
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpuenergyd.store.reading.carbon_queries import StoredIntensity
from gpuenergyd.store.reading.iterations import IterationRow
from gpuenergyd.store.reading.queries import History, open_history
from gpuenergyd.store.reading.summaries import JobSummary
from gpuenergyd.store.records import PlanRecord, TargetRecord

if TYPE_CHECKING:
    from gpuenergyd.store.writing.writer import HistoryWriter, WriterOptions, WriterStatus

__all__ = [
    "History",
    "HistoryWriter",
    "IterationRow",
    "JobSummary",
    "PlanRecord",
    "StoredIntensity",
    "TargetRecord",
    "WriterOptions",
    "WriterStatus",
    "open_history",
]


def __getattr__(name: str) -> Any:
    """Import the writer on first use: reading the history must not load SQLAlchemy."""
    if name in {"HistoryWriter", "WriterOptions", "WriterStatus"}:
        return getattr(import_module("gpuenergyd.store.writing.writer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
