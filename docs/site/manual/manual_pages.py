"""Manual pages generated from the command line and the settings: `man gpuenergyd`, `man gpuenergyd-plan`."""

import re
import textwrap
from collections.abc import Iterable, Sequence

from docs.site.manual.command_tree import PROGRAM, CommandText, OptionText, described_commands
from docs.site.manual.settings_text import SettingText, described_settings, environment_variable
from gpuenergyd import __version__

_CONFIG_PAGE = f"{PROGRAM}.toml"
_WIDTH = 66
"""Line width of the source, before roff control characters are escaped."""
_EXIT_STATUS = (
    ("0", "success"),
    ("1", "failure"),
    ("2", "usage error"),
    ("3", "the daemon is not running"),
    ("4", "degraded: the output names the problem"),
)
_FILES = (
    ("/etc/gpuenergyd/config.toml", f"settings, see {_CONFIG_PAGE}(5)"),
    ("/run/gpuenergyd/gpuenergyd.sock", "socket of the daemon, for training programs and the command line"),
    ("/var/lib/gpuenergyd/history.sqlite3", "history of jobs, plans and energy"),
)


def manual_pages() -> dict[str, str]:
    """Return all pages by file name: one for the program, one per command, one for the settings."""
    commands = described_commands()
    program, rest = commands[0], commands[1:]
    names = [command.name.split()[1] for command in rest if len(command.name.split()) == 2]
    pages = {f"{PROGRAM}.1": _program_page(program, rest)}
    for name in names:
        own = [command for command in rest if command.name.split()[1] == name]
        pages[f"{PROGRAM}-{name}.1"] = _command_page(own)
    pages[f"{_CONFIG_PAGE}.5"] = _settings_page(described_settings())
    return pages


def section_folder(page_name: str) -> str:
    """Return the folder of a page below `share/man`: `man1` for `gpuenergyd.1`."""
    return f"man{page_name.rpartition('.')[2]}"


def _program_page(program: CommandText, commands: Sequence[CommandText]) -> str:
    lines = [
        *_head(PROGRAM, 1, program.summary),
        *_section("SYNOPSIS", [_bold(program.usage)]),
        *_section("DESCRIPTION", [_text("A daemon and its command line. Each command has a page of its own.")]),
    ]
    for task in dict.fromkeys(command.task for command in commands):
        lines.append(f".SS {_text(task)}")
        for command in commands:
            _, name, *sub = command.name.split()
            if command.task == task and not sub:
                lines += [".TP", f".BR {PROGRAM}\\-{name} (1)", _text(command.summary)]
    lines += _section("OPTIONS", _options(program.options))
    lines += _section("EXIT STATUS", _terms(_EXIT_STATUS))
    lines += _section("FILES", _terms(_FILES))
    lines += _section("SEE ALSO", [f".BR {_CONFIG_PAGE} (5),", ".BR nvidia\\-smi (1),", ".BR systemctl (1)"])
    return _page(lines)


def _command_page(commands: Sequence[CommandText]) -> str:
    command, *subcommands = commands
    page_name = command.name.replace(" ", "-")
    lines = [*_head(page_name, 1, command.summary), *_section("SYNOPSIS", [_bold(command.usage)])]
    for subcommand in subcommands:
        lines += [".br", _bold(subcommand.usage)]
    lines += _section("DESCRIPTION", [_text(command.summary), *_paragraphs(command.description)])
    lines += _section("OPTIONS", _options((*command.arguments, *command.options)))
    for subcommand in subcommands:
        lines += _section(subcommand.name.upper(), [_text(subcommand.summary), *_paragraphs(subcommand.description)])
        lines += _options((*subcommand.arguments, *subcommand.options))
    examples = [line for each in commands for line in each.examples]
    lines += _section("EXAMPLES", [".nf", *(_escaped(line) for line in examples), ".fi"])
    return _page([*lines, *_section("SEE ALSO", [f".BR {PROGRAM} (1)"])])


def _settings_page(settings: Iterable[SettingText]) -> str:
    lines = [
        *_head(_CONFIG_PAGE, 5, f"settings of {PROGRAM}"),
        *_section("SYNOPSIS", [_text("/etc/gpuenergyd/config.toml")]),
        *_section(
            "DESCRIPTION",
            [
                _text("The file is TOML; an unknown key is an error."),
                _text("Environment variables override this file; command-line options of"),
                f".BR {PROGRAM}\\-serve (1)",
                _text("override both."),
                _text(f"The variable of a key is its upper-case name with the prefix {environment_variable('')}."),
            ],
        ),
        ".SH SETTINGS",
    ]
    for setting in settings:
        for index, (key, example) in enumerate(setting.examples):
            lines += [".TQ" if index else ".TP", _bold(f"{key} = {example}")]
        lines += [_text(line) for line in setting.explanation]
    return _page([*lines, *_section("SEE ALSO", [f".BR {PROGRAM}\\-serve (1)"])])


def _head(name: str, section: int, summary: str) -> list[str]:
    title = f'.TH {_text(name.upper())} {section} "" "{PROGRAM} {__version__}"'
    return [title, ".SH NAME", _escaped(name) + " \\- " + _text(summary.rstrip("."))]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f".SH {_text(title)}", *lines]


def _options(options: Iterable[OptionText]) -> list[str]:
    return _terms((option.usage, option.text) for option in options)


def _terms(pairs: Iterable[tuple[str, str]]) -> list[str]:
    return [line for term, text in pairs for line in (".TP", _bold(term), _text(text))]


def _paragraphs(description: str) -> list[str]:
    return [line for paragraph in description.split("\n\n") if paragraph for line in (".PP", _text(paragraph))]


def _bold(text: str) -> str:
    return f"\\fB{_escaped(text)}\\fR"


def _text(text: str) -> str:
    """Return text wrapped to the line width, with roff control characters escaped."""
    lines = textwrap.wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join(_escaped(line) for line in lines)


def _escaped(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "").replace('"', "\\(dq")
    return re.sub(r"^([.'])", r"\\&\1", escaped)


def _page(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"
