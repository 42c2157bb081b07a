"""HTTP server of commands: one thread per connection, with limits on the number and duration of connections."""

import socket
from collections.abc import Mapping
from errno import EADDRINUSE
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from ipaddress import ip_address
from threading import BoundedSemaphore
from typing import Any

from gpuenergyd.errors import UsageError

_MAX_CONNECTIONS = 32
_REQUEST_TIMEOUT_S = 10.0


class RequestHandler(BaseHTTPRequestHandler):
    """Handles the requests of one connection; subclasses define `do_GET` and similar methods."""

    server_version = "gpuenergyd"
    sys_version = ""
    timeout = _REQUEST_TIMEOUT_S

    def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Send a response, without the body if the request is HEAD."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name that http.server calls it by
        """Do not log requests."""


class CommandServer(ThreadingHTTPServer):
    """Listens on one IP address until the command ends."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, port: int, handler: type[RequestHandler]) -> None:
        self.address = address
        self._slots = BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            self.address_family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
            super().__init__((address, port), handler)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            hint = "; --port 0 selects a free port" if getattr(error, "errno", None) == EADDRINUSE else ""
            raise UsageError(f"cannot serve on {address}:{port}: {reason}{hint}") from None

    def server_bind(self) -> None:
        """Bind without looking up the host's name, which `HTTPServer` does and which may take seconds."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = self.address, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the connection in a thread, or close it if there are too many connections."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Handle the connection, then free its slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that clients closed early."""
