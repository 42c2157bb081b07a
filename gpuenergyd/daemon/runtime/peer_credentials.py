"""Kernel credentials (SO_PEERCRED) and pidfds of the processes that connect to a Unix socket."""

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
from gpuenergyd.gpu.process_identity import process_start_ticks

_UCRED = struct.Struct("3i")
_SO_PEERGROUPS = 59
_SO_PEERPIDFD = 77
"""Since Linux 6.5. Python 3.11 defines neither constant."""
_GROUPS_BYTES = (256, 65_536 * 4)
_IDENTITY_UID_MAP = [b"0", b"0", b"4294967295"]


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """Ids of a client process at the time it connected."""

    pid: int
    uid: int
    gid: int
    groups: tuple[int, ...] = ()
    """Supplementary groups."""

    def __str__(self) -> str:
        return f"uid {self.uid} pid {self.pid}"


def peer_credentials(connection: socket.socket | TransportSocket) -> PeerCredentials:
    """Return the credentials of the process that connected."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return PeerCredentials(pid, uid, gid, _groups_of(connection))


def is_host_root(peer: PeerCredentials) -> bool:
    """Return whether the peer is root of this host; root of a container or of another user namespace is not.

    Facts read from /proc by pid are valid only while the process lives: check its pidfd afterwards.
    """
    return peer.uid == 0 and is_in_our_namespaces(peer)


def is_in_our_namespaces(peer: PeerCredentials) -> bool:
    """Return whether the peer shares the user and pid namespaces of this daemon, so is not in a container."""
    return peer.pid > 0 and namespaces_of(peer.pid) == _our_namespaces()


def namespaces_of(pid: int) -> tuple[bytes, int] | None:
    """Return the uid map and pid namespace depth of a process; None if they cannot be read."""
    process = Path(f"/proc/{pid}")
    try:
        # /proc/PID/ns of another user's process is unreadable; these files are readable.
        return (process / "uid_map").read_bytes(), _pid_depth(process)
    except OSError:
        return None


def is_unmapped(peer: PeerCredentials) -> bool:
    """Return whether the uid is the overflow uid, which the kernel shows for users outside our user namespace."""
    return peer.uid == _overflow_uid() and _our_namespaces()[0].split() != _IDENTITY_UID_MAP


def open_pidfd(connection: socket.socket | TransportSocket, peer: PeerCredentials) -> int:
    """Return a pidfd of the peer; it becomes readable when the process ends, even if a child still holds the socket.

    Raises:
        JobError: the process has ended, or is in a pid namespace that this daemon cannot see.
    """
    try:
        # The kernel returns a handle of the process that connected, even if its pid has been reused.
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return open_pidfd_by_number(peer)
        # The kernel supports the option, so the process has ended; its pid may belong to another process by now.
        raise JobError(f"process {peer.pid} has ended") from None


def open_pidfd_by_number(peer: PeerCredentials) -> int:
    """Return a pidfd of the process that has the peer's pid now; the fallback for kernels before 6.5.

    The pid may have been reused since the peer connected. A process that started during this call, or that runs as
    another user, is detected and refused; a process of the same user that started earlier is not detected.

    Raises:
        JobError: the process has ended, or is in a pid namespace that this daemon cannot see.
    """
    started = process_start_ticks(peer.pid)
    try:
        pidfd = os.pidfd_open(peer.pid)
    except (OSError, ValueError, OverflowError):
        raise JobError(f"process {peer.pid} has ended or is in a pid namespace that the daemon cannot see") from None
    if started is None or process_start_ticks(peer.pid) != started or not _runs_as(peer.pid, peer.uid):
        os.close(pidfd)
        raise JobError(f"process {peer.pid} has ended")
    return pidfd


def is_dead(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


def require_alive(peer: PeerCredentials, pidfd: int) -> None:
    """Check that the process still lives, so that facts just read by pid are about it and not about a reused pid.

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


def _runs_as(pid: int, uid: int) -> bool:
    """Return whether any of the process's uids is `uid`; it may have changed some of them since it connected."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return str(uid) in status.partition("\nUid:")[2].partition("\n")[0].split()
