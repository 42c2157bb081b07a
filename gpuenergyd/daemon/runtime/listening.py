"""Listening Unix sockets, and a file lock that allows one daemon per runtime directory."""

import contextlib
import errno
import fcntl
import grp
import os
import socket
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from gpuenergyd.errors import GpuEnergyError, UsageError
from gpuenergyd.service_manager import inherited_socket

_BACKLOG = 256


@dataclass(slots=True)
class InstanceLock:
    """An exclusive file lock that a daemon holds on its runtime directory while it runs."""

    path: Path
    _fd: int = field(default=-1)

    def acquire(self) -> Self:
        """Acquire the lock; raise GpuEnergyError if another daemon holds it or the directory cannot be used."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            _require_own_folder(self.path.parent)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise GpuEnergyError(
                f"cannot lock {self.path}: {error.strerror}; choose another directory with --runtime-dir"
            ) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise GpuEnergyError(
                f"a daemon with pid {holder} already uses the runtime directory {self.path.parent}"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def release(self) -> None:
        """Release the lock but keep the file, since removing it could remove another daemon's lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening, non-blocking Unix socket, opened by this process or inherited from the service manager."""

    socket: socket.socket
    path: Path
    is_inherited: bool = False

    def close(self) -> None:
        """Close the socket, and remove its file unless the service manager owns it."""
        self.socket.close()
        if not self.is_inherited:
            with contextlib.suppress(OSError):
                if self.path.is_socket():
                    self.path.unlink()


def open_listener(path: Path, kind: socket.SocketKind, *, group: str | None) -> Listener:
    """Return the socket that the service manager opened at `path`, or open one. The caller holds the instance lock.

    The permissions of an inherited socket are those of its unit (`SocketGroup=`, `SocketMode=`).

    Raises:
        GpuEnergyError, UsageError: see `listen`.
    """
    inherited = inherited_socket(path, kind)
    if inherited is not None:
        return Listener(inherited, path, is_inherited=True)
    return Listener(listen(path, kind, group=group), path)


def listen(path: Path, kind: socket.SocketKind, *, group: str | None, backlog: int = _BACKLOG) -> socket.socket:
    """Return a listening, non-blocking socket at `path`, mode 0660, group `group`. The caller holds the instance lock.

    Raises:
        GpuEnergyError: the path is in use or not a socket, or the socket cannot be created.
        UsageError: the group does not exist.
    """
    gid = _group_id(group)
    _clear_stale(path, kind)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        # Nobody can connect between bind and listen, so the mode is set before the first connection.
        listener.bind(str(path))
        path.chmod(0o660)
        if gid is not None:
            os.chown(path, -1, gid)
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise GpuEnergyError(f"cannot listen on {path}: {error.strerror or error}") from None
    return listener


def _require_own_folder(folder: Path) -> None:
    """Check that no other user can replace files in a directory; a directory under /tmp may be anyone's."""
    found = folder.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        raise GpuEnergyError(f"{folder} is not a directory")
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & stat.S_IWOTH:
        raise GpuEnergyError(
            f"{folder} belongs to uid {found.st_uid} and has mode {stat.S_IMODE(found.st_mode):o}; it must belong to"
            f" uid {os.geteuid()} and must not be world-writable"
        )


def _clear_stale(path: Path, kind: socket.SocketKind) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise GpuEnergyError(f"{path} exists and is not a socket; remove it or choose another path")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink()
                return
            raise GpuEnergyError(f"{path}: {error.strerror or error}") from None
    raise GpuEnergyError(f"another process is already listening on {path}")


def _group_id(group: str | None) -> int | None:
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(
            f"socket_group: group {group!r} does not exist; create it with `groupadd --system {group}`"
        ) from None
