"""Clock socket: receives the clock requests of training processes in bursts and answers none."""

import asyncio
import contextlib
import logging
import socket
from collections import Counter

from gpuenergyd.count_text import count_text
from gpuenergyd.daemon.jobs.clock_requests import Admission, ClockRequests
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, peer_credentials
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.clock_request import MAX_DATAGRAM_BYTES, decode_clock_request

log = logging.getLogger(__name__)

_REQUESTS_PER_TURN = 64
_ACCEPT_PAUSE_S = 1.0


class ClockSocket:
    """The listening SEQPACKET socket and its connections; one hostile request closes its connection."""

    def __init__(self, listener: socket.socket, requests: ClockRequests, *, max_connections_per_user: int) -> None:
        self._listener = listener
        self._requests = requests
        self._max_connections_per_user = max_connections_per_user
        self._connections: dict[socket.socket, PeerCredentials] = {}
        self._loop = asyncio.get_running_loop()
        self._resumption: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening and drop every connection."""
        if self._resumption is not None:
            self._resumption.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for connection in list(self._connections):
            self._drop(connection)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:
            # Out of descriptors: the connection stays in the queue, so accepting again at once would spin.
            log.warning("clock socket: %s; accepting no connections for %g s", error.strerror, _ACCEPT_PAUSE_S)
            self._loop.remove_reader(self._listener)
            self._resumption = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)
            return
        connection.setblocking(False)
        peer = peer_credentials(connection)
        if Counter(p.uid for p in self._connections.values())[peer.uid] >= self._max_connections_per_user:
            log.warning(
                "clock socket: refused uid %d, which has the maximum of %s",
                peer.uid,
                count_text(self._max_connections_per_user, "connection"),
            )
            connection.close()
            return
        self._connections[connection] = peer
        self._loop.add_reader(connection, self._read, connection, peer)

    def _resume_accepting(self) -> None:
        self._resumption = None
        self._loop.add_reader(self._listener, self._accept)

    def _read(self, connection: socket.socket, peer: PeerCredentials) -> None:
        for _ in range(_REQUESTS_PER_TURN):
            try:
                data = connection.recv(MAX_DATAGRAM_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
                return
            try:
                admission = self._requests.admit(decode_clock_request(data), peer)
            except ProtocolError:
                admission = self._requests.count_hostile()
            if admission is Admission.HOSTILE:
                log.warning("clock socket: closing the connection of %s after an impossible clock request", peer)
                self._drop(connection)
                return

    def _drop(self, connection: socket.socket) -> None:
        if self._connections.pop(connection, None) is not None:
            self._loop.remove_reader(connection)
            with contextlib.suppress(OSError):
                connection.close()
