"""`gpuenergyd dashboard`: a live page with the daemon's status and the newest jobs, on 127.0.0.1 only."""

from typing import Annotated

import typer

from gpuenergyd.cli.options import DatabaseOption, SocketOption


def dashboard(
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, metavar="PORT", help="TCP port on 127.0.0.1; 0 selects a free port.")
    ] = 8420,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also serve /metrics for Prometheus.")] = False,
    database: DatabaseOption = None,
    socket: SocketOption = None,
) -> int:
    """Serve a live web page on 127.0.0.1.

    Runs until Ctrl-C. Read-only, unprivileged and without network access; every user of this host can open the page.

    Examples:
        gpuenergyd dashboard
        gpuenergyd dashboard --port 0 --metrics
    """
    from gpuenergyd.cli.commands.dashboard_server import DashboardServer, HistoryView  # noqa: PLC0415  start fast
    from gpuenergyd.cli.daemon_files import find_database  # noqa: PLC0415
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415

    view = HistoryView(database or find_database(socket)[0])
    with DashboardServer(port, find_socket_path(socket), view, has_metrics=metrics) as server:
        typer.echo(f"serving on {server.url}{' and ' + server.url + 'metrics' if metrics else ''}; stop with Ctrl-C")
        server.serve_forever(poll_interval=0.2)
    return 0
