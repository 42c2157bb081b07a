"""Unix sockets to listen on: one daemon per folder, stale files replaced, anything else left alone."""

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
    """Held by the one daemon of a runtime folder for as long as it lives."""

    path: Path
    _fd: int = field(default=-1)

    def acquire(self) -> Self:
        """Take the lock.

        Raises:
            GpuEnergyError: another daemon has it, or the folder cannot be used.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            _require_own_folder(self.path.parent)
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise GpuEnergyError(f"{self.path}: {error.strerror}; --runtime-dir names another folder") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise GpuEnergyError(f"a daemon already runs in {self.path.parent} (pid {holder})") from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def release(self) -> None:
        """Let go; the file stays, since removing it could remove another daemon's."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening, non-blocking Unix socket; one that the service manager opened outlives this process."""

    socket: socket.socket
    path: Path
    is_inherited: bool = False

    def close(self) -> None:
        """Stop listening; a socket file of ours goes too."""
        self.socket.close()
        if not self.is_inherited:
            with contextlib.suppress(OSError):
                if self.path.is_socket():
                    self.path.unlink()


def open_listener(path: Path, kind: socket.SocketKind, *, group: str | None) -> Listener:
    """Return the service manager's socket at `path` if it handed us one, else one of our own. Hold the instance lock.

    Who may connect to an inherited one is the service manager's to say (`SocketGroup=`).

    Raises:
        GpuEnergyError, UsageError: as `listen`.
    """
    inherited = inherited_socket(path, kind)
    if inherited is not None:
        return Listener(inherited, path, is_inherited=True)
    return Listener(listen(path, kind, group=group), path)


def listen(path: Path, kind: socket.SocketKind, *, group: str | None, backlog: int = _BACKLOG) -> socket.socket:
    """Return a listening, non-blocking socket at `path`, mode 0660, owned by `group`. Hold the instance lock.

    Raises:
        GpuEnergyError: something that is no stale socket lies there, or it cannot be made.
        UsageError: no such group.
    """
    gid = _group_id(group)
    _clear_stale(path, kind)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        # Nobody can connect between bind and listen, so the mode is right before the first connection.
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
    """Check that nobody else can put files of theirs in the place of ours; a folder under /tmp can be anybody's."""
    found = folder.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        raise GpuEnergyError(f"{folder} is no folder")
    if found.st_uid not in {0, os.geteuid()} or found.st_mode & stat.S_IWOTH:
        raise GpuEnergyError(
            f"{folder} belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}; it must belong to"
            f" uid {os.geteuid()} and not be writable for everyone"
        )


def _clear_stale(path: Path, kind: socket.SocketKind) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise GpuEnergyError(f"{path} exists and is no socket; it is left alone")
    with socket.socket(socket.AF_UNIX, kind) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink()
                return
            raise GpuEnergyError(f"{path}: {error.strerror or error}") from None
    raise GpuEnergyError(f"another process listens on {path}")


def _group_id(group: str | None) -> int | None:
    if group is None:
        return None
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        raise UsageError(
            f"socket_group: no group {group!r} on this host; `groupadd --system {group}` makes it"
        ) from None
