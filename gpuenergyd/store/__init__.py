"""The history: what jobs ran, what each iteration took and cost, which plans were in force, who changed which clock.

records     what is written, as frozen values
writer      the one thread that writes; its trouble never reaches the control of GPUs
rows        records to rows of tables
series      samples and seconds packed a minute at a time, and series_buffer, where they wait for it
space       a full disk, and the reserve kept for it
retention   what is forgotten, and when; compaction of long jobs' iterations
turns       one host at a time, where many share a history
queries     what is read, while the daemon runs and after it; summaries of jobs from their iterations and job_parts,
            kept_summaries and kept_figures of ended ones, energy_sums of the ledger, carbon_queries of the grid
reading     how it is read: SQLite by the standard library, anything else by engine_reading through SQLAlchemy
schema      the tables
upgrade     bringing a database to this version's schema, by the revisions in migrations/
blobs       spans and plans as compressed JSON
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gpuenergyd.store.carbon_queries import StoredIntensity, TargetRow
from gpuenergyd.store.iterations import IterationRow
from gpuenergyd.store.queries import History, PlanRow, open_history
from gpuenergyd.store.summaries import JobSummary

if TYPE_CHECKING:
    from gpuenergyd.store.writer import HistoryWriter, WriterStatus

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
        return getattr(import_module("gpuenergyd.store.writer"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
