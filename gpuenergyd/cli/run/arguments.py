"""Arguments and help of `gpuenergyd run`, parsed with the standard library: a plain install has no Typer."""

import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, SOCKET_HELP, checked_slowdown
from gpuenergyd.client.environment import utc_text
from gpuenergyd.errors import UsageError

RUN_HELP = """Run an unmodified training program.

Pipelines of torch.distributed.pipelining, DeepSpeed and Megatron-core, and trainers of Lightning and Hugging Face,
attach to the daemon at their first step, other loops of torch after some optimizer steps. --job, --policy,
--max-slowdown and --allow-reorder hold unless the program passes its own values.
Without a daemon the program runs as usual. With --iterations, --hours or --deadline the slowdown budget is planned to
the end of the job; otherwise it is kept over windows of days.

Examples:
    gpuenergyd run python3 train.py
    gpuenergyd run --job gpt --max-slowdown 0.05 -- torchrun --nproc-per-node 4 train.py
    gpuenergyd run --deadline 2027-01-31T08:00 -- deepspeed train.py
"""
COMMAND_METAVAR, COMMAND_HELP = "COMMAND", "Program and its arguments."
HELP_FLAGS = ("-h", "--help")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A program to start and the options of its job; None for options that were not given."""

    command: tuple[str, ...]
    job: str | None = None
    policy: str | None = None
    max_slowdown_ratio: float | None = None
    iterations: int | None = None
    hours: float | None = None
    deadline: str | None = None
    """In UTC."""
    socket: Path | None = None
    allow_reorder: bool | None = None


@dataclass(frozen=True, slots=True)
class RunOption:
    """An option of the command: its flag, the name and help text of its value, and the conversion of that value.

    An option with an empty `metavar` takes no value.
    """

    flag: str
    metavar: str
    help: str
    convert: Callable[[str], object] = str


def _iterations(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--iterations {text!r}: must be a whole number of at least 1")
    return int(text)


def _hours(text: str) -> float:
    hours = _number(text)
    if hours is None or hours <= 0:
        raise UsageError(f"--hours {text!r}: must be a number greater than 0")
    return hours


def _slowdown(text: str) -> float | None:
    try:
        return checked_slowdown(float(text))
    except ValueError:
        raise UsageError(f"--max-slowdown {text!r}: must be a ratio from 0 to 1, e.g. 0.05 for 5 %") from None


def _deadline(text: str) -> str:
    deadline = utc_text(text)
    if deadline is None:
        raise UsageError(f"--deadline {text!r}: must be a date and time, e.g. 2027-01-31T08:00 or 2027-01-31T08:00Z")
    return deadline


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None


RUN_OPTIONS: Mapping[str, RunOption] = {
    "job": RunOption("--job", "NAME", "Job name [default: the script's name]."),
    "policy": RunOption("--policy", "NAME", "Clock policy [default: the daemon's]."),
    "max_slowdown_ratio": RunOption("--max-slowdown", "RATIO", MAX_SLOWDOWN_HELP, _slowdown),
    "iterations": RunOption("--iterations", "N", "Length of the job in iterations.", _iterations),
    "hours": RunOption("--hours", "H", "Length of the job in hours at full speed.", _hours),
    "deadline": RunOption("--deadline", "TIME", "Latest end of the job, e.g. 2027-01-31T08:00.", _deadline),
    "allow_reorder": RunOption(
        "--allow-reorder",
        "",
        "Allow plans that split backwards and run weight gradients later, where that fits in memory; losses stay equal"
        " bit for bit.",
        bool,
    ),
    "socket": RunOption("--socket", "PATH", SOCKET_HELP, lambda text: Path(text).absolute()),
}
"""The options by their field in `RunRequest`, in the order of the help."""


def run_request(command: Sequence[str], values: Mapping[str, str | None]) -> RunRequest:
    """Return the request for a command, given the text of each option by field.

    Raises:
        UsageError: no command, or an invalid value.
    """
    if not command:
        raise UsageError("no program to run; see 'gpuenergyd run --help'")
    converted: dict[str, Any] = {
        field: RUN_OPTIONS[field].convert(text) for field, text in values.items() if text is not None
    }
    return RunRequest(command=tuple(command), **converted)


def parse_run_arguments(arguments: Sequence[str]) -> RunRequest | None:
    """Return the parsed arguments that follow `gpuenergyd run`, None if they ask for help.

    Options end at `--` or at the first word that is no option; from there on, all words belong to the program.

    Raises:
        UsageError: an unknown option, an option without its value, an invalid value, or no program.
    """
    fields = {option.flag: field for field, option in RUN_OPTIONS.items()}
    values: dict[str, str | None] = {}
    remaining = list(arguments)
    while remaining and remaining[0].startswith("-"):
        flag, equals, value = remaining.pop(0).partition("=")
        if flag == "--":
            break
        if flag in HELP_FLAGS:
            return None
        if flag not in fields:
            raise UsageError(f"no such option: {flag}; see 'gpuenergyd run --help'")
        if not RUN_OPTIONS[fields[flag]].metavar:
            if equals:
                raise UsageError(f"{flag} takes no value; see 'gpuenergyd run --help'")
            value = flag
        elif not equals:
            if not remaining:
                raise UsageError(f"{flag} needs a value; see 'gpuenergyd run --help'")
            value = remaining.pop(0)
        values[fields[flag]] = value
    return run_request(remaining, values)


def print_run_help() -> int:
    """Print the help of the command; return the exit code."""
    sys.stdout.write(run_help())
    return 0


def run_help() -> str:
    """Return the help of the command, as wide as the terminal, at most 80 columns."""
    width = max(min(shutil.get_terminal_size().columns, 80) - 2, 50)
    text, _, examples = RUN_HELP.partition("Examples:\n")
    options = [(f"{option.flag} {option.metavar}".rstrip(), option.help) for option in RUN_OPTIONS.values()]
    sections = [
        f"Usage: gpuenergyd run [OPTIONS] {COMMAND_METAVAR}...",
        *(
            textwrap.indent(textwrap.fill(paragraph, width - 2, break_on_hyphens=False), "  ")
            for paragraph in text.strip().split("\n\n")
        ),
        "Arguments:\n" + _help_rows([(COMMAND_METAVAR, f"{COMMAND_HELP}  [required]")], width),
        "Options:\n" + _help_rows([*options, (", ".join(HELP_FLAGS), "Show this message and exit.")], width),
        "Examples:\n" + textwrap.indent(textwrap.dedent(examples).rstrip(), "  "),
    ]
    return "\n\n".join(sections) + "\n"


def _help_rows(rows: Sequence[tuple[str, str]], width: int) -> str:
    column = max(len(usage) for usage, _ in rows) + 2
    lines = []
    for usage, text in rows:
        first, *rest = textwrap.wrap(text, max(width - column - 2, 10))
        lines += [f"  {usage:{column}}{first}", *(f"  {'':{column}}{line}" for line in rest)]
    return "\n".join(lines)
