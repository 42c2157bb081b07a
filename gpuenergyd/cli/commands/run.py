"""`gpuenergyd run -- torchrun train.py`: start a training program so that it joins by itself."""

import os
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

_LAUNCHERS = "gpuenergyd.launchers"


def run(
    *,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="The program, after --.")],
    job: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the job is called; by default the script's name.")
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Clock policy; by default the daemon's.")] = None,
    max_slowdown_ratio: Annotated[
        float | None,
        typer.Option(
            "--max-slowdown",
            "--max-slowdown-ratio",
            min=0.0,
            metavar="RATIO",
            help="How much slower than un-tuned it may become: 0.05 is 5 %.",
        ),
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="How many iterations it will have, if that is known.")
    ] = None,
    hours: Annotated[
        float | None, typer.Option(min=0.0, metavar="H", help="Instead: how many hours it would train at full speed.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="When it has to have ended, e.g. 2027-01-31T08:00.")
    ] = None,
    socket: Annotated[Path | None, typer.Option(metavar="PATH", help="The daemon's socket.")] = None,
) -> int:
    """Run a training program unchanged and let it join the daemon.

    Pipelines of torch.distributed.pipelining and DeepSpeed and trainers of Lightning and Hugging Face join at their
    first step. Without a daemon the program runs as if started without this command. Who says how long the job is
    lets its slowdown budget be planned to its end; otherwise the daemon keeps it over windows of days.
    """
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415  every other command starts without it
    from gpuenergyd.client.length import (  # noqa: PLC0415
        DEADLINE_VARIABLE,
        HOURS_VARIABLE,
        ITERATIONS_VARIABLE,
        utc_text,
    )
    from gpuenergyd.errors import UsageError  # noqa: PLC0415

    if deadline is not None and utc_text(deadline) is None:
        raise UsageError(f"--deadline {deadline!r} is no date and time, e.g. 2027-01-31T08:00 or 2027-01-31T08:00Z")
    environ = dict(os.environ)
    wishes = {
        "GPUENERGYD_JOB": job,
        "GPUENERGYD_JOB_POLICY": policy,
        "GPUENERGYD_JOB_MAX_SLOWDOWN_RATIO": max_slowdown_ratio,
        ITERATIONS_VARIABLE: iterations,
        HOURS_VARIABLE: hours or None,
        DEADLINE_VARIABLE: utc_text(deadline),
        "GPUENERGYD_SOCKET": socket.absolute() if socket is not None else None,
    }
    environ.update({name: str(value) for name, value in wishes.items() if value is not None})
    if not Path(found := find_socket_path(environ=environ)).exists():
        typer.echo(f"gpuenergyd: no daemon has a socket at {found}; {command[0]} runs unmanaged", err=True)
    for launcher in entry_points(group=_LAUNCHERS):
        environ = launcher.load()(environ)
    try:
        os.execvpe(command[0], command, environ)  # noqa: S606  the user's own program, and the point of the command
    except OSError as error:
        raise UsageError(f"{command[0]!r} cannot be run: {error.strerror}; give a program and its arguments") from None
