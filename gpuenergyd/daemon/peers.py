"""Who is at the other end of a Unix socket, as the kernel says, and a handle that tells when that process dies."""

import os
import select
import socket
import struct
from asyncio.trsock import TransportSocket
from dataclasses import dataclass
from pathlib import Path

from gpuenergyd.errors import JobError

_UCRED = struct.Struct("3i")
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
"""Linux 6.5. Python 3.11 has no name for either."""
_GROUPS_BYTES = (256, 65_536 * 4)
_START_TIME_FIELD = 19
"""Of /proc/PID/stat, counted after the process name's closing parenthesis."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A process as it was when it connected."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    """Supplementary groups."""

    def __str__(self) -> str:
        return f"uid {self.uid} pid {self.pid}"


def peer_of(connection: socket.socket | TransportSocket) -> Peer:
    """Return who connected."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid, gid, _groups_of(connection))


def is_host_root(peer: Peer) -> bool:
    """Return whether the peer is root here: root of a container, or of a user namespace, is not."""
    if peer.uid != 0 or peer.pid <= 0:
        return False
    theirs, ours = Path(f"/proc/{peer.pid}"), Path("/proc/self")
    try:
        # The namespace links of another user's process cannot be read, these can.
        return (theirs / "uid_map").read_bytes() == (ours / "uid_map").read_bytes() and _pid_depth(
            theirs
        ) == _pid_depth(ours)
    except OSError:
        return False


def open_pidfd(connection: socket.socket | TransportSocket, peer: Peer) -> int:
    """Return a pidfd of the peer; readable once the process is dead, whoever else holds the socket.

    Raises:
        JobError: the process is gone, or lives where this daemon cannot see it.
    """
    try:
        # The kernel hands out a handle of the very process that connected: no pid can be mistaken for another.
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    started = _start_time(peer.pid)
    try:
        pidfd = os.pidfd_open(peer.pid)
    except (OSError, ValueError, OverflowError):
        raise JobError(f"process {peer.pid} is gone, or in a namespace that this daemon cannot see") from None
    if started is None or _start_time(peer.pid) != started:
        os.close(pidfd)
        raise JobError(f"process {peer.pid} is gone")
    return pidfd


def is_dead(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def _groups_of(connection: socket.socket | TransportSocket) -> tuple[int, ...]:
    for size in _GROUPS_BYTES:
        try:
            packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size)
        except OSError:
            continue
        return struct.unpack(f"{len(packed) // 4}i", packed)
    return ()


def _pid_depth(process: Path) -> int:
    for line in (process / "status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return len(line.split())
    return 0


def _start_time(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[_START_TIME_FIELD]
