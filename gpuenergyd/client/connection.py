"""HTTP/1.1 over the daemon's Unix socket: persistent connections, limits on time and size, standard library only.

`http.client` parses reply headers with the e-mail parser, which takes more CPU time than the rest of a report while it
holds the training process's interpreter lock. `exchange` parses only what the daemon sends: a status line, header
fields and a body with Content-Length.
"""

import json
import os
import re
import socket
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from gpuenergyd.count_text import count_text
from gpuenergyd.errors import DaemonNotRunningError, ProtocolError, UsageError
from gpuenergyd.wire import MAX_REPLY_BYTES

CONNECT_LIMIT_S = 0.05
_CONTROL_LIMIT_S = 10.0

_MAX_HEAD_BYTES = 65_536
_RECEIVE_BYTES = 65_536
_UNSENDABLE = re.compile(r"[^!-~]")
_JSON_FIELDS = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class HttpConnection:
    """One persistent connection to the daemon, for one thread at a time."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._socket: socket.socket | None = None

    def request(self, method: str, path: str, body: bytes | None = None, *, limit_s: float) -> tuple[int, bytes]:
        """Send one request and return the status and body of its reply; see `request_all`."""
        return self.request_all(method, path, (body,), limit_s=limit_s)[0]

    def request_all(
        self, method: str, path: str, bodies: Sequence[bytes | None], *, limit_s: float
    ) -> list[tuple[int, bytes]]:
        """Send all requests together; return status and body of each reply. `limit_s` limits each wait for the daemon.

        If the daemon has closed the idle connection, the requests are sent again once on a new one. A GET request is
        also repeated if a restarting daemon closes the connection without a reply.

        Raises:
            OSError: no daemon listens on the socket, or there was no reply in time (TimeoutError).
            ProtocolError: a reply is not valid HTTP or too large.
        """
        was_open = self._socket is not None
        try:
            return self._exchange(method, path, bodies, limit_s)
        except ConnectionError as error:
            is_closed_unanswered = method == "GET" and not isinstance(error, ConnectionRefusedError)
            if not was_open and not is_closed_unanswered:
                raise
        return self._exchange(method, path, bodies, limit_s)

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        held, self._socket = self._socket, None
        if held is not None:
            held.close()

    def close_in_child(self) -> None:
        """Close a forked child's copy of the socket."""
        if self._socket is not None:
            close_descriptor(self._socket)

    def _exchange(
        self, method: str, path: str, bodies: Sequence[bytes | None], limit_s: float
    ) -> list[tuple[int, bytes]]:
        try:
            if self._socket is None:
                self._socket = _connect(self.socket_path)
            self._socket.settimeout(limit_s)
            replies, may_serve_another = exchange(self._socket, method, path, bodies)
        except OSError:
            self.close()
            raise
        except ValueError as error:
            self.close()
            raise ProtocolError(f"invalid reply of the daemon: {error}") from None
        if not may_serve_another:
            self.close()
        return replies


def _connect(socket_path: str) -> socket.socket:
    """Return a connected Unix socket; Python's sockets are close-on-exec."""
    unix_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        unix_socket.settimeout(CONNECT_LIMIT_S)
        unix_socket.connect(socket_path)
    except BaseException:
        unix_socket.close()
        raise
    return unix_socket


def close_descriptor(held: socket.socket) -> None:
    """Close only a socket's descriptor; acquires no lock and is therefore safe in a forked child."""
    descriptor = held.detach()
    if descriptor >= 0:
        os.close(descriptor)


def exchange(
    connected: socket.socket, method: str, path: str, bodies: Sequence[bytes | None]
) -> tuple[list[tuple[int, bytes]], bool]:
    """Send all requests together; return status and body of each reply, and whether the connection can be reused.

    After a reply that closes the connection, the remaining requests have no reply.

    Raises:
        OSError: the daemon closed the connection, or did not reply within the socket's timeout (TimeoutError).
        ValueError: a reply is not valid HTTP, has no Content-Length, or is too large.
    """
    if _UNSENDABLE.search(path):
        raise ValueError(f"path {path!r}: must be printable ASCII without spaces")
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
    connected.sendall(
        b"".join([head + b"\r\n" if body is None else head + _JSON_FIELDS % len(body) + body for body in bodies])
    )
    received = bytearray()
    replies: list[tuple[int, bytes]] = []
    for _ in bodies:
        status, data, may_serve_another = _receive_reply(connected, received)
        replies.append((status, data))
        if not may_serve_another:
            return replies, False
    if received:
        raise ValueError(f"{count_text(len(received), 'byte')} beyond the reply's Content-Length")
    return replies, True


