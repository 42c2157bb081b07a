"""The commands, by name; a module is loaded only when its command runs, or when all are to be listed."""

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from gpuenergyd import __version__

_MODULES = {
    "demo": "demo",
    "serve": "serve",
    "run": "run",
    "status": "status",
    "report": "report",
    "dashboard": "dashboard",
    "plan": "plan",
    "explain": "explain",
    "policies": "policies",
    "lock": "leases",
    "limit": "leases",
    "restore": "restore",
    "doctor": "doctor",
    "install": "install",
    "uninstall": "install",
    "carbon": "carbon",
}
"""The module of this folder that holds each command, in the order in which help lists them."""


def command_line(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line: with the one command that the arguments begin with, or with all of them."""
    app = typer.Typer(
        name="gpuenergyd",
        help="Make GPU training use less energy at the same speed.",
        epilog="Exit codes: 0 fine, 1 failed, 2 usage, 3 daemon not running, 4 degraded.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    first = arguments[0] if arguments else None
    wanted = [first] if first in _MODULES else [] if first == "--version" else [*_MODULES]
    for name in wanted:
        command = getattr(import_module(f"gpuenergyd.cli.{_MODULES[name]}"), name)
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        else:
            app.command(name)(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gpuenergyd {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Make GPU training use less energy at the same speed."""
