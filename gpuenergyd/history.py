"""The history as plain rows for notebooks and scripts, and as a pandas frame: `history.frame(history.jobs())`.

`database` is the path or URL of the history; by default that of the running daemon, else that of the settings. Instants
`since` and `until` have a time zone; None is the beginning or the end.
"""

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from gpuenergyd.cli.daemon_files import find_database
from gpuenergyd.errors import UsageError
from gpuenergyd.report.job import job_reports
from gpuenergyd.store import open_history

Row: TypeAlias = dict[str, Any]
Database: TypeAlias = str | Path | None


def jobs(
    database: Database = None, *, since: datetime | None = None, until: datetime | None = None, job: str | None = None
) -> list[Row]:
    """Return one row per job that ran in a time range, with energy, saving and emissions; `job` is an ID or a name.

    The fields are those of `gpuenergyd report --json`, see docs/reference/file-formats.md.
    """
    found = find_database() if database is None else None
    with open_history(database or (found.url if found else "")) as history:
        reports = job_reports(history, since=since, until=until, job=job, pue=found.pue if found else 1.0)
        return [report.to_dict() for report in reports]


def iterations(job_id: str, database: Database = None) -> list[Row]:
    """Return one row per iteration of a job that is still stored singly: time, energy, plan and its purpose."""
    with open_history(database or find_database().url) as history:
        return [asdict(row) for row in history.iterations(job_id)]


def energy(database: Database = None, *, since: datetime | None = None, until: datetime | None = None) -> list[Row]:
    """Return one row per GPU, hour and state: `working` for the job `job_id`, or `idle` without one."""
    with open_history(database or find_database().url) as history:
        sums = history.energy_sums(since=since, until=until, by_gpu=True, by_time=True, by_host=True)
    return [{**asdict(s), "job_id": s.job_id or None, "state": "working" if s.job_id else "idle"} for s in sums]


def frame(rows: Sequence[Row]) -> Any:
    """Return rows as a pandas DataFrame; raise UsageError if pandas is not installed."""
    try:
        import pandas as pd  # noqa: PLC0415  only frames need it
    except ImportError:
        raise UsageError("pandas is not installed; install it with: pip install pandas") from None
    return pd.DataFrame.from_records(list(rows))
