"""Options that several commands share."""

from typing import Annotated

import typer

from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, SOCKET_HELP, checked_slowdown

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and change nothing.")]
SocketOption = Annotated[str | None, typer.Option("--socket", metavar="PATH", help=SOCKET_HELP)]
DatabaseOption = Annotated[
    str | None, typer.Option("--database", metavar="PATH|URL", help="History to read [default: the daemon's].")
]
MaxSlowdownOption = Annotated[
    float | None, typer.Option("--max-slowdown", callback=checked_slowdown, metavar="RATIO", help=MAX_SLOWDOWN_HELP)
]
