"""The history: what jobs ran, what each iteration took and cost, which plans were in force, who changed which clock.

records     what is written, as frozen values
writer      the one thread that writes; its trouble never reaches the control of GPUs
space       a full disk, and the reserve kept for it
queries     what is read, while the daemon runs and after it
schema      the tables
upgrade     bringing a database to this version's schema, by the revisions in migrations/
blobs       spans and plans as compressed JSON
"""

from gpuenergyd.store.queries import History, IterationRow, JobSummary, PlanRow, open_history
from gpuenergyd.store.writer import HistoryWriter, WriterStatus

__all__ = ["History", "HistoryWriter", "IterationRow", "JobSummary", "PlanRow", "WriterStatus", "open_history"]
