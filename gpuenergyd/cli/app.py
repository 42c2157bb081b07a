"""The commands, by name; a module is loaded only when its command runs, or when all are to be listed."""

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

TASKS = {
    "Try it": {"demo": "demo.command"},
    "Train": {"run": "commands.run"},
    "See what happens": {
        "status": "commands.status",
        "report": "commands.report",
        "dashboard": "commands.dashboard",
        "otlp": "commands.otlp",
    },
    "Plan": {
        "plan": "plan.command",
        "explain": "plan.explain",
        "policies": "commands.policies",
        "carbon": "carbon.command",
    },
    "Run a host": {
        "serve": "commands.serve",
        "doctor": "doctor.command",
        "restore": "commands.restore",
        "lock": "commands.manual_leases",
        "limit": "commands.manual_leases",
    },
    "Set up a host": {"install": "install.command", "uninstall": "install.command"},
}
"""What people come to do, and the module of this folder that holds each command for it; help lists them so."""

_MODULES = {command: module for commands in TASKS.values() for command, module in commands.items()}


class _ByTask(TyperGroup):
    """Lists its commands in help by what they are for."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  the library's signature
        """Write a section for each task, with the same columns in all of them."""
        name_width = max(map(len, _MODULES))
        text_width = formatter.width - 6 - name_width
        for task, names in TASKS.items():
            found = [self.commands[name] for name in names if name in self.commands]
            rows = [(str(c.name).ljust(name_width), c.get_short_help_str(text_width)) for c in found]
            if rows:
                with formatter.section(task):
                    formatter.write_dl(rows)


def command_line(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line: with the one command that the arguments begin with, or with all of them."""
    app = typer.Typer(
        name="gpuenergyd",
        cls=_ByTask,
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
        from gpuenergyd.cli.help.versions import version_lines  # noqa: PLC0415  no other command looks at what is installed

        typer.echo("\n".join(version_lines()))
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and what is installed.",
        ),
    ] = False,
) -> None:
    """Make GPU training use less energy at the same speed."""
