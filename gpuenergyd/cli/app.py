"""All commands by name, grouped by task; a command's module is imported only when the command or its help is asked."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpuenergyd.cli.command_help import add_command, command_group
from gpuenergyd.cli.plain_arguments import plain_arguments
from gpuenergyd.errors import UsageError


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command in the list: the module in this package that defines it, and its summary."""

    module: str
    summary: str


TASKS: Mapping[str, Mapping[str, CommandEntry]] = {
    "Try it": {
        "demo": CommandEntry("demo.command", "Train on simulated GPUs and report the saving."),
    },
    "Train": {
        "run": CommandEntry("commands.run", "Run an unmodified training program."),
        "prove": CommandEntry("prove.command", "Prove a saving with a pre-registered comparison."),
    },
    "Monitor": {
        "status": CommandEntry("commands.status", "Show GPUs, jobs, plans and health."),
        "report": CommandEntry("commands.report", "Report energy and savings of jobs."),
        "dashboard": CommandEntry("commands.dashboard", "Serve a live web page on 127.0.0.1."),
        "otlp": CommandEntry("commands.otlp", "Export metrics to OpenTelemetry."),
    },
    "Plan": {
        "plan": CommandEntry("plan.command", "Plan a pipeline's clocks from measured tables."),
        "explain": CommandEntry("plan.explain", "Explain each clock of a plan."),
        "policies": CommandEntry("commands.policies", "List policies, or show and manage what past jobs have taught."),
        "carbon": CommandEntry("carbon.command", "Query, forecast and backtest grid carbon intensity."),
    },
    "Operate a host": {
        "serve": CommandEntry("commands.serve", "Run the daemon in the foreground."),
        "job": CommandEntry("job.command", "Change or pause a running job."),
        "config": CommandEntry("commands.config", "Show the daemon's settings and where they come from."),
        "doctor": CommandEntry("doctor.command", "Diagnose this host and suggest fixes."),
        "restore": CommandEntry("commands.restore", "Restore GPU clocks and power limits."),
        "lock": CommandEntry("commands.manual_leases", "Lock a GPU's SM clock."),
        "limit": CommandEntry("commands.manual_leases", "Limit a GPU's power."),
        "budget": CommandEntry("commands.budget", "Show, set and clear the power budget of this host."),
        "fleet": CommandEntry("fleet.command", "Share a power budget between hosts."),
        "calibrate": CommandEntry("calibrate.command", "Measure how long clock changes of idle GPUs take."),
        "release-gpu": CommandEntry("commands.release_gpu", "Let go of a GPU for a reset or a driver upgrade."),
    },
    "Set up a host": {
        "install": CommandEntry("install.command", "Install the daemon as systemd services."),
        "uninstall": CommandEntry("install.command", "Stop and remove the systemd services."),
    },
}
"""Commands by task, in the order of the help. A test compares the summaries with the commands' own."""

_CONTEXT_SETTINGS = {"run": {"allow_interspersed_args": False}, "prove": {"allow_interspersed_args": False}}
"""Settings of a command's parser: what follows the program that a command starts belongs to the program."""
_OWN_HELP = ("help", "-h", "--help")
"""Words after `gpuenergyd help` that ask for the help of that, which is the program's."""
_ENTRIES = {name: entry for commands in TASKS.values() for name, entry in commands.items()}


class _Commands(Mapping[str, Any]):
    """The parsers of all commands by name, each built when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _parser(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_ENTRIES)

    def __len__(self) -> int:
        return len(_ENTRIES)


class _TaskGroup(TyperGroup):
    """The program: a group of commands whose help lists them by task, without loading them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  the library's signature
        """Return the names of all commands, in the order of the help."""
        return [*_ENTRIES]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  the library's signature
        """Write one section per task, with the same column widths in all of them."""
        name_width = max(map(len, _ENTRIES))
        for task, entries in TASKS.items():
            with formatter.section(task):
                formatter.write_dl([(name.ljust(name_width), entry.summary) for name, entry in entries.items()])


def command_line() -> Any:
    """Return the parser of the program, which loads the parser of a command when it is used."""
    app = command_group(
        name="gpuenergyd",
        cls=_TaskGroup,
        help="Reduce the energy of GPU training without slowing it down.",
        epilog="`gpuenergyd help COMMAND` shows the help of a command. Exit codes: 0 success, 1 failure, 2 usage error,"
        " 3 daemon not running, 4 degraded.",
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    return typer.main.get_command(app)


def plain_call(arguments: Sequence[str]) -> Callable[[], int] | None:
    """Return the call of a command whose arguments are plain; None where Typer must parse them."""
    if not arguments or arguments[0] not in _ENTRIES or arguments[0] in _CONTEXT_SETTINGS:
        return None
    command, words = _command(arguments[0]), [*arguments[1:]]
    if isinstance(command, typer.Typer):
        functions = {info.name: info.callback for info in command.registered_commands}
        command = functions.get(words.pop(0)) if words else None
    if command is None or (values := plain_arguments(command, words)) is None:
        return None
    return partial(command, **values)


def print_help(words: list[str]) -> int:
    """Print the help of the program, or of the command that these words name; return the exit code.

    Raises:
        UsageError: there is no such command.
    """
    command = command_line()
    context = command.make_context("gpuenergyd", [], resilient_parsing=True)
    for word in words if {*words}.isdisjoint(_OWN_HELP) else ():
        commands = getattr(command, "commands", {})
        if word not in commands:
            valid = f"valid are: {', '.join(commands)}" if commands else "it has no subcommands"
            raise UsageError(f"no command {word!r} of '{context.command_path}'; {valid}")
        command = commands[word]
        context = command.make_context(word, [], parent=context, resilient_parsing=True)
    typer.echo(command.get_help(context))
    return 0


def _command(name: str) -> Any:
    """Import a command: the function that implements it, or a group of commands."""
    return getattr(import_module(f"gpuenergyd.cli.{_ENTRIES[name].module}"), name.replace("-", "_"))


@cache
def _parser(name: str) -> Any:
    """Return the parser of a command or group of commands."""
    command = _command(name)
    if isinstance(command, typer.Typer):
        return typer.main.get_group(command)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    add_command(app, command, **_CONTEXT_SETTINGS.get(name, {}))
    return typer.main.get_command(app)


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
