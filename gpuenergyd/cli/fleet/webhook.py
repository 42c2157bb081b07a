"""The webhook for grid events: `POST /v1/grid-events`, signed with HMAC-SHA256 by a key that operator and fleet share.

The signature covers the time of sending and the body. A message that was sent more than five minutes ago, or ahead, is
refused, and a repeated one changes nothing: an older version never replaces a newer one.
"""

import hmac
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from ipaddress import ip_address
from threading import BoundedSemaphore, Lock
from typing import Any

from gpuenergyd.cli.fleet.event_input import EventStore, event_of_json
from gpuenergyd.core.fleet.grid_event import GridEvent
from gpuenergyd.errors import GpuEnergyError, UsageError

log = logging.getLogger(__name__)

PATH = "/v1/grid-events"
TIME_HEADER = "X-Gpuenergyd-Time"
SIGNATURE_HEADER = "X-Gpuenergyd-Signature"
LEAST_KEY_CHARS = 32
MAX_BODY_BYTES = 16_384
MAX_AGE_S = 300.0
MAX_EVENTS_PER_MINUTE = 60
_MAX_CONNECTIONS = 32
_REQUEST_TIMEOUT_S = 10.0
_SOURCE = "webhook"


def signature(key: str, time_text: str, body: bytes) -> str:
    """Return the signature of a message in hexadecimal."""
    return hmac.digest(key.encode(), time_text.encode() + b"." + body, "sha256").hex()


@dataclass(slots=True)
class EventReceiver:
    """Checks messages and stores their events; safe to call from several threads."""

    store: EventStore
    key: str
    clock: Callable[[], float] = time.time
    _lock: Lock = field(default_factory=Lock)
    _accepted_s: deque[float] = field(default_factory=deque)

    def receive(self, time_text: str, given_signature: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Return HTTP status and reply of a message."""
        expected = signature(self.key, time_text, body)
        if not hmac.compare_digest(expected.encode(), given_signature.encode("utf-8", "replace")):
            return 401, {"error": f"{SIGNATURE_HEADER} is not the HMAC-SHA256 of {TIME_HEADER}, a dot and the body"}
        now_s = self.clock()
        try:
            sent_s = float(time_text)
        except ValueError:
            sent_s = float("nan")
        if not abs(now_s - sent_s) <= MAX_AGE_S:
            return 401, {"error": f"{TIME_HEADER} must be within {MAX_AGE_S:g} s of now, in seconds since 1970"}
        with self._lock:
            return self._store(body, now_s, sent_s)

    def _store(self, body: bytes, now_s: float, sent_s: float) -> tuple[int, dict[str, Any]]:
        while self._accepted_s and now_s - self._accepted_s[0] >= 60:
            self._accepted_s.popleft()
        if len(self._accepted_s) >= MAX_EVENTS_PER_MINUTE:
            return 429, {"error": f"more than {MAX_EVENTS_PER_MINUTE} events in a minute"}
        self._accepted_s.append(now_s)
        try:
            event: GridEvent = event_of_json(body, now_s=now_s, issued_s=sent_s, source=_SOURCE)
            has_changed = self.store.put_event(event)
        except UsageError as error:
            return 400, {"error": str(error)}
        except GpuEnergyError as error:
            log.warning("grid event lost: %s", error)
            return 503, {"error": "the event cannot be stored now; send it again"}
        if has_changed:
            log.info("grid event %s: %g %s until %s", event.event_id, event.value, event.unit, event.end_s)
        return 200, {"event_id": event.event_id, "changed": has_changed}


class WebhookServer(ThreadingHTTPServer):
    """Threaded HTTP server with a limited number of connections and a timeout on each."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: str, port: int, receiver: EventReceiver) -> None:
        """Listen on an IP address."""
        self.receiver = receiver
        self._slots = BoundedSemaphore(_MAX_CONNECTIONS)
        try:
            self.address_family = socket.AF_INET6 if ip_address(address).version == 6 else socket.AF_INET
            super().__init__((address, port), _EventHandler)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot listen on {address}:{port}: {error}") from None

    def server_bind(self) -> None:
        """Bind without the look-up of the host's name that `HTTPServer` makes, which may take seconds."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = self.server_address[0], self.server_address[1]  # type: ignore[assignment]

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle the connection in a thread, or close it when the limit of connections is reached."""
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


class _EventHandler(BaseHTTPRequestHandler):
    server: WebhookServer  # pyright: ignore[reportIncompatibleVariableOverride]  http.server names it so
    server_version = "gpuenergyd"
    sys_version = ""
    timeout = _REQUEST_TIMEOUT_S

    def do_POST(self) -> None:
        if self.path != PATH:
            self._send(404, {"error": f"no such path; valid: POST {PATH}"})
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdecimal()) or not 0 < int(length[:12]) <= MAX_BODY_BYTES:
            self._send(413, {"error": f"Content-Length must be from 1 to {MAX_BODY_BYTES}"})
            return
        body = self.rfile.read(int(length))
        time_text, given = self.headers.get(TIME_HEADER, ""), self.headers.get(SIGNATURE_HEADER, "")
        self._send(*self.server.receiver.receive(time_text, given, body))

    def _send(self, status: int, reply: dict[str, Any]) -> None:
        content = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the name that http.server calls it by
        """Do not log requests."""