def _receive_reply(connected: socket.socket, received: bytearray) -> tuple[int, bytes, bool]:
    """Take the next reply from the received bytes, and receive the part that is still missing."""
    while (end := received.find(b"\r\n\r\n")) < 0:
        if len(received) > _MAX_HEAD_BYTES:
            raise ValueError(f"reply headers exceed {_MAX_HEAD_BYTES} bytes")
        received += _receive(connected)
    status_line, *lines = bytes(received[:end]).split(b"\r\n")
    status = _status(status_line)
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    reply_end = end + 4 + _length(fields)
    while len(received) < reply_end:
        received += _receive(connected)
    data = bytes(received[end + 4 : reply_end])
    del received[:reply_end]
    return status, data, fields.get(b"connection", b"").lower() != b"close"


def _receive(connected: socket.socket) -> bytes:
    data = connected.recv(_RECEIVE_BYTES)
    if not data:
        raise ConnectionResetError("the daemon closed the connection")
    return data


def _status(line: bytes) -> int:
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/1.") or not code.isdigit():
        raise ValueError(f"invalid status line {line[:80]!r}")
    return int(code)


def _length(fields: dict[bytes, bytes]) -> int:
    length = fields.get(b"content-length", b"")
    if not length.isdigit():
        raise ValueError("reply without Content-Length")
    if int(length) > MAX_REPLY_BYTES:
        raise ValueError(f"reply of {int(length)} bytes; at most {MAX_REPLY_BYTES} are accepted")
    return int(length)


def refusal_reason(data: bytes) -> str:
    """Return the reason given in the body of an error response."""
    text = data.decode(errors="replace")
    try:
        answer = json.loads(text)
    except ValueError:
        return text
    return str(answer["error"]) if isinstance(answer, dict) and "error" in answer else text


class DaemonClient:
    """Blocking client for the command line, with readable errors; `limit_s` limits each wait for the daemon."""

    def __init__(self, socket_path: str, *, limit_s: float = _CONTROL_LIMIT_S) -> None:
        self._connection = HttpConnection(socket_path)
        self._limit_s = limit_s

    def get_status(self) -> dict[str, Any]:
        """Return the daemon's status.

        Raises:
            DaemonNotRunningError, UsageError, ProtocolError: as `get`.
        """
        return self.get("/v1/status")

    def get(self, path: str) -> dict[str, Any]:
        """Return the daemon's JSON reply to GET.

        Raises:
            DaemonNotRunningError: no daemon listens on the socket.
            UsageError: a value in the request is invalid; the message is the daemon's.
            ProtocolError: the daemon rejected the request; the message contains its reason.
        """
        return self._call("GET", path, None)

    def post(self, path: str, body: object) -> dict[str, Any]:
        """Return the daemon's JSON reply to POST with a JSON body.

        Raises:
            DaemonNotRunningError, UsageError, ProtocolError: as `get`.
        """
        return self._call("POST", path, json.dumps(body, separators=(",", ":")).encode())

    def put(self, path: str, body: object) -> dict[str, Any]:
        """Return the daemon's JSON reply to PUT with a JSON body.

        Raises:
            DaemonNotRunningError, UsageError, ProtocolError: as `get`.
        """
        return self._call("PUT", path, json.dumps(body, separators=(",", ":")).encode())

    def patch(self, path: str, body: object) -> dict[str, Any]:
        """Return the daemon's JSON reply to PATCH with a JSON body.

        Raises:
            DaemonNotRunningError, UsageError, ProtocolError: as `get`.
        """
        return self._call("PATCH", path, json.dumps(body, separators=(",", ":")).encode())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _call(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            status, data = self._connection.request(method, path, body, limit_s=self._limit_s)
        except PermissionError as error:
            raise DaemonNotRunningError(
                f"uid {os.geteuid()} may not connect to {self._connection.socket_path} ({error.strerror}):"
                " `gpuenergyd doctor` shows the group that may"
            ) from None
        except OSError as error:
            raise DaemonNotRunningError(
                f"no daemon answers on {self._connection.socket_path} ({error.strerror or error}); start it with"
                " 'gpuenergyd serve', or name its socket with --socket or GPUENERGYD_SOCKET"
            ) from None
        if status == HTTPStatus.BAD_REQUEST:
            raise UsageError(refusal_reason(data))
        if status >= 400:
            raise ProtocolError(f"{method} {path}: the daemon answered {status}: {refusal_reason(data)}")
        try:
            answer = json.loads(data) if data else {}
        except ValueError:
            answer = data.decode(errors="replace")
        if not isinstance(answer, dict):
            raise ProtocolError(f"{method} {path}: expected a JSON object, got {type(answer).__name__}")
        return answer
