"""Every command with its options, extracted from Typer for the manual pages and the online reference."""

from dataclasses import dataclass
from functools import cache
from typing import Any

from gpuenergyd.cli.app import all_commands, command_line
from gpuenergyd.cli.command_help import DocumentedCommand, DocumentedGroup, help_rows

PROGRAM = "gpuenergyd"


@dataclass(frozen=True, slots=True)
class OptionText:
    """An option or argument: its usage, such as `--seed S`, and its help text."""

    usage: str
    text: str


@dataclass(frozen=True, slots=True)
class CommandText:
    """A command and its help; `name` includes the parents, such as `gpuenergyd carbon now`."""

    name: str
    task: str
    usage: str
    summary: str
    description: str
    arguments: tuple[OptionText, ...]
    options: tuple[OptionText, ...]
    examples: tuple[str, ...]
    """One command line each, some with a comment."""


@cache
def described_commands() -> tuple[CommandText, ...]:
    """Return the program itself, then every command and subcommand in the order of the help."""
    return tuple(_described(command_line(), (PROGRAM,), ""))


def _described(command: Any, path: tuple[str, ...], task: str) -> list[CommandText]:
    context = command.make_context(" ".join(path), [], resilient_parsing=True)
    usage = " ".join(context.get_usage().removeprefix("Usage:").split())
    paragraphs = (command.help or "").strip().split("\n\n")
    summary = " ".join(paragraphs[0].split())
    records = {
        kind: tuple(OptionText(*(" ".join(text.split()) for text in row)) for row in help_rows(command, context, kind))
        for kind in ("argument", "option")
    }
    described = CommandText(
        " ".join(path),
        task,
        usage,
        summary,
        "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs[1:]),
        records["argument"],
        records["option"],
        tuple((command.epilog or "").splitlines()) if isinstance(command, DocumentedCommand | DocumentedGroup) else (),
    )
    found = [described]
    for name, child in getattr(command, "commands", {}).items():
        child_task = task or all_commands()[name].task
        found += _described(child, (*path, name), child_task)
    return found
