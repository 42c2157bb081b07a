"""One HTTP/1.1 request and its reply on a connected socket, lean enough for a training process.

The standard library's client parses a reply's head with the parser for e-mails, which costs more CPU than everything
else in a report, and a training process pays for it with its interpreter lock. This speaks what the daemon speaks: a
status line, fields, and a body whose length is said.
"""

import re
import socket

MAX_REPLY_BYTES = 4_194_304
_MAX_HEAD_BYTES = 65_536
_RECEIVE_BYTES = 65_536
_UNSENDABLE = re.compile(r"[^!-~]")


def exchange(connected: socket.socket, method: str, path: str, body: bytes | None) -> tuple[int, bytes, bool]:
    """Return status, body, and whether the connection may serve another request.

    Raises:
        OSError: the peer is gone, or silent for longer than the socket's time limit (TimeoutError).
        ValueError: the reply is not the HTTP that is understood here, or too large.
    """
    if _UNSENDABLE.search(path):
        raise ValueError(f"path {path!r}: printable ASCII without spaces is expected")
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    connected.sendall(f"{head}\r\n".encode() + (body or b""))
    received = _receive(connected)
    while (end := received.find(b"\r\n\r\n")) < 0:
        if len(received) > _MAX_HEAD_BYTES:
            raise ValueError(f"no end of the head within {_MAX_HEAD_BYTES} bytes")
        received += _receive(connected)
    status_line, *lines = received[:end].split(b"\r\n")
    status = _status(status_line)
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    length = _length(fields)
    data = bytearray(received[end + 4 :])
    while len(data) < length:
        data += _receive(connected)
    if len(data) > length:
        raise ValueError(f"{len(data) - length} bytes after the end of the reply")
    return status, bytes(data), fields.get(b"connection", b"").lower() != b"close"


def _receive(connected: socket.socket) -> bytes:
    data = connected.recv(_RECEIVE_BYTES)
    if not data:
        raise ConnectionResetError("the daemon closed the connection")
    return data


def _status(line: bytes) -> int:
    version, _, rest = line.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/1.") or not code.isdigit():
        raise ValueError(f"status line {line[:80]!r}")
    return int(code)


def _length(fields: dict[bytes, bytes]) -> int:
    said = fields.get(b"content-length", b"")
    if not said.isdigit():
        raise ValueError("a reply without Content-Length")
    if int(said) > MAX_REPLY_BYTES:
        raise ValueError(f"a reply of {int(said)} bytes; at most {MAX_REPLY_BYTES} are taken")
    return int(said)
