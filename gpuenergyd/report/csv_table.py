"""Jobs and groups as CSV, with the names of the JSON output as columns."""

import csv
import io
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any


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
        return " ".join(f"{name}={part}" for name, part in value.items())
    if isinstance(value, tuple):
        return " ".join(str(part) for part in value)
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value
