"""`gpuenergyd idle`: what GPUs are used for, what lower clocks on idle ones save or could, and a request to lift."""

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from gpuenergyd.cli.command_help import DocumentedGroup, add_command, command_group
from gpuenergyd.cli.options import DatabaseOption, JsonOption, SocketOption
from gpuenergyd.cli.output import print_json, print_lines
from gpuenergyd.count_text import count_text
from gpuenergyd_idle.messages import LIFT_PATH, PROGRAM_HOLD_S
from gpuenergyd_idle.rules.use import USE_TEXTS, GpuUse


def show(*, socket: SocketOption = None, as_json: JsonOption = False) -> int:
    """Show what each GPU is used for, and why its clock is low.

    Examples:
        gpuenergyd idle show
    """
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    with closing(DaemonClient(find_socket_path(socket))) as client:
        state = client.get_status()["idle"]
    if as_json:
        print_json(state)
    else:
        print_lines(_state_lines(state))
    return 0


def report(
    *,
    days: Annotated[
        float, typer.Option(min=0.0, max=36_500.0, metavar="DAYS", help="Hours of the last DAYS days.")
    ] = 7.0,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> int:
    """Report hours and energy of GPUs by use.

    Reads the history, so the daemon need not run. A lower clock saves in the hours with a context and without
    work; the estimate follows the rules of `[idle]`, whether or not it is enabled.

    Examples:
        gpuenergyd idle report
        gpuenergyd idle report --days 1 --json
    """
    from gpuenergyd.cli.commands.report_output import ReportRequest, write_report  # noqa: PLC0415  start fast

    since = (datetime.now(tz=UTC) - timedelta(days=days)).isoformat()
    return write_report(ReportRequest(since=since, plugin_group="state", database=database, as_json=as_json))


def lift(
    *,
    gpus: Annotated[list[str] | None, typer.Argument(metavar="[UUID]...", help="GPUs; without any, all.")] = None,
    hold_s: Annotated[
        float, typer.Option("--for", min=0.0, metavar="SECONDS", help="Lower none of them again for this time.")
    ] = PROGRAM_HOLD_S,
    socket: SocketOption = None,
) -> int:
    """Lift the clocks of idle GPUs now, for instance in a scheduler's prolog.

    For more than 60 s, only for root and the user who runs the daemon. `gpuenergyd run` does the same for its
    program. Without it, the first work lifts a GPU within half a second.

    Examples:
        gpuenergyd idle lift
        gpuenergyd idle lift --for 300
    """
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    with closing(DaemonClient(find_socket_path(socket))) as client:
        lifted = client.put(LIFT_PATH, {"gpu_uuids": gpus or [], "hold_s": hold_s})["gpu_uuids"]
    print_lines([f"lifted: {', '.join(lifted) or 'none was lowered'}"])
    return 0


def _state_lines(state: dict[str, Any]) -> Iterator[str]:
    if state["is_acting"]:
        yield f"GPUs that only hold contexts are lowered after {state['after_s']:g} s without work"
    elif state["is_enabled"]:
        yield "the daemon only observes: no clock is lowered"
    else:
        yield "no clock is lowered; to change that, set [idle] enabled = true in the configuration"
    for gpu in state["gpus"]:
        use, age_s = USE_TEXTS[GpuUse(gpu["use"])], gpu["use_age_s"]
        yield f"GPU {gpu['index']} ({gpu['model_name']}): {use} for {timedelta(seconds=round(age_s))}"
        if state["is_acting"]:
            clock = (
                f"lowered to {gpu['lowered_sm_clock_mhz']} MHz by gpuenergyd" if gpu["is_lowered"] else "not lowered"
            )
            yield f"    {clock}: {gpu['reason']}"
            lost = f"{gpu['lost_s']:.1f} of {gpu['allowed_lost_s']:.1f} s"
            yield f"    lowered {count_text(gpu['num_lowerings'], 'time')}; work has lost {lost}"
        if (saving := gpu["saving"]) is not None:
            what = "saves" if saving["is_measured"] else "could save"
            watts = f"{saving['mean_w']:.0f} W ({saving['low_w']:.0f} to {saving['high_w']:.0f})"
            yield f"    a lower clock {what} {watts} while it is idle with a context: {saving['basis']}"


idle = command_group(
    name="idle",
    cls=DocumentedGroup,
    help="Show idle GPUs and what lower clocks save on them.",
    epilog="gpuenergyd idle show\ngpuenergyd idle report --days 7\ngpuenergyd idle lift",
)
for _command in (show, report, lift):
    add_command(idle, _command)
