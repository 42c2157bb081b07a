"""`gpuenergyd otlp`: the metrics to an OpenTelemetry collector, by a process without rights; off unless started."""

import socket as sockets
import sys
import time
from datetime import UTC, datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

import typer

from gpuenergyd.cli.json_text import json_text
from gpuenergyd.cli.output import SocketOption
from gpuenergyd.errors import GpuEnergyError, UsageError

_ENDPOINT = "http://127.0.0.1:4318/v1/metrics"
_LIMIT_S = 10.0
_HTTP_OK = range(200, 300)


class _NotTakenError(GpuEnergyError):
    """No collector took what was sent."""


def otlp(
    *,
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="Where the collector takes metrics by OTLP/HTTP.")
    ] = _ENDPOINT,
    every_s: Annotated[float, typer.Option("--every-s", min=1.0, max=3600.0, help="Seconds between two looks.")] = 15.0,
    once: Annotated[bool, typer.Option("--once", help="Send once and end.")] = False,
    socket: SocketOption = None,
) -> int:
    """Send the metrics to an OpenTelemetry collector.

    Runs until Ctrl-C, beside the daemon and without its rights; the daemon itself never speaks to a network.
    """
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415  start fast

    url = _checked(endpoint)
    path = find_socket_path(socket)
    said: str | None = None
    while True:
        trouble = None
        try:
            _send(path, url)
        except GpuEnergyError as error:
            if once:
                raise
            trouble = str(error)
        if trouble is not None and trouble != said:
            sys.stderr.write(f"gpuenergyd: {trouble}; trying again every {every_s:g} s\n")
            sys.stderr.flush()
        said = trouble
        if once:
            return 0
        time.sleep(every_s)


def _send(socket_path: str, url: SplitResult) -> None:
    """Send the metrics of now.

    Raises:
        GpuEnergyError: no daemon answers, or no collector takes it.
    """
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd.daemon.api.otlp import otlp_metrics  # noqa: PLC0415  as above

    client = DaemonClient(socket_path)
    try:
        status = client.get_status()
    finally:
        client.close()
    body = json_text(otlp_metrics(status, at=datetime.now(tz=UTC), host_name=sockets.gethostname()))
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=_LIMIT_S)
    try:
        where = url.path + (f"?{url.query}" if url.query else "")
        connection.request("POST", where, body.encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
    except (OSError, HTTPException) as error:
        raise _NotTakenError(f"no collector at {url.geturl()}: {error}") from None
    finally:
        connection.close()
    if answer.status not in _HTTP_OK:
        raise _NotTakenError(f"the collector at {url.geturl()} answered {answer.status} {answer.reason}")


def _checked(endpoint: str) -> SplitResult:
    try:
        url = urlsplit(endpoint)
        is_valid = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"--endpoint {endpoint!r}: a URL as {_ENDPOINT} is valid")
    return url if url.path not in {"", "/"} else url._replace(path="/v1/metrics")
