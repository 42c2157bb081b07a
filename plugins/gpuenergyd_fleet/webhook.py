"""The webhook for grid events: `POST /v1/grid-events`, signed with HMAC-SHA256 and a key shared with the operator.

The signature covers the time of sending and the body. A message sent more than five minutes before or after now is
refused. A repeated message changes nothing, because an older version never replaces a newer one.
"""

import hmac
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from gpuenergyd.cli.http_server import CommandServer, RequestHandler
from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd_fleet.decisions.grid_event import GridEvent
from gpuenergyd_fleet.event_input import EventStore, event_of_json

log = logging.getLogger(__name__)

PATH = "/v1/grid-events"
TIME_HEADER = "X-Gpuenergyd-Time"
SIGNATURE_HEADER = "X-Gpuenergyd-Signature"
LEAST_KEY_CHARS = 32
MAX_BODY_BYTES = 16_384
MAX_AGE_S = 300.0
MAX_EVENTS_PER_MINUTE = 60
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


class WebhookServer(CommandServer):
    """Passes messages on to a receiver."""

    def __init__(self, address: str, port: int, receiver: EventReceiver) -> None:
        self.receiver = receiver
        super().__init__(address, port, _EventHandler)


class _EventHandler(RequestHandler):
    server: WebhookServer  # pyright: ignore[reportIncompatibleVariableOverride]  http.server names it so

    def do_POST(self) -> None:  # noqa: N802  the name that http.server calls
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
        headers = {"Content-Type": "application/json", "Connection": "close"}
        self.send(status, headers, json.dumps(reply).encode())
        self.close_connection = True
