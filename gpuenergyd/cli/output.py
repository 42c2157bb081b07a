"""How commands print: JSON on one line for scripts, tables that fit 80 columns for people."""

from typing import TYPE_CHECKING, Annotated

import typer

from gpuenergyd.cli.json_text import json_text

if TYPE_CHECKING:
    from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SocketOption = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="The daemon's socket; else GPUENERGYD_SOCKET, else the system's."),
]


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    typer.echo(json_text(value))


def people_console() -> "Console":
    """Return the console for people: no colour when piped, nothing wrapped in the middle of a path."""
    from rich.console import Console  # noqa: PLC0415  scripts ask for JSON and shall not wait for it

    return Console(soft_wrap=False, highlight=False)
