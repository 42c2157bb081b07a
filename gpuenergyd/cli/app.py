"""All commands by name, grouped by task; a command's module is imported only when it runs or when help lists it."""

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpuenergyd.cli.command_help import add_command, command_group

TASKS = {
    "Try it": {"demo": "demo.command"},
    "Train": {"run": "commands.run", "prove": "prove.command"},
    "Monitor": {
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
    "Operate a host": {
        "serve": "commands.serve",
        "job": "job.command",
        "config": "commands.config",
        "doctor": "doctor.command",
        "restore": "commands.restore",
        "lock": "commands.manual_leases",
        "limit": "commands.manual_leases",
        "budget": "commands.budget",
        "fleet": "fleet.command",
        "calibrate": "calibrate.command",
        "release-gpu": "commands.release_gpu",
    },
    "Set up a host": {"install": "install.command", "uninstall": "install.command"},
}
"""Commands by task, in the order of the help, each with its module in this package."""

_CONTEXT_SETTINGS = {"run": {"allow_interspersed_args": False}, "prove": {"allow_interspersed_args": False}}
"""Settings of a command's parser: what follows the program that a command starts belongs to the program."""
_MODULES = {command: module for commands in TASKS.values() for command, module in commands.items()}


class _TaskGroup(TyperGroup):
    """Command group whose help lists the commands by task."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  the library's signature
        """Write one section per task, with the same column widths in all of them."""
        name_width = max(map(len, _MODULES))
        text_width = formatter.width - 6 - name_width
        for task, names in TASKS.items():
            commands = [self.commands[name] for name in names if name in self.commands]
            rows = [(str(c.name).ljust(name_width), c.get_short_help_str(text_width)) for c in commands]
            if rows:
                with formatter.section(task):
                    formatter.write_dl(rows)


def command_line(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line: only the command that `arguments` start with, or all commands."""
    app = command_group(
        name="gpuenergyd",
        cls=_TaskGroup,
        help="Reduce the energy of GPU training without slowing it down.",
        epilog="Exit codes: 0 success, 1 failure, 2 usage error, 3 daemon not running, 4 degraded.",
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    first = arguments[0] if arguments else None
    names = [first] if first in _MODULES else [*_MODULES]
    for name in names:
        command = getattr(import_module(f"gpuenergyd.cli.{_MODULES[name]}"), name.replace("-", "_"))
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        else:
            add_command(app, command, **_CONTEXT_SETTINGS.get(name, {}))
    return app


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from gpuenergyd.cli.versions import print_versions  # noqa: PLC0415  no other command needs it

        print_versions()
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of gpuenergyd and its dependencies.",
        ),
    ] = False,
) -> None:
    """Reduce the energy of GPU training without slowing it down."""
