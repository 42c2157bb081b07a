"""Entry of a command in the list of commands: what `gpuenergyd --help` shows of it, and the module that defines it.

A plugin provides an entry as an entry point in the group `gpuenergyd.commands`, under the command's name. Listing the
commands loads the entry, so the module that holds it must import nothing slow; the module of the command itself is
imported only to run the command or to show its help.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

COMMAND_GROUP = "gpuenergyd.commands"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command or a group of commands, as the list of commands shows it."""

    task: str
    """Heading under which the list shows the command."""
    module: str
    """The module that defines the command (`_` for `-`): a function that returns the exit code, or a `typer.Typer`."""
    summary: str
    """First line of the command's help."""
    takes_program: bool = False
    """Whether all words after the first argument, options included, belong to a program that the command starts."""

    def load(self, name: str) -> Any:
        """Import the command with this name."""
        return getattr(import_module(self.module), name.replace("-", "_"))


def plugin_commands() -> Mapping[str, CommandEntry]:
    """Return the commands of installed plugins by name; the summary of one that cannot be loaded says why."""
    from importlib.metadata import entry_points  # noqa: PLC0415  takes as long as most commands; theirs needs no search

    found = {}
    for point in entry_points(group=COMMAND_GROUP):
        try:
            entry = point.load()
            if not isinstance(entry, CommandEntry):
                raise TypeError(f"{point.value} is no CommandEntry")  # noqa: TRY301  reported like other failures
            found[point.name] = entry
        except Exception as error:  # noqa: BLE001  a plugin's import may fail in any way, and the list must not
            found[point.name] = CommandEntry("Plugins", point.module, f"Cannot be loaded: {error}")
    return found
