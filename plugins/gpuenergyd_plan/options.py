"""Options that `gpuenergyd plan` and `gpuenergyd explain` share."""

from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, checked_slowdown
from gpuenergyd.core.pipeline.schedules import SCHEDULES
from gpuenergyd.errors import UsageError
from gpuenergyd_plan.instruction_costs import INPUT_GRADIENT_SHARE
from gpuenergyd_plan.tables import AUTO_SCHEDULE, DEFAULT_SCHEDULE

DEFAULT_POLICY = "bubble-aware"
FileArgument = Annotated[
    Path | None, typer.Argument(metavar="[FILE]", help="A profile CSV or an instance JSON; or use --job.")
]
JobOption = Annotated[
    str | None, typer.Option("--job", metavar="JOB", help="Use what was fitted to this running job instead of FILE.")
]
ScheduleOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"{', '.join(SCHEDULES)}, or {AUTO_SCHEDULE}: the planner chooses the order [default: {DEFAULT_SCHEDULE}]",
    ),
]
OrderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="CSV",
        help="Plan this order instead of a schedule's: rows rank,position,instruction,microbatch; and stage, if GPUs"
        " run several.",
    ),
]
MemoryLimitOption = Annotated[
    str | None, typer.Option(metavar="N[,N...]", help="Microbatches that fit in memory: one value, or one per stage.")
]
InputShareOption = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Share of the input gradient in a backward, for tables without input and weight rows"
        f" [default: {INPUT_GRADIENT_SHARE}]",
    ),
]
SplitOverheadOption = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Time and energy that splitting a backward adds to it, for tables without input and weight rows, e.g. 0.03"
        " [default: 0]",
    ),
]
OverlapSavingOption = Annotated[
    float | None,
    typer.Option(
        metavar="RATIO",
        help="Share of the time of a forward and a backward that running them together saves, e.g. 0.1 (combined-1f1b)"
        " [default: 0]",
    ),
]
MicrobatchesOption = Annotated[int | None, typer.Option(metavar="M", help="Microbatches per iteration.")]
ChunksOption = Annotated[
    int | None, typer.Option(metavar="V", help="Stages per GPU, for schedules that allow several, and auto.")
]
ExtraInflightOption = Annotated[
    str | None, typer.Option(metavar="K|auto", help="Allow K extra microbatches in flight (1f1b).")
]
SlowdownOption = Annotated[
    float | None,
    typer.Option("--max-slowdown", "--slowdown", callback=checked_slowdown, metavar="RATIO", help=MAX_SLOWDOWN_HELP),
]
TargetOption = Annotated[float | None, typer.Option(metavar="S", help="Allowed iteration time in seconds instead.")]
BlockingPowerOption = Annotated[float | None, typer.Option(metavar="W", help="Power of a GPU that waits.")]
WaitingPowerOption = Annotated[
    str | None,
    typer.Option(
        metavar="CSV|MODEL",
        help="Power of a GPU that waits by clock: rows frequency,power; or assumed as of a GPU model, e.g. a100-sxm.",
    ),
]
PowerCapOption = Annotated[
    float | None,
    typer.Option(
        "--power-cap-w",
        metavar="W",
        help="Find the fastest plan whose power, of all GPUs together, stays below this at every instant.",
    ),
]
WindowOption = Annotated[
    float | None,
    typer.Option(
        "--window-s", metavar="S", help="With --power-cap-w: cap the mean power of windows this long instead."
    ),
]
FlattestOption = Annotated[
    bool,
    typer.Option(
        "--flattest",
        help="Of the plans that take as long and need at most 0.2 % more energy, choose one whose power swings less"
        " from 0.1 to 20 Hz.",
    ),
]
LatencyOption = Annotated[float | None, typer.Option(metavar="S", help="Latency between stages in seconds.")]
PolicyOption = Annotated[str, typer.Option(metavar="NAME", help="Policy whose planner to use.")]


def file_or_job(file: Path | None, job: str | None) -> Path | None:
    """Return the file to plan from; None if a running job was named instead.

    Raises:
        UsageError: neither or both are given.
    """
    if (file is None) == (job is None):
        raise UsageError("give FILE, a profile CSV or an instance JSON, or --job JOB for a running job, and not both")
    return file
