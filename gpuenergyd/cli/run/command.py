"""`gpuenergyd run` as declared for the list of commands, manual pages and completions.

Its arguments are parsed by the module `arguments` instead, so that the command runs without Typer.
"""

from typing import Annotated

import typer

from gpuenergyd.cli.run.arguments import COMMAND_HELP, COMMAND_METAVAR, RUN_HELP, RUN_OPTIONS, run_request
from gpuenergyd.cli.run.program import run_program


def _option(field: str) -> typer.models.OptionInfo:
    option = RUN_OPTIONS[field]
    info: typer.models.OptionInfo = typer.Option(option.flag, metavar=option.metavar or None, help=option.help)
    return info


def run(  # noqa: PLR0913  one per option
    *,
    command: Annotated[list[str], typer.Argument(metavar=COMMAND_METAVAR, help=COMMAND_HELP)],
    job: Annotated[str | None, _option("job")] = None,
    policy: Annotated[str | None, _option("policy")] = None,
    max_slowdown_ratio: Annotated[str | None, _option("max_slowdown_ratio")] = None,
    iterations: Annotated[str | None, _option("iterations")] = None,
    hours: Annotated[str | None, _option("hours")] = None,
    deadline: Annotated[str | None, _option("deadline")] = None,
    allow_reorder: Annotated[bool, _option("allow_reorder")] = False,
    socket: Annotated[str | None, _option("socket")] = None,
) -> int:
    """Run an unmodified training program."""
    values = {
        "job": job,
        "policy": policy,
        "max_slowdown_ratio": max_slowdown_ratio,
        "iterations": iterations,
        "hours": hours,
        "deadline": deadline,
        "allow_reorder": "yes" if allow_reorder else None,
        "socket": socket,
    }
    return run_program(run_request(command, values))


run.__doc__ = RUN_HELP
