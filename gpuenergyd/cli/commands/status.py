"""`gpuenergyd status`: shows GPUs, jobs, plans and health."""

import time
from contextlib import closing
from typing import Annotated, Any

import typer

from gpuenergyd.cli.exit_codes import EXIT_DEGRADED
from gpuenergyd.cli.options import JsonOption, SocketOption
from gpuenergyd.cli.output import people_console, print_json

_WATCH_PERIOD_S = 1.0
_POWERS_KEPT = 300
"""How many readings of the total power the screen keeps to draw."""


def status(
    *,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh every second until Ctrl-C.")] = False,
    socket: SocketOption = None,
    as_json: JsonOption = False,
) -> int:
    """Show GPUs, jobs, plans and health.

    Exits 3 if the daemon is not running, 4 if it is degraded.

    Examples:
        gpuenergyd status
        gpuenergyd status --watch
        gpuenergyd status --json
    """
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    with closing(DaemonClient(find_socket_path(socket))) as client:
        state = client.get_status()
        if watch:
            _watch(client, state, as_json=as_json)
        elif as_json:
            print_json(state)
        else:
            from gpuenergyd.report.terminal.live import status_view  # noqa: PLC0415  Rich, JSON does not need it

            console = people_console()
            console.print(status_view(state, console.width))
    return EXIT_DEGRADED if state.get("is_degraded") else 0


def _watch(client: Any, state: dict[str, Any], *, as_json: bool) -> None:
    """Refresh the whole screen every second; if stdout is no terminal, print one table per second, or one JSON line."""
    if as_json:
        while True:
            print_json(state)
            time.sleep(_WATCH_PERIOD_S)
            state = client.get_status()
    from rich.live import Live  # noqa: PLC0415  Rich, JSON does not need it

    from gpuenergyd.report.terminal.live import screen_view, status_view, total_power_w  # noqa: PLC0415

    console = people_console()
    while not console.is_terminal:
        console.print(status_view(state, console.width))
        console.file.flush()
        time.sleep(_WATCH_PERIOD_S)
        state = client.get_status()
    powers_w = [total_power_w(state)]
    with Live(screen_view(state, console), console=console, screen=True, auto_refresh=False) as live:
        while True:
            state = client.get_status()
            powers_w = [*powers_w[-_POWERS_KEPT:], total_power_w(state)]
            live.update(screen_view(state, console, powers_w), refresh=True)
            time.sleep(_WATCH_PERIOD_S)
