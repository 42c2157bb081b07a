"""Entry of a command in the list of commands: what `gpuenergyd --help` shows of it, and the module that defines it.

Plugins offer an entry by an entry point of the group `gpuenergyd.commands`, whose name is that of the command. The list
of commands loads it, so the module that holds the entry must import nothing that takes long; the command's own
module is imported when the command runs or its help is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

COMMAND_GROUP = "gpuenergyd.commands"


@dataclass(frozen=True, slots=True)
class CommandEntry:
    """A command, or a group of commands, in the list."""

    task: str
    """Heading under which the list shows it."""
    module: str
    """Defines it under its name, with `_` for `-`: a function that returns the exit code, or a `typer.Typer`."""
    summary: str
    """First line of its help."""
    takes_program: bool = False
    """Whether words after the first argument belong to a program that the command starts, options included."""

    def load(self, name: str) -> Any:
        """Import the command with this name."""
        return getattr(import_module(self.module), name.replace("-", "_"))


def plugin_commands() -> Mapping[str, CommandEntry]:
    """Return the commands of installed plugins by name; one that cannot be loaded says so in its summary."""
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
