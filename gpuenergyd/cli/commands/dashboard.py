"""`gpuenergyd dashboard`: what the daemon does now and what jobs saved, as a live page on this host alone."""

from typing import Annotated

import typer

from gpuenergyd.cli.output import SocketOption


def dashboard(
    *,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="TCP port on 127.0.0.1; 0 takes a free one.")] = 8420,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also serve /metrics for Prometheus.")] = False,
    database: Annotated[
        str | None, typer.Option(metavar="PATH|URL", help="The history to read; else the daemon's own.")
    ] = None,
    socket: SocketOption = None,
) -> int:
    """Serve a live page on 127.0.0.1, until Ctrl-C.

    It only reads, needs no privileges, and asks nothing of any network; everybody on this host can open it.
    """
    from gpuenergyd.cli.commands.dashboard_server import DashboardServer, HistoryView  # noqa: PLC0415  start fast
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415
    from gpuenergyd.daemon.settings import load_settings  # noqa: PLC0415

    view = HistoryView(database or load_settings().database_url)
    with DashboardServer(port, find_socket_path(socket), view, has_metrics=metrics) as server:
        typer.echo(f"serving on {server.url}{' and ' + server.url + 'metrics' if metrics else ''}; Ctrl-C ends it")
        server.serve_forever(poll_interval=0.2)
    return 0
