"""Options that `gpuenergyd plan` and `gpuenergyd explain` share."""

from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, checked_slowdown
from gpuenergyd.cli.plan.inputs import DEFAULT_SCHEDULE
from gpuenergyd.core.pipeline.schedules import SCHEDULES

DEFAULT_POLICY = "bubble-aware"
FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="A profile CSV or an instance JSON.")]
ScheduleOption = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"{', '.join(SCHEDULES)} [default: {DEFAULT_SCHEDULE}]")
]
MicrobatchesOption = Annotated[int | None, typer.Option(metavar="M", help="Microbatches per iteration.")]
ChunksOption = Annotated[
    int | None, typer.Option(metavar="V", help="Stages per GPU, for schedules that allow several.")
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
LatencyOption = Annotated[float | None, typer.Option(metavar="S", help="Latency between stages in seconds.")]
PolicyOption = Annotated[str, typer.Option(metavar="NAME", help="Policy whose planner to use.")]
