"""`gpuenergyd run torchrun train.py`: starts an unmodified training program and attaches it to the daemon."""

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

from gpuenergyd.cli.options import MaxSlowdownOption, SocketOption, warn_of_large_slowdown

_LAUNCHERS = "gpuenergyd.launchers"


def run(
    *,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Program and its arguments.")],
    job: Annotated[str | None, typer.Option(metavar="NAME", help="Job name [default: the script's name].")] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Clock policy [default: the daemon's].")] = None,
    max_slowdown_ratio: MaxSlowdownOption = None,
    iterations: Annotated[int | None, typer.Option(min=1, metavar="N", help="Length of the job in iterations.")] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.0, metavar="H", help="Length of the job in hours at full speed.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="Latest end of the job, e.g. 2027-01-31T08:00.")
    ] = None,
    socket: SocketOption = None,
) -> int:
    """Run an unmodified training program.

    Pipelines of torch.distributed.pipelining and DeepSpeed, and trainers of Lightning and Hugging Face, attach to the
    daemon at their first step, and --job, --policy and --max-slowdown hold unless the program passes its own values.
    Without a daemon the program runs as usual. With --iterations, --hours or --deadline the
    slowdown budget is planned to the end of the job; otherwise it is kept over windows of days.

    Examples:
        gpuenergyd run python3 train.py
        gpuenergyd run --job gpt --max-slowdown 0.05 -- torchrun --nproc-per-node 4 train.py
        gpuenergyd run --deadline 2027-01-31T08:00 -- deepspeed train.py
    """
    from gpuenergyd.client.environment import (  # noqa: PLC0415
        DEADLINE_VARIABLE,
        HOURS_VARIABLE,
        ITERATIONS_VARIABLE,
        JOB_VARIABLE,
        MAX_SLOWDOWN_VARIABLE,
        POLICY_VARIABLE,
        find_socket_path,
        utc_text,
    )
    from gpuenergyd.errors import UsageError  # noqa: PLC0415

    if deadline is not None and utc_text(deadline) is None:
        raise UsageError(
            f"--deadline {deadline!r}: must be a date and time, e.g. 2027-01-31T08:00 or 2027-01-31T08:00Z"
        )
    warn_of_large_slowdown(max_slowdown_ratio)
    environ = dict(os.environ)
    variables = {
        JOB_VARIABLE: job,
        POLICY_VARIABLE: policy,
        MAX_SLOWDOWN_VARIABLE: max_slowdown_ratio,
        ITERATIONS_VARIABLE: iterations,
        HOURS_VARIABLE: hours or None,
        DEADLINE_VARIABLE: utc_text(deadline),
        "GPUENERGYD_SOCKET": Path(socket).absolute() if socket is not None else None,
    }
    environ.update({name: str(value) for name, value in variables.items() if value is not None})
    if not Path(found := find_socket_path(environ=environ)).exists():
        typer.echo(f"gpuenergyd: no daemon socket at {found}; running {command[0]} without it", err=True)
    for launcher in entry_points(group=_LAUNCHERS):
        environ = launcher.load()(environ)
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606  runs the user's program
    except OSError as error:
        raise UsageError(f"cannot run {command[0]!r}: {error.strerror}") from None
