"""`gpuenergyd lock` and `limit`: an administrator sets the clock or the power limit of a GPU."""

from contextlib import closing
from typing import Annotated, Any

import typer

from gpuenergyd.cli.options import DryRunOption, JsonOption, SocketOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.errors import UsageError

GpuArgument = Annotated[str, typer.Argument(metavar="GPU", help="UUID or index, as `gpuenergyd status` lists them.")]
ReleaseOption = Annotated[bool, typer.Option("--release", help="Restore the GPU: remove lock and limit.")]
LifetimeOption = Annotated[
    float | None,
    typer.Option("--for", min=0, metavar="SECONDS", help="Restore the GPU after this time; the last command counts."),
]


def lock(
    *,
    gpu: GpuArgument,
    clock_mhz: Annotated[
        int | None, typer.Argument(metavar="CLOCK_MHZ", min=1, help="Rounded up to the next supported clock.")
    ] = None,
    release: ReleaseOption = False,
    lifetime_s: LifetimeOption = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Lock a GPU's SM clock.

    The daemon holds the lease, so it outlives this command. The GPU is restored by --release, when --for expires, and
    when the daemon stops. Only for root and the user who runs the daemon; refused while a job owns the GPU.

    Examples:
        gpuenergyd lock 0 1200
        gpuenergyd lock 0 1200 --for 3600
        gpuenergyd lock 0 --release
    """
    request = _request("CLOCK_MHZ", gpu, {"sm_clock_mhz": clock_mhz}, lifetime_s, release=release, dry_run=dry_run)
    return _send(request, release=release, socket=socket, as_json=as_json)


def limit(
    *,
    gpu: GpuArgument,
    watts: Annotated[float | None, typer.Argument(metavar="WATTS", min=1, help="Within the GPU's range.")] = None,
    release: ReleaseOption = False,
    lifetime_s: LifetimeOption = None,
    dry_run: DryRunOption = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Limit a GPU's power.

    The daemon holds the lease, so it outlives this command. The GPU is restored by --release, when --for expires, and
    when the daemon stops. Only for root and the user who runs the daemon; refused while a job owns the GPU.

    Examples:
        gpuenergyd limit 0 300
        gpuenergyd limit 0 300 --dry-run
        gpuenergyd limit 0 --release
    """
    request = _request("WATTS", gpu, {"power_limit_w": watts}, lifetime_s, release=release, dry_run=dry_run)
    return _send(request, release=release, socket=socket, as_json=as_json)


def _request(
    name: str, gpu: str, setting: dict[str, Any], lifetime_s: float | None, *, release: bool, dry_run: bool
) -> dict[str, Any]:
    """Return the body of the request to the daemon.

    Raises:
        UsageError: a value is missing, or given together with --release.
    """
    (value,) = setting.values()
    if release:
        if value is not None or lifetime_s is not None:
            raise UsageError(f"--release cannot be combined with {name} or --for")
        return {"gpu": gpu, "is_dry_run": dry_run}
    if value is None:
        raise UsageError(f"give {name}, or --release to restore the GPU")
    return {"gpu": gpu, **setting, "lifetime_s": lifetime_s, "is_dry_run": dry_run}


def _send(request: dict[str, Any], *, release: bool, socket: str | None, as_json: bool) -> int:
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    with closing(DaemonClient(find_socket_path(socket))) as client:
        reply = client.post("/v1/leases/release" if release else "/v1/leases", request)
    if as_json:
        print_json(reply)
    else:
        typer.echo(_released_text(reply) if release else _granted_text(reply))
    return 0


def _granted_text(reply: dict[str, Any]) -> str:
    settings = [f"clock locked at {reply['sm_clock_mhz']} MHz"] if reply["sm_clock_mhz"] is not None else []
    settings += [f"power limited to {reply['power_limit_w']:g} W"] if reply["power_limit_w"] is not None else []
    until = "until released" if reply["remaining_s"] is None else f"for {reply['remaining_s']:g} s"
    prefix = "would be: " if reply["is_dry_run"] else ""
    return f"{reply['gpu_uuid']}: {prefix}{', '.join(settings)}, {until} or the daemon stops"


def _released_text(reply: dict[str, Any]) -> str:
    if reply["is_dry_run"]:
        return f"{reply['gpu_uuid']}: would be restored, and lease {reply['lease_id']} would end"
    return f"{reply['gpu_uuid']}: {'; '.join(reply['outcomes']).replace('_', ' ') or 'nothing to restore'}"
