"""Help of the commands: `-h`, options without type names, and examples from the docstring of the command."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Context settings of the program and of every command."""
command_group = partial(typer.Typer, no_args_is_help=True, rich_markup_mode=None, context_settings=HELP_OPTIONS)
"""A group without commands, with the settings that all groups share."""
_EXAMPLES = re.compile(r"^Examples:\n", re.MULTILINE)
_TYPE_NAME = re.compile(r" <[^<>]+>$")


class DocumentedCommand(TyperCommand):
    """Command whose help ends with examples, one per line of its epilog."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and the options, without the names of their Python types."""
        for kind in ("argument", "option"):
            if rows := help_rows(self, ctx, kind):
                with formatter.section(f"{kind.capitalize()}s"):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  the library's signature
        """Write the examples as they are: a command that is wrapped cannot be copied."""
        _write_examples(self.epilog, formatter)


class DocumentedGroup(TyperGroup):
    """Group of commands whose help ends with examples, one per line of its epilog."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002  the library's signature
        """Write the examples as they are."""
        _write_examples(self.epilog, formatter)


def add_command(app: typer.Typer, function: Callable[..., int], **context_settings: Any) -> None:
    """Add a command to a program; its help and its examples come from the docstring of the function."""
    text, examples = _split_docstring(inspect.getdoc(function) or "")
    app.command(
        function.__name__.strip("_").replace("_", "-"),
        cls=DocumentedCommand,
        help=text,
        epilog=examples,
        context_settings={**HELP_OPTIONS, **context_settings},
    )(function)


def help_rows(command: Any, context: Any, kind: str) -> list[tuple[str, str]]:
    """Return usage and help text of a command's parameters of a kind: `argument` or `option`."""
    records = [p.get_help_record(context) for p in command.get_params(context) if p.param_type_name == kind]
    return [(_TYPE_NAME.sub("", usage), text) for usage, text in filter(None, records)]


def _split_docstring(docstring: str) -> tuple[str, str]:
    """Return a docstring without its `Examples:` section, and the lines of that section."""
    text, *examples = _EXAMPLES.split(docstring)
    return text.strip(), inspect.cleandoc("\n" + "".join(examples))


def _write_examples(examples: str | None, formatter: Any) -> None:
    if examples:
        with formatter.section("Examples"):
            for line in examples.splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
