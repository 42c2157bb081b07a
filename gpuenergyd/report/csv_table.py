"""Jobs and groups as CSV, under the names that JSON uses."""

import csv
import io
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any


def csv_text(figures: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per mapping under the names that JSON uses; a missing figure is an empty field."""
    out = io.StringIO()
    rows = [{key: _cell(value) for key, value in row.items()} for row in figures]
    if rows:
        writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
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
