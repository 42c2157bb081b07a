"""Values as one line of JSON, for scripts; without Typer, so that commands that only print it start fast."""

import dataclasses
import json
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Any


def json_text(value: object) -> str:
    """Return a value (dataclasses, tuples, plain values) as one line of JSON; a missing figure is null."""
    return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, date):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no JSON form")
