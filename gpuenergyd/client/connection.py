"""HTTP over the daemon's Unix socket with the standard library: kept alive, limited in time and size."""

import json
import os
import socket
from typing import Any

from gpuenergyd.client.exchange import exchange
from gpuenergyd.errors import DaemonNotRunningError, ProtocolError

CONNECT_LIMIT_S = 0.05
_CONTROL_LIMIT_S = 10.0


class DaemonConnection:
    """One kept-alive connection to the daemon, for one thread at a time."""

    def __init__(self, socket_path: str) -> None:
        self.socket_path = socket_path
        self._socket: socket.socket | None = None

    def request(self, method: str, path: str, body: bytes | None = None, *, limit_s: float) -> tuple[int, bytes]:
        """Return the status and body of a reply; `limit_s` bounds each wait for the daemon.

        A connection that the daemon closed while idle is opened anew, once; a question that changes nothing is also
        asked anew when the daemon closed without an answer, as one does that is just being restarted.

        Raises:
            OSError: nobody listens, or no reply in time (TimeoutError).
            ProtocolError: the reply is not HTTP, or too large.
        """
        was_open = self._socket is not None
        try:
            return self._exchange(method, path, body, limit_s)
        except ConnectionError as error:
            is_closed_unanswered = method == "GET" and not isinstance(error, ConnectionRefusedError)
            if not was_open and not is_closed_unanswered:
                raise
        return self._exchange(method, path, body, limit_s)

    def close(self) -> None:
        """Close the connection; the next request opens a new one."""
        held, self._socket = self._socket, None
        if held is not None:
            held.close()

    def close_in_child(self) -> None:
        """Close a forked child's copy of the socket."""
        if self._socket is not None:
            close_descriptor(self._socket)

    def _exchange(self, method: str, path: str, body: bytes | None, limit_s: float) -> tuple[int, bytes]:
        try:
            if self._socket is None:
                self._socket = _connect(self.socket_path)
            self._socket.settimeout(limit_s)
            status, data, may_serve_another = exchange(self._socket, method, path, body)
        except OSError:
            self.close()
            raise
        except ValueError as error:
            self.close()
            raise ProtocolError(f"the daemon's reply is not as expected: {error}") from None
        if not may_serve_another:
            self.close()
        return status, data


def _connect(socket_path: str) -> socket.socket:
    """Connect to the Unix socket; the sockets Python makes are close-on-exec."""
    unix_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        unix_socket.settimeout(CONNECT_LIMIT_S)
        unix_socket.connect(socket_path)
    except BaseException:
        unix_socket.close()
        raise
    return unix_socket


def close_descriptor(held: socket.socket) -> None:
    """Close a socket's descriptor and nothing else: takes no lock, so it is safe in a forked child."""
    descriptor = held.detach()
    if descriptor >= 0:
        os.close(descriptor)


class DaemonClient:
    """The daemon as the command line sees it: blocking, with errors that a person can read."""

    def __init__(self, socket_path: str) -> None:
        self._connection = DaemonConnection(socket_path)

    def get_status(self) -> dict[str, Any]:
        """Return the daemon's state.

        Raises:
            DaemonNotRunningError, ProtocolError: as `get`.
        """
        return self.get("/v1/status")

    def get(self, path: str) -> dict[str, Any]:
        """Return what the daemon answers to GET.

        Raises:
            DaemonNotRunningError: nobody answers on the socket.
            ProtocolError: the daemon refuses; the message is its own.
        """
        return self._call("GET", path, None)

    def post(self, path: str, body: object) -> dict[str, Any]:
        """Return what the daemon answers to POST with a JSON body.

        Raises:
            DaemonNotRunningError, ProtocolError: as `get`.
        """
        return self._call("POST", path, json.dumps(body, separators=(",", ":")).encode())

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _call(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            status, data = self._connection.request(method, path, body, limit_s=_CONTROL_LIMIT_S)
        except OSError as error:
            raise DaemonNotRunningError(
                f"no daemon answers on {self._connection.socket_path} ({error.strerror or error}); start it with"
                " 'gpuenergyd serve', or name its socket with --socket or GPUENERGYD_SOCKET"
            ) from None
        try:
            answer = json.loads(data) if data else {}
        except ValueError:
            answer = data.decode(errors="replace")
        if status >= 400:
            reason = answer.get("error", answer) if isinstance(answer, dict) else answer
            raise ProtocolError(f"{method} {path}: the daemon answers {status}: {reason}")
        if not isinstance(answer, dict):
            raise ProtocolError(f"{method} {path}: a JSON object is expected, got {type(answer).__name__}")
        return answer
