"""Groups of plugins in reports, such as the hours of GPUs by state: figures that do not come from jobs.

A plugin offers a function of the group `gpuenergyd.report_groups`, under the key that `report --group-by` takes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Protocol

from gpuenergyd.errors import GpuEnergyError

GROUPS = "gpuenergyd.report_groups"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of tables and HTML pages."""

    heading: str
    name: str
    """Name of the column's values in the rows."""
    text: Callable[[Any], str] = str
    """Writes a value for people."""
    is_number: bool = False


@dataclass(frozen=True, slots=True)
class GroupTable:
    """The rows of a plugin for a time range; JSON and CSV have all their values, tables those of the columns."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Mapping[str, Any], ...]
    lines: tuple[str, ...] = ()
    """Sentences about the whole, below the table."""


class ReportGroup(Protocol):
    """Reads the rows of a plugin from the history. Entry points: `gpuenergyd.report_groups`."""

    def __call__(self, database: str, *, since: datetime | None, until: datetime | None) -> GroupTable:
        """Return the rows; the database is a path or a URL. Raise StoreError if it cannot be read."""
        ...


def plugin_groups() -> Mapping[str, ReportGroup]:
    """Return the functions of installed plugins by key; those that cannot be loaded raise GpuEnergyError if called."""
    from importlib.metadata import entry_points  # noqa: PLC0415  slow, and only plugins' keys need it

    found: dict[str, ReportGroup] = {}
    for point in sorted(entry_points(group=GROUPS), key=lambda point: point.name):
        try:
            found[point.name] = point.load()
        except Exception as error:  # noqa: BLE001  a plugin's import may fail in any way
            found[point.name] = partial(_refuse, f"{point.name!r} ({point.value}) cannot be loaded: {error}")
    return found


def _refuse(reason: str, *_: object, **__: object) -> GroupTable:
    raise GpuEnergyError(f"report group {reason}")
