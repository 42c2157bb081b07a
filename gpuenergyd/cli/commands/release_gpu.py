"""`gpuenergyd release-gpu`: an administrator takes a whole GPU for a reset or a driver upgrade."""

from contextlib import closing
from typing import Annotated, Any

import typer

from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.errors import UsageError

_LIMIT_S = 45.0
"""How long to wait for the daemon, as restoring a GPU may take this long."""


def release_gpu(
    *,
    gpu: Annotated[
        str, typer.Argument(metavar="GPU", help="UUID or index, as `gpuenergyd status` lists them, or all.")
    ],
    reopen: Annotated[bool, typer.Option("--reopen", help="Open the GPU again now.")] = False,
    lifetime_s: Annotated[
        float | None,
        typer.Option("--for", min=1, metavar="SECONDS", help="Open it again after this time [default: 900]."),
    ] = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Let go of a GPU for a reset or a driver upgrade.

    The GPU is restored and its driver handles are closed, as a reset or a MIG change requires. The daemon neither
    reads nor changes it until it is reopened, by --reopen or after the time of --for. Jobs on other GPUs continue; a
    job on this one runs at full speed meanwhile. A driver upgrade needs all GPUs. Only for administrators.

    Examples:
        gpuenergyd release-gpu 0
        gpuenergyd release-gpu 0 --reopen
    """
    if reopen and lifetime_s is not None:
        raise UsageError("--reopen cannot be combined with --for")
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    request: dict[str, Any] = {"gpu": gpu}
    if lifetime_s is not None:
        request["lifetime_s"] = lifetime_s
    with closing(DaemonClient(find_socket_path(socket), limit_s=_LIMIT_S)) as client:
        reply = client.post("/v1/gpus/reopen" if reopen else "/v1/gpus/release", request)
    if as_json:
        print_json(reply)
        return 0
    uuids = ", ".join(reply["gpu_uuids"])
    if not reply["is_released"]:
        typer.echo(f"{uuids}: reopened")
        return 0
    typer.echo(f"{uuids}: released for {reply['remaining_s']:g} s")
    if reply["job_ids"]:
        typer.echo(f"jobs on it run at full speed meanwhile: {', '.join(reply['job_ids'])}")
    if reply["pids"]:
        typer.echo(f"processes that still use it, which prevent a reset: {', '.join(map(str, reply['pids']))}")
    return 0
