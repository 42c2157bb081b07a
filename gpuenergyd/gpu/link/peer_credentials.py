"""Kernel credentials of the process at the other end of the link."""

import socket
import struct
from asyncio.trsock import TransportSocket

_UCRED = struct.Struct("3i")
"""Layout of SO_PEERCRED: pid, uid, gid."""


def peer_pid(connection: socket.socket | TransportSocket) -> int:
    """Return the process id of the peer; for a listening peer, of the process that began to listen."""
    return _credentials(connection)[0]


def peer_uid(connection: socket.socket | TransportSocket) -> int:
    """Return the user id of the peer."""
    return _credentials(connection)[1]


def _credentials(connection: socket.socket | TransportSocket) -> tuple[int, int, int]:
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid, gid
