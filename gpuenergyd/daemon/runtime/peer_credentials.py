"""Who is at the other end of a Unix socket, as the kernel says, and a handle that tells when that process dies."""

import errno
import functools
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
_WHOLE_UID_MAP = [b"0", b"0", b"4294967295"]


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
    """Return whether the peer is root here: root of a container, or of a user namespace, is not.

    What is read of a process by its number counts only while its pidfd says that it lives: check that afterwards.
    """
    return peer.uid == 0 and is_in_our_namespaces(peer)


def is_in_our_namespaces(peer: Peer) -> bool:
    """Return whether the peer lives in the user and pid namespaces of this daemon, and not in a container."""
    return peer.pid > 0 and namespaces_of(peer.pid) == _our_namespaces()


def namespaces_of(pid: int) -> tuple[bytes, int] | None:
    """Return what tells the user and pid namespaces of a process from ours, None when it cannot be looked at."""
    process = Path(f"/proc/{pid}")
    try:
        # The namespace links of another user's process cannot be read, these can.
        return (process / "uid_map").read_bytes(), _pid_depth(process)
    except OSError:
        return None


def is_unmapped(peer: Peer) -> bool:
    """Return whether the uid is the one that the kernel shows for all whom our user namespace does not map."""
    return peer.uid == _overflow_uid() and _our_namespaces()[0].split() != _WHOLE_UID_MAP


def open_pidfd(connection: socket.socket | TransportSocket, peer: Peer) -> int:
    """Return a pidfd of the peer; readable once the process is dead, whoever else holds the socket.

    Raises:
        JobError: the process is gone, or lives where this daemon cannot see it.
    """
    try:
        # The kernel hands out a handle of the very process that connected: no pid can be mistaken for another.
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return open_pidfd_by_number(peer)
        # The kernel knows the call and has no such process any more; whoever has its number now is another.
        raise JobError(f"process {peer.pid} is gone") from None


def open_pidfd_by_number(peer: Peer) -> int:
    """Return a pidfd of the process that has the peer's number now, as kernels before 6.5 need it.

    The number may have passed to another process since the peer connected: one that began at another time while this
    looked, or that runs as another user, is told apart; one of the same user that began before is not.

    Raises:
        JobError: the process is gone, or lives where this daemon cannot see it.
    """
    started = _start_time(peer.pid)
    try:
        pidfd = os.pidfd_open(peer.pid)
    except (OSError, ValueError, OverflowError):
        raise JobError(f"process {peer.pid} is gone, or in a namespace that this daemon cannot see") from None
    if started is None or _start_time(peer.pid) != started or not _runs_as(peer.pid, peer.uid):
        os.close(pidfd)
        raise JobError(f"process {peer.pid} is gone")
    return pidfd


def is_dead(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def require_alive(peer: Peer, pidfd: int) -> None:
    """Check that what was just read of a process by its number was read of this one, and of no heir of the number.

    Raises:
        JobError: the process has ended.
    """
    if is_dead(pidfd):
        raise JobError(f"{peer} has ended")


def _groups_of(connection: socket.socket | TransportSocket) -> tuple[int, ...]:
    for size in _GROUPS_BYTES:
        try:
            packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, size)
        except OSError:
            continue
        return struct.unpack(f"{len(packed) // 4}i", packed)
    return ()


@functools.cache
def _our_namespaces() -> tuple[bytes, int]:
    ours = namespaces_of(os.getpid())
    return ours if ours is not None else (b"", 0)


@functools.cache
def _overflow_uid() -> int:
    return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))


def _pid_depth(process: Path) -> int:
    for line in (process / "status").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("NSpid:"):
            return len(line.split()) - 1
    return 0


def _start_time(pid: int) -> str | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[_START_TIME_FIELD]


def _runs_as(pid: int, uid: int) -> bool:
    """Return whether any of a process's uids is this one: it may have changed some since it connected."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return str(uid) in status.partition("\nUid:")[2].partition("\n")[0].split()
