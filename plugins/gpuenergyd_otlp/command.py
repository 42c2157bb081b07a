"""`gpuenergyd otlp`: exports the daemon's metrics to an OpenTelemetry collector, from an unprivileged process."""

import socket as sockets
import time
from contextlib import closing
from datetime import UTC, datetime
from enum import StrEnum
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

import typer

from gpuenergyd.cli.options import SocketOption
from gpuenergyd.cli.output import json_text
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.log_lines import write_log_line

_ENDPOINT = "http://127.0.0.1:4318/v1/metrics"
_TIMEOUT_S = 10.0
_HTTP_OK = range(200, 300)


_UNSUPPORTED_MEDIA_TYPE = 415


class Protocol(StrEnum):
    """Encoding of OTLP over HTTP, as OTEL_EXPORTER_OTLP_PROTOCOL names it."""

    JSON = "http/json"
    PROTOBUF = "http/protobuf"


class _ExportError(GpuEnergyError):
    """The collector could not be reached or rejected the metrics."""


def otlp(
    *,
    endpoint: Annotated[
        str, typer.Option(metavar="URL", help="The collector's OTLP/HTTP endpoint for metrics.")
    ] = _ENDPOINT,
    protocol: Annotated[
        Protocol, typer.Option(metavar="|".join(Protocol), help="Encoding; some collectors accept protobuf only.")
    ] = Protocol.JSON,
    every_s: Annotated[
        float, typer.Option("--every-s", min=1.0, max=3600.0, metavar="S", help="Export interval in seconds.")
    ] = 15.0,
    once: Annotated[bool, typer.Option("--once", help="Export once and exit.")] = False,
    socket: SocketOption = None,
) -> int:
    """Export metrics to OpenTelemetry.

    Runs until Ctrl-C as an unprivileged process; the daemon itself has no network access.

    Examples:
        gpuenergyd otlp
        gpuenergyd otlp --endpoint http://127.0.0.1:4318/v1/metrics --once
        gpuenergyd otlp --endpoint https://collector.example/v1/metrics --protocol http/protobuf
    """
    from gpuenergyd.client.environment import find_socket_path  # noqa: PLC0415  start fast

    url = _checked_endpoint(endpoint)
    path = find_socket_path(socket)
    last_problem: str | None = None
    while True:
        problem = None
        try:
            _export(path, url, protocol)
        except GpuEnergyError as error:
            if once:
                raise
            problem = str(error)
        if problem is not None and problem != last_problem:
            write_log_line("gpuenergyd otlp", f"{problem}; retrying every {every_s:g} s")
        last_problem = problem
        if once:
            return 0
        time.sleep(every_s)


def _export(socket_path: str, url: SplitResult, protocol: Protocol) -> None:
    """Read the current metrics from the daemon and send them to the collector.

    Raises:
        GpuEnergyError: the daemon or the collector cannot be reached, or the collector rejects the metrics.
    """
    from gpuenergyd.client.connection import DaemonClient  # noqa: PLC0415  start fast
    from gpuenergyd_otlp.metrics import otlp_metrics  # noqa: PLC0415  start fast
    from gpuenergyd_otlp.protobuf import encoded_request  # noqa: PLC0415

    with closing(DaemonClient(socket_path)) as client:
        status = client.get_status()
    metrics = otlp_metrics(status, at=datetime.now(tz=UTC), host_name=sockets.gethostname())
    is_json = protocol is Protocol.JSON
    body = json_text(metrics).encode() if is_json else encoded_request(metrics)
    content_type = "application/json" if is_json else "application/x-protobuf"
    connection_type = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = connection_type(url.hostname or "", url.port, timeout=_TIMEOUT_S)
    try:
        with closing(connection):
            target = url.path + (f"?{url.query}" if url.query else "")
            connection.request("POST", target, body, {"Content-Type": content_type})
            response = connection.getresponse()
            response.read()
    except (OSError, HTTPException) as error:
        raise _ExportError(f"cannot reach the collector at {url.geturl()}: {error}") from None
    if response.status not in _HTTP_OK:
        other = Protocol.PROTOBUF if is_json else Protocol.JSON
        hint = f"; try --protocol {other}" if response.status == _UNSUPPORTED_MEDIA_TYPE else ""
        raise _ExportError(f"the collector at {url.geturl()} returned {response.status} {response.reason}{hint}")


def _checked_endpoint(endpoint: str) -> SplitResult:
    try:
        url = urlsplit(endpoint)
        is_valid = url.scheme in {"http", "https"} and bool(url.hostname) and url.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise UsageError(f"--endpoint {endpoint!r}: must be a URL such as {_ENDPOINT}")
    return url if url.path not in {"", "/"} else url._replace(path="/v1/metrics")
