"""Options that several commands share."""

from typing import Annotated

import typer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and change nothing.")]
SocketOption = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="Daemon socket [default: GPUENERGYD_SOCKET or the system's]."),
]
DatabaseOption = Annotated[
    str | None, typer.Option("--database", metavar="PATH|URL", help="History to read [default: the daemon's].")
]
