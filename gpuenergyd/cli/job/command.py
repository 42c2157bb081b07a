"""`gpuenergyd job set`, `pause`, `resume` and `release`: an operator changes a running job."""

from contextlib import closing
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gpuenergyd.cli.command_help import DocumentedGroup, add_command, command_group
from gpuenergyd.cli.job.finding import find_jobs
from gpuenergyd.cli.option_checks import MAX_SLOWDOWN_HELP, checked_slowdown, warn_of_large_slowdown
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import print_json
from gpuenergyd.errors import UsageError

JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="Id, or name: then all its replicas, as `gpuenergyd status` lists them.")
]

job = command_group(
    name="job",
    cls=DocumentedGroup,
    help="Change or pause a running job.",
    epilog="gpuenergyd job set gpt --max-slowdown 0.05\ngpuenergyd job pause gpt",
)


def set_(
    *,
    name: JobArgument,
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Policy, with options as in cost:eta=0.7; it begins with the baseline."),
    ] = None,
    max_slowdown: Annotated[
        float | None, typer.Option("--max-slowdown", callback=checked_slowdown, metavar="RATIO", help=MAX_SLOWDOWN_HELP)
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=9,
            metavar="0-9",
            help="Rank among the jobs of the host, 0 highest: recorded and shown (administrators).",
        ),
    ] = None,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Change policy, permitted slowdown or priority of a running job.

    In force within two iterations; a smaller slowdown does not wait for the policy. For administrators and the user of
    the job. It holds until the job ends or is released, also after a restart of the daemon.

    Examples:
        gpuenergyd job set gpt --max-slowdown 0.05
        gpuenergyd job set gpt-3f9a01 --policy cost:eta=0.7
    """
    change = {"policy": policy, "max_slowdown_ratio": max_slowdown, "priority": priority}
    given = {key: value for key, value in change.items() if value is not None}
    if not given:
        raise UsageError("give --policy, --max-slowdown or --priority")
    warn_of_large_slowdown(max_slowdown)
    return _send(name, given, socket=socket, as_json=as_json)


def pause(*, name: JobArgument, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """Run a job at full speed until it is resumed.

    Its GPUs are restored at once; its energy is still measured. For administrators and the user of the job.

    Examples:
        gpuenergyd job pause gpt
    """
    return _send(name, {"is_paused": True}, socket=socket, as_json=as_json)


def resume(*, name: JobArgument, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """Plan a paused job again.

    What was measured before still counts if full speed has not changed. For administrators and the user of the job.

    Examples:
        gpuenergyd job resume gpt
    """
    return _send(name, {"is_paused": False}, socket=socket, as_json=as_json)


def release(*, name: JobArgument, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """Withdraw all orders for a job.

    It goes on as its program registered it: policy, permitted slowdown and priority, not paused.

    Examples:
        gpuenergyd job release gpt
    """
    return _send(name, {"is_released": True}, socket=socket, as_json=as_json)


for _function in (set_, pause, resume, release):
    add_command(job, _function)


def _send(name: str, change: dict[str, Any], *, socket: str | None, as_json: bool) -> int:
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    with closing(DaemonClient(find_socket_path(socket))) as client:
        found = find_jobs(client.get_status(), name)
        replies = [client.patch(f"/v1/jobs/{quote(job['job_id'], safe='')}", change) for job in found]
    if as_json:
        print_json({"jobs": replies})
        return 0
    for reply in replies:
        changes = ", ".join(reply["changes"]) or "no change"
        typer.echo(f"{reply['job_id']}: {changes}; {reply['phase']}, policy {reply['policy']}")
    return 0
