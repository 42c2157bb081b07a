"""Jobs and groups as CSV, with the names of the JSON output as columns."""

import csv
import io
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from gpuenergyd.printable import printable_line

_FORMULA_BEGINS = ("=", "+", "-", "@")


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per row; missing values are empty fields."""
    out = io.StringIO()
    cells = [{key: _cell(value) for key, value in row.items()} for row in rows]
    if cells:
        writer = csv.DictWriter(out, fieldnames=list(cells[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(cells)
    return out.getvalue()


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return csv_cell(" ".join(f"{name}={part}" for name, part in value.items()))
    if isinstance(value, tuple):
        return csv_cell(" ".join(str(part) for part in value))
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return csv_cell(value) if isinstance(value, str) else value


def csv_cell(text: str) -> str:
    """Return a text that spreadsheets do not interpret as a formula: an apostrophe is added if it begins like one."""
    line = printable_line(text)
    return f"'{line}" if line.startswith(_FORMULA_BEGINS) else line
