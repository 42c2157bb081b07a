"""How commands print: JSON on one line for scripts, tables that fit 80 columns for people."""

import dataclasses
import json
from datetime import date
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SocketOption = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="The daemon's socket; else GPUENERGYD_SOCKET, else the system's."),
]


def json_text(value: object) -> str:
    """Return a value (dataclasses, tuples, plain values) as one line of JSON; a missing figure is null."""
    return json.dumps(value, default=_plain, separators=(",", ":"), allow_nan=False)


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    typer.echo(json_text(value))


def people_console() -> "Console":
    """Return the console for people: no colour when piped, nothing wrapped in the middle of a path."""
    from rich.console import Console  # noqa: PLC0415  scripts ask for JSON and shall not wait for it

    return Console(soft_wrap=False, highlight=False)


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
