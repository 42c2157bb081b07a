"""All commands by name, grouped by task; a command's module is imported only to run it or to show its help."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gpuenergyd.cli.command_entry import CommandEntry, plugin_commands
from gpuenergyd.cli.command_help import add_command, command_group
from gpuenergyd.cli.plain_arguments import plain_arguments
from gpuenergyd.errors import UsageError

_OWN: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "Try it": {},  # of plugins
    "Train": {"run": ("run.command", "Run an unmodified training program.")},
    "Monitor": {
        "status": ("commands.status", "Show GPUs, jobs, plans and health."),
        "report": ("commands.report", "Report energy and savings of jobs."),
    },
    "Plan": {"policies": ("commands.policies", "List policies, or show and manage what past jobs have taught.")},
    "Operate a host": {
        "serve": ("commands.serve", "Run the daemon in the foreground."),
        "job": ("job.command", "Change or pause a running job."),
        "config": ("commands.config", "Show the daemon's settings and where they come from."),
        "restore": ("commands.restore", "Restore GPU clocks and power limits."),
        "release-gpu": ("commands.release_gpu", "Let go of a GPU for a reset or a driver upgrade."),
    },
    "Set up a host": {},  # of plugins
}
"""Module and summary of each command of this package, by task, in the order of the help."""
COMMANDS: Mapping[str, CommandEntry] = {
    name: CommandEntry(task, f"gpuenergyd.cli.{module}", summary, takes_program=name == "run")
    for task, commands in _OWN.items()
    for name, (module, summary) in commands.items()
}
_OF_PLUGINS: Mapping[str, str] = {
    "budget": "power", "idle": "idle", "fleet": "fleet", "carbon": "carbon", "prove": "prove", "dashboard": "dashboard",
    "otlp": "otlp", "doctor": "doctor", "calibrate": "doctor", "install": "install", "uninstall": "install",
    "demo": "sim", "evaluate": "sim", "plan": "plan", "explain": "plan",
    "lock": "locks", "limit": "locks",
}  # fmt: skip
"""Commands of the plugins of this project, which may be missing: `gpuenergyd_` and these words are their packages."""
_OWN_HELP = ("help", "-h", "--help")
"""Words after `gpuenergyd help` that ask for the help of the program itself."""


@cache
def all_commands() -> Mapping[str, CommandEntry]:
    """Return the commands of this package and of plugins by name, grouped by task; plugins cannot replace a command."""
    found = {**COMMANDS, **{name: entry for name, entry in plugin_commands().items() if name not in COMMANDS}}
    tasks = list(dict.fromkeys((*_OWN, *(entry.task for entry in found.values()))))
    return dict(sorted(found.items(), key=lambda command: tasks.index(command[1].task)))


def _entry(name: str) -> CommandEntry | None:
    """Return the entry of a command, None if there is none; plugins are searched only for a name not in `COMMANDS`."""
    return COMMANDS.get(name) or all_commands().get(name)


class _Commands(Mapping[str, Any]):
    """The parsers of all commands by name, each built when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _parser(name)

    def __iter__(self) -> Iterator[str]:
        return iter(all_commands())

    def __len__(self) -> int:
        return len(all_commands())


class _TaskGroup(TyperGroup):
    """The program: a group of commands whose help lists them by task, without loading them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = _Commands()

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the parser of a command, None if there is none.

        Raises:
            UsageError: it is a command of a plugin that is not installed.
        """
        found = super().get_command(ctx, cmd_name)
        if found is None and cmd_name in _OF_PLUGINS:
            raise UsageError(f"no command {cmd_name!r}: its plugin gpuenergyd_{_OF_PLUGINS[cmd_name]} is not installed")
        return found

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  the library's signature
        """Return the names of all commands, in the order of the help."""
        return [*all_commands()]

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  the library's signature
        """Write one section per task, with the same column widths in all of them."""
        commands = all_commands()
        name_width = max(map(len, commands))
        for task, names in groupby(commands, lambda name: commands[name].task):
            with formatter.section(task):
                formatter.write_dl([(name.ljust(name_width), commands[name].summary) for name in names])


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
    """Return a call of the command with its arguments; None if they are not plain, so that Typer must parse them."""
    if not arguments or arguments[0].startswith("-"):
        return None
    name, *words = arguments
    entry = _entry(name)
    if entry is None or entry.takes_program:
        return None
    command = entry.load(name)
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


@cache
def _parser(name: str) -> Any:
    """Return the parser of a command or group of commands, or raise KeyError if there is none."""
    entry = _entry(name)
    if entry is None:
        raise KeyError(name)
    command = entry.load(name)
    if isinstance(command, typer.Typer):
        return typer.main.get_group(command)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    add_command(app, command, **({"allow_interspersed_args": False} if entry.takes_program else {}))
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
