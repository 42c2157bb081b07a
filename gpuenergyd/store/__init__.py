"""The history: what jobs ran, what each iteration took and cost, which plans were in force.

database     opens and migrates the database, sets a corrupt one aside
encoding     packed columns of the history
maintenance  keeping the history bounded: compaction, retention, stored summaries, disk space
migrations   schema revisions (Alembic)
readers      readers of the history: SQLite without SQLAlchemy, anything else through it
reading      reading the history: queries, summaries, and readers for SQLite and SQLAlchemy
schema       the tables
writing      writing the history: records, rows and the writer thread
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpuenergyd.store.reading.carbon_queries import StoredIntensity, TargetRow
from gpuenergyd.store.reading.iterations import IterationRow
from gpuenergyd.store.reading.queries import History, PlanRow, open_history
from gpuenergyd.store.reading.summaries import JobSummary

if TYPE_CHECKING:
    from gpuenergyd.store.writing.writer import HistoryWriter, WriterStatus

__all__ = [
    "History",
    "HistoryWriter",
    "IterationRow",
    "JobSummary",
    "PlanRow",
    "StoredIntensity",
    "TargetRow",
    "WriterStatus",
    "open_history",
]


def __getattr__(name: str) -> Any:
    """Load the writer when somebody writes: who only reads starts without it."""
    if name in {"HistoryWriter", "WriterStatus"}:
        return getattr(import_module("gpuenergyd.store.writing.writer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
