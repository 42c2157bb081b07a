"""Where training processes ask for clocks inside an iteration: 48-byte records, read in bursts, never answered."""

import asyncio
import contextlib
import logging
import socket
from collections import Counter

from gpuenergyd.daemon.jobs.clock_requests import ClockRecords, Wish
from gpuenergyd.daemon.runtime.peer_credentials import PeerCredentials, peer_credentials
from gpuenergyd.errors import ProtocolError
from gpuenergyd.wire.clock_record import RECORD_BYTES, decode_record

log = logging.getLogger(__name__)

_RECORDS_PER_TURN = 64
_ACCEPT_PAUSE_S = 1.0


class ClockSocket:
    """Owns the listening SEQPACKET socket and its connections; a connection that sends rubbish is closed."""

    def __init__(self, listener: socket.socket, records: ClockRecords, *, max_connections_per_user: int) -> None:
        self._listener = listener
        self._records = records
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
            # Out of descriptors: the connection stays in the queue, and asking again at once would spin.
            log.warning("clock socket: %s; no new connections for %g s", error.strerror, _ACCEPT_PAUSE_S)
            self._loop.remove_reader(self._listener)
            self._resumption = self._loop.call_later(_ACCEPT_PAUSE_S, self._resume_accepting)
            return
        connection.setblocking(False)
        peer = peer_credentials(connection)
        if Counter(p.uid for p in self._connections.values())[peer.uid] >= self._max_connections_per_user:
            log.warning("clock socket: uid %d has %d connections, the limit", peer.uid, self._max_connections_per_user)
            connection.close()
            return
        self._connections[connection] = peer
        self._loop.add_reader(connection, self._read, connection, peer)

    def _resume_accepting(self) -> None:
        self._resumption = None
        self._loop.add_reader(self._listener, self._accept)

    def _read(self, connection: socket.socket, peer: PeerCredentials) -> None:
        for _ in range(_RECORDS_PER_TURN):
            try:
                data = connection.recv(RECORD_BYTES + 1)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._drop(connection)
                return
            try:
                outcome = self._records.take(decode_record(data), peer)
            except ProtocolError:
                outcome = self._records.note_hostile()
            if outcome is Wish.HOSTILE:
                log.warning("clock socket: %s sent a record that cannot be; its connection is closed", peer)
                self._drop(connection)
                return

    def _drop(self, connection: socket.socket) -> None:
        if self._connections.pop(connection, None) is not None:
            self._loop.remove_reader(connection)
            with contextlib.suppress(OSError):
                connection.close()
