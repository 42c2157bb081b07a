"""Command-line reference, generated from the command line."""

from collections.abc import Iterable

from docs.site.manual.command_tree import CommandText, OptionText, described_commands
from docs.site.markdown import block, code, page, table


def command_line_page() -> str:
    """Return every command with its options, grouped by task."""
    program, *commands = described_commands()
    parts = [
        (
            "Commands by task. All except `serve`, `run`, `dashboard` and `otlp` accept `--json`. Exit codes: 0"
            " success, 1 failure, 2 usage error, 3 daemon not running, 4 degraded. `gpuenergyd help COMMAND` shows the"
            " help of a command, as its option `--help` does, and `gpuenergyd --install-completion` installs shell"
            " completion. The manual pages have the contents of this page: `man gpuenergyd` in an activated virtual"
            " environment, `man -M .venv/share/man gpuenergyd` elsewhere."
        ),
        (
            "`gpuenergyd run` and `gpuenergyd --version` need Python's standard library only. Every other command needs"
            " the extra `daemon`; without it, it exits with 1 and names the extra. See"
            " [what each installation runs](../how-to/install-on-a-host.md#what-each-installation-runs)."
        ),
        table(("command", "purpose"), (_entry(command) for command in commands)),
        "## Options of the program",
        _options((*program.arguments, *program.options)),
    ]
    for task in dict.fromkeys(command.task for command in commands):
        parts.append(f"## {task}")
        for command in (command for command in commands if command.task == task):
            parts += _command(command)
    return page("Command line", *parts)


def _command(command: CommandText) -> list[str]:
    return [
        f"### {command.name}",
        block(command.usage, "text"),
        command.summary + ("" if command.summary.endswith(".") else "."),
        command.description,
        _options((*command.arguments, *command.options)),
        block("\n".join(command.examples), "sh host") if command.examples else "",
    ]


def _entry(command: CommandText) -> tuple[str, str]:
    return f"[{code(command.name)}](#{command.name.replace(' ', '-')})", command.summary


def _options(options: Iterable[OptionText]) -> str:
    return table(("option", "description"), ((code(option.usage), option.text) for option in options))
