"""How commands print: JSON on one line for scripts, tables that fit 80 columns for people."""

from typing import Annotated

import typer

from gpuenergyd.cli.json_text import json_text

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
SocketOption = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="The daemon's socket; else GPUENERGYD_SOCKET, else the system's."),
]


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    typer.echo(json_text(value))
