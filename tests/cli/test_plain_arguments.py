"""Plain arguments of every command give the same values as Typer's parser; Typer parses all others."""

import shlex
from typing import Any

import pytest

from docs.site.manual.command_tree import described_commands
from gpuenergyd.cli.app import command_line, plain_call
from gpuenergyd.errors import UsageError

TYPERS_OWN = ("run", "prove")
"""Commands that start a program, whose arguments are its own."""
EXAMPLES = [
    example.partition(" # ")[0].removeprefix("gpuenergyd ")
    for command in described_commands()
    for example in command.examples
    if command.name.split()[-1] not in TYPERS_OWN
]
LEFT_TO_TYPER = [
    "report --help", "report -h", "report --nope", "report extra", "report --since", "report --since=1d",
    "report --job --json", "report --json=1", "otlp --protocol pdf", "report --price-per-kwh -1",
    "report --price-per-kwh nan", "report --price-per-kwh dear", "report --price-per-kwh 1e999", "report --", "lock",
    "lock 0 0", "lock 0 12.5", "plan a.csv b.csv", "plan a.csv --microbatches many", "fleet", "fleet nope",
    "fleet --help", "nope", "--version", "prove train.py", "run train.py", "",
]  # fmt: skip


def parsed_by_typer(text: str) -> dict[str, Any]:
    """Return the values that a command gets if Typer parses all of its arguments."""
    command, words = command_line(), shlex.split(text)
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    params: dict[str, Any] = command.make_context("x", words).params
    lists = {name: [*value] or None for name, value in params.items() if isinstance(value, tuple)}
    return params | lists


def parsed_plainly(text: str) -> dict[str, Any] | None:
    call: Any = plain_call(shlex.split(text))
    return None if call is None else call.keywords


def options_with_values() -> list[str]:
    """Return for each parameter of each command a command line with a value of its type."""
    lines = []
    for described in described_commands():
        command, words = command_line(), described.name.split()[1:]
        for word in words:
            command = command.commands[word]
        if hasattr(command, "commands") or words[-1] in TYPERS_OWN:
            continue
        required = [word for each in command.params if each.required for word in given(each)]
        lines += [shlex.join([*words, *required, *given(each)]) for each in command.params if not each.required]
    return lines


def given(parameter: Any) -> list[str]:
    """Return the words that give a parameter a value."""
    first_choice, bar, _ = (parameter.metavar or "").partition("|")
    value = first_choice if bar and first_choice.islower() else str(max(1, parameter.min or 1))
    if "--protocol" in parameter.opts:
        value = "http/json"
    if parameter.param_type_name == "argument":
        return [value]
    return [parameter.opts[-1]] if parameter.is_flag else [parameter.opts[-1], value]


@pytest.mark.parametrize("text", EXAMPLES)
def test_every_example_is_plain_and_parsed_as_typer_parses_it(text: str) -> None:
    assert parsed_plainly(text) == parsed_by_typer(text)


@pytest.mark.parametrize("text", options_with_values())
def test_every_option_is_plain_and_parsed_as_typer_parses_it(text: str) -> None:
    assert parsed_plainly(text) == parsed_by_typer(text)


@pytest.mark.parametrize(
    "text",
    [
        "report",
        "report --since 30d --until 2026-11-21T08:00 --job gpt",
        "report --group-by tag --tag slurm_job_id --format csv --out x.csv",
        "report --price-per-kwh 0.25 --tariff /etc/tariff.toml --database postgresql://h/db --json",
        "report --since 1d --since 2d",
        "plan a.csv --set mode=greedy --set steps=2 --max-slowdown 5e-2",
        "plan a.csv --slowdown .05",
    ],
)
def test_several_options_are_parsed_as_typer_parses_them(text: str) -> None:
    assert parsed_plainly(text) == parsed_by_typer(text)


@pytest.mark.parametrize("text", LEFT_TO_TYPER)
def test_other_arguments_are_left_to_typer(text: str) -> None:
    assert plain_call(shlex.split(text)) is None


def test_a_value_out_of_the_range_of_a_check_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--max-slowdown 1\.5: must be a ratio from 0 to 1"):
        plain_call(["plan", "a.csv", "--max-slowdown", "1.5"])
