"""HTTP server of the dashboard: GET and HEAD only, for browsers on this host and for Prometheus.

Three measures protect it from other web pages. By default it listens on 127.0.0.1. The Host header must name this host,
which prevents DNS rebinding, where the browser uses the attacker's name for this host. And no response may be read by
pages of other origins. On an address that other hosts can reach, it serves only the metrics.
"""

import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cache
from ipaddress import ip_address
from threading import Lock
from urllib.parse import urlsplit

from gpuenergyd.cli.http_server import CommandServer, RequestHandler
from gpuenergyd.cli.output import json_text
from gpuenergyd.client.connection import DaemonClient, HttpConnection
from gpuenergyd.errors import GpuEnergyError, ProtocolError

HOST = "127.0.0.1"
_LOOPBACK_NAMES = ("localhost", HOST, "::1")
_DAEMON_TIMEOUT_S = 5.0
_MAX_PAGE_AGE_S = 5.0
_NUM_JOBS = 5
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@cache
def qualified_host_name() -> str:
    """Return this host's fully qualified name in lower case; asks a name server, which may take seconds."""
    return socket.getfqdn().lower()


@dataclass(slots=True)
class HistoryView:
    """The page with the newest jobs, rendered at most once every five seconds."""

    database: str
    shown_days: float = 7
    pue: float = 1.0
    _lock: Lock = field(default_factory=Lock)
    _nonce: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    _rendered_mono_s: float = float("-inf")
    _page: str = ""

    def page(self) -> tuple[str, str]:
        """Return the page and the nonce of its script; if the history cannot be read, the page says so."""
        with self._lock:
            if time.monotonic() - self._rendered_mono_s > _MAX_PAGE_AGE_S:
                self._page = self._render()
                self._rendered_mono_s = time.monotonic()
            return self._page, self._nonce

    def _render(self) -> str:
        from gpuenergyd.report.job import job_reports  # noqa: PLC0415  slow imports, needed for pages only
        from gpuenergyd.store import open_history  # noqa: PLC0415
        from gpuenergyd_formats.page import live_page  # noqa: PLC0415

        now = datetime.now(tz=UTC)
        try:
            with open_history(self.database) as history:
                since = now - timedelta(days=self.shown_days)
                reports = job_reports(history, since=since, pue=self.pue)[-_NUM_JOBS:][::-1]
                return live_page(history, reports, made_at=now.astimezone(), nonce=self._nonce)
        except GpuEnergyError as error:
            return live_page(None, (), made_at=now.astimezone(), nonce=self._nonce, note=f"No history: {error}.")


class DashboardServer(CommandServer):
    """The server of the page, the status and the metrics."""

    def __init__(
        self,
        port: int,
        socket_path: str,
        view: HistoryView,
        *,
        has_metrics: bool = False,
        address: str = HOST,
        host_names: Iterable[str] = (),
    ) -> None:
        """Listen on an IP address; requests may name this host by its own names or by those in `host_names`."""
        self.socket_path = socket_path
        self.view = view
        self.has_metrics = has_metrics
        self.is_loopback = ip_address(address).is_loopback
        own_name = socket.gethostname().lower()
        self._host_names = {*_LOOPBACK_NAMES, address, own_name, own_name.partition(".")[0]}
        self._host_names |= {name.lower() for name in host_names}
        super().__init__(address, port, _DashboardHandler)

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.server_port}/"

    @property
    def host_names(self) -> tuple[str, ...]:
        """Names of this host under which requests are accepted."""
        return tuple(sorted({*self._host_names, qualified_host_name()}))

    def accepts_host(self, host_header: str) -> bool:
        """Return whether a Host header names this host, with any port: a proxy or a tunnel may have its own."""
        try:
            url = urlsplit(f"//{host_header}")
            name, _ = url.hostname, url.port
        except ValueError:
            return False
        if name is None or url.netloc != host_header or url.username:
            return False
        name = name.rstrip(".")
        return name in self._host_names or name == qualified_host_name()


class _DashboardHandler(RequestHandler):
    server: DashboardServer  # pyright: ignore[reportIncompatibleVariableOverride]  http.server names it so

    def _respond(self) -> None:
        """Respond to one request; a HEAD request gets the headers only."""
        if not self.server.accepts_host(self.headers.get("Host", "")):
            names = ", ".join(self.server.host_names)
            text = f"not a name of this host; valid: {names}; --host-name adds another\n"
            self._send(421, "text/plain; charset=utf-8", text.encode())
            return
        routes: dict[str, Callable[[], None]] = {}
        if self.server.is_loopback:
            routes |= {"/": self._page, "/status.json": self._status}
        if self.server.has_metrics:
            routes["/metrics"] = self._metrics
        respond = routes.get(self.path.partition("?")[0])
        if respond is None:
            self._send(404, "text/plain; charset=utf-8", f"no such page; pages: {', '.join(routes)}\n".encode())
            return
        respond()

    def _refuse_method(self) -> None:
        self._send(
            405,
            "text/plain; charset=utf-8",
            b"only GET and HEAD are allowed: the dashboard is read-only\n",
            {"Allow": "GET, HEAD"},
        )

    do_GET = do_HEAD = _respond  # noqa: N815  names set by http.server
    do_POST = do_PUT = do_DELETE = do_PATCH = do_OPTIONS = _refuse_method  # noqa: N815

    def _page(self) -> None:
        page, nonce = self.server.view.page()
        policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'nonce-{nonce}'"
        policy += "; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
        self._send(200, "text/html; charset=utf-8", page.encode(), {"Content-Security-Policy": policy})

    def _status(self) -> None:
        try:
            with closing(DaemonClient(self.server.socket_path)) as client:
                self._send(200, "application/json", json_text(client.get_status()).encode())
        except GpuEnergyError as error:
            self._send(503, "application/json", json_text({"error": str(error)}).encode())

    def _metrics(self) -> None:
        try:
            with closing(HttpConnection(self.server.socket_path)) as connection:
                status, body = connection.request("GET", "/v1/metrics", limit_s=_DAEMON_TIMEOUT_S)
        except (OSError, ProtocolError) as error:
            status, body = 503, f"cannot reach the daemon at {self.server.socket_path}: {error}\n".encode()
        self._send(status, _METRICS_TYPE, body)

    def _send(self, status: int, content_type: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        all_headers = {
            "Content-Type": content_type,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        self.send(status, all_headers | dict(headers or {}), body)
