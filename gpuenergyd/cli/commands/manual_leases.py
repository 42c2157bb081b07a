"""`gpuenergyd lock` and `gpuenergyd limit`: an administrator's clock lock or power limit, put back like a job's."""

from typing import Annotated, Any

import typer

from gpuenergyd.cli.output import JsonOption, SocketOption, print_json
from gpuenergyd.errors import UsageError

GpuArgument = Annotated[str, typer.Argument(metavar="GPU", help="UUID or index, as `gpuenergyd status` lists them.")]
ReleaseOption = Annotated[bool, typer.Option("--release", help="Put the GPU back: its clock lock and its power limit.")]
LifetimeOption = Annotated[
    float | None,
    typer.Option("--for", min=0, metavar="SECONDS", help="Put it back after so long; the newest command's counts."),
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Check and say what would be done; change nothing.")]


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
    """Lock a GPU's SM clock, leased through the daemon.

    The lease outlives this command. It ends, and the GPU goes back, with --release, when --for is over, and when the
    daemon stops. For root and the user who runs the daemon; refused while a job owns the GPU.
    """
    _check("CLOCK_MHZ", clock_mhz, lifetime_s, release=release)
    wanted = {"sm_clock_mhz": clock_mhz}
    return _carry_out(gpu, wanted, lifetime_s, release=release, dry_run=dry_run, socket=socket, as_json=as_json)


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
    """Limit a GPU's power, leased through the daemon.

    The lease outlives this command. It ends, and the GPU goes back, with --release, when --for is over, and when the
    daemon stops. For root and the user who runs the daemon; refused while a job owns the GPU.
    """
    _check("WATTS", watts, lifetime_s, release=release)
    wanted = {"power_limit_w": watts}
    return _carry_out(gpu, wanted, lifetime_s, release=release, dry_run=dry_run, socket=socket, as_json=as_json)


def _check(name: str, value: float | None, lifetime_s: float | None, *, release: bool) -> None:
    if release and (value is not None or lifetime_s is not None):
        raise UsageError(f"--release puts the GPU back; it takes neither {name} nor --for")
    if not release and value is None:
        raise UsageError(f"name {name} to set it, or --release to put the GPU back")


def _carry_out(
    gpu: str,
    wanted: dict[str, Any],
    lifetime_s: float | None,
    *,
    release: bool,
    dry_run: bool,
    socket: str | None,
    as_json: bool,
) -> int:
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    client = DaemonClient(find_socket_path(socket))
    try:
        if release:
            answer = client.post("/v1/leases/release", {"gpu": gpu, "is_dry_run": dry_run})
        else:
            answer = client.post("/v1/leases", {"gpu": gpu, **wanted, "lifetime_s": lifetime_s, "is_dry_run": dry_run})
    finally:
        client.close()
    if as_json:
        print_json(answer)
    else:
        typer.echo(_released_text(answer) if release else _granted_text(answer))
    return 0


def _granted_text(answer: dict[str, Any]) -> str:
    held = [f"clock locked at {answer['sm_clock_mhz']} MHz"] if answer["sm_clock_mhz"] is not None else []
    held += [f"power limited to {answer['power_limit_w']:g} W"] if answer["power_limit_w"] is not None else []
    until = "until released" if answer["remaining_s"] is None else f"for {answer['remaining_s']:g} s"
    would = "would be: " if answer["is_dry_run"] else ""
    return f"{answer['gpu_uuid']}: {would}{', '.join(held)}, {until} or the daemon stops"


def _released_text(answer: dict[str, Any]) -> str:
    if answer["is_dry_run"]:
        return f"{answer['gpu_uuid']}: would be put back, and lease {answer['lease_id']} would end"
    return f"{answer['gpu_uuid']}: {'; '.join(answer['outcomes']).replace('_', ' ') or 'nothing was left to restore'}"
