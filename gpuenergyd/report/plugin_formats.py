"""Formats of plugins for reports of jobs, such as HTML pages, by the name that `report --format` takes.

A plugin offers a `ReportFormat` of the group `gpuenergyd.report_formats`; only the one that is asked for is imported.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.report.job import JobReport
from gpuenergyd.report.plugin_groups import GroupTable
from gpuenergyd.store import History

FORMATS = "gpuenergyd.report_formats"
_OF_PROJECT = ("html", "trace", "spdx", "model-card")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedJobs:
    """What a format is made from."""

    history: History
    reports: Sequence[JobReport]
    """Reports of the jobs; at least one if the format is for a single training."""
    made_at: datetime
    """Time at which the report was made, in its time zone."""
    note: str = ""
    """A sentence about the whole report."""
    tables: Callable[[], Sequence[GroupTable]] = tuple
    """Reads the figures of plugins that do not come from jobs."""


@dataclass(frozen=True, slots=True)
class ReportFormat:
    """A format of `gpuenergyd report`. Entry points: `gpuenergyd.report_formats`."""

    write: Callable[[ReportedJobs], str]
    """Returns the text, or raises UsageError if these jobs have none."""
    is_of_one_training: bool = False
    """Whether the format needs `--job`."""


def format_names() -> list[str]:
    """Return the names of installed formats."""
    from importlib.metadata import entry_points  # noqa: PLC0415  slow, and only plugins' formats need it

    return [point.name for point in entry_points(group=FORMATS)]


def plugin_format(name: str, *, own: Sequence[str] = ()) -> ReportFormat:
    """Return an installed format.

    Raises:
        UsageError: no installed package has it; `own` are names that are valid besides.
        GpuEnergyError: it cannot be loaded.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415  as above

    for point in entry_points(group=FORMATS, name=name):
        try:
            found: ReportFormat = point.load()
        except Exception as error:  # a plugin's import may fail in any way
            raise GpuEnergyError(f"format {name!r} ({point.value}) cannot be loaded: {error}") from error
        return found
    if name in _OF_PROJECT:
        raise UsageError(f"--format {name}: its plugin gpuenergyd_formats is not installed")
    valid = ", ".join(f"'{valid}'" for valid in (*own, *format_names()))
    raise UsageError(f"--format {name[:40]!r} is not one of {valid}")
