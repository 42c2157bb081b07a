"""`gpuenergyd dashboard`: a live page with the daemon's status and the newest jobs, and metrics for Prometheus."""

from ipaddress import ip_address
from typing import Annotated

import typer

from gpuenergyd.cli.options import DatabaseOption, SocketOption
from gpuenergyd.errors import UsageError


def dashboard(
    *,
    port: Annotated[
        int, typer.Option(min=0, max=65_535, metavar="PORT", help="TCP port on 127.0.0.1; 0 selects a free port.")
    ] = 8420,
    metrics: Annotated[bool, typer.Option("--metrics", help="Also serve /metrics for Prometheus.")] = False,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="IP address; on one that is not loopback only /metrics is served.")
    ] = "127.0.0.1",
    host_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Further name of this host to answer under, e.g. of a proxy; repeatable."),
    ] = None,
    database: DatabaseOption = None,
    socket: SocketOption = None,
) -> int:
    """Serve a live web page on 127.0.0.1.

    Runs until Ctrl-C. Read-only, unprivileged and without network access; every user of this host can open the page.
    Requests are answered under localhost, the host's name and its fully qualified name, against DNS rebinding.

    Examples:
        gpuenergyd dashboard
        gpuenergyd dashboard --port 0 --metrics
        gpuenergyd dashboard --metrics --listen 0.0.0.0 --host-name gpu17.cluster
    """
    from gpuenergyd.cli.daemon_files import find_database  # noqa: PLC0415
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415
    from gpuenergyd_dashboard.server import DashboardServer, HistoryView  # noqa: PLC0415  start fast

    try:
        is_loopback = ip_address(listen).is_loopback
    except ValueError:
        raise UsageError(f"--listen {listen!r}: must be an IP address, e.g. 127.0.0.1 or 0.0.0.0") from None
    if not is_loopback and not metrics:
        raise UsageError(f"--listen {listen} needs --metrics: the page is served on a loopback address only")
    if database is not None:
        view = HistoryView(database)
    else:
        found = find_database(socket)
        view = HistoryView(found.url, pue=found.pue)
    with DashboardServer(
        port, find_socket_path(socket), view, has_metrics=metrics, address=listen, host_names=host_name or ()
    ) as server:
        served = [server.url] * is_loopback + [f"{server.url}metrics"] * metrics
        typer.echo(f"serving on {' and '.join(served)}; stop with Ctrl-C")
        server.serve_forever(poll_interval=0.2)
    return 0
