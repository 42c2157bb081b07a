"""Output of the commands: JSON on one line for scripts, a Rich console for people. Imports neither Typer nor Rich."""

import dataclasses
import json
import sys
from collections.abc import Iterable
from datetime import date
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def json_text(value: object) -> str:
    """Return a value made of dataclasses, tuples and plain values as one line of JSON; None becomes null."""
    return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False)


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.write(json_text(value) + "\n")
    sys.stdout.flush()


def people_console() -> "Console":
    """Return a console for tables and text; piped output has no colours and keeps paths on one line."""
    from rich.console import Console  # noqa: PLC0415  commands that print JSON start faster without it

    return Console(soft_wrap=False, highlight=False)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines of text without interpreting markup."""
    console = people_console()
    for line in lines:
        console.print(line, markup=False, highlight=False)


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
