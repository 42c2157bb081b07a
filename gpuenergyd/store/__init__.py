"""The history database: jobs, iterations, plans, energy, carbon intensities and the audit log."""

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
    """Import the writer on first use, because reading the history must not load SQLAlchemy."""
    if name in {"HistoryWriter", "WriterOptions", "WriterStatus"}:
        return getattr(import_module("gpuenergyd.store.writing.writer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
