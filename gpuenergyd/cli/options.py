"""Options that several commands share."""

from typing import Annotated

import typer

from gpuenergyd.core.policy_api.target import LARGE_SLOWDOWN_RATIO, slowdown_problem
from gpuenergyd.errors import UsageError

MAX_SLOWDOWN_HELP = "Allowed slowdown against full speed, 0 to 1; 0.05 is 5 %."
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Show what would be done and change nothing.")]
SocketOption = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="Daemon socket [default: GPUENERGYD_SOCKET or the system's]."),
]
DatabaseOption = Annotated[
    str | None, typer.Option("--database", metavar="PATH|URL", help="History to read [default: the daemon's].")
]


def checked_slowdown(ratio: float | None) -> float | None:
    """Return the value of --max-slowdown, or raise UsageError if it is out of range."""
    if ratio is not None and (problem := slowdown_problem(ratio)) is not None:
        raise UsageError(f"--max-slowdown {problem}")
    return ratio


MaxSlowdownOption = Annotated[
    float | None,
    typer.Option("--max-slowdown", callback=checked_slowdown, metavar="RATIO", help=MAX_SLOWDOWN_HELP),
]


def warn_of_large_slowdown(ratio: float | None) -> None:
    """Print a warning if a permitted slowdown is so large that it is more likely a mistake."""
    if ratio is not None and ratio > LARGE_SLOWDOWN_RATIO:
        typer.echo(
            f"gpuenergyd: warning: a slowdown of {ratio:g} lets iterations take {100 * ratio:g} % longer; 0.05 is 5 %",
            err=True,
        )
