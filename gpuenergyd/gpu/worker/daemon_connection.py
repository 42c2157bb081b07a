"""Worker's end of the link to the daemon: one daemon at a time, non-blocking; datagrams that cannot be sent are queued.

A daemon that sends nothing for `silence_limit_s` is treated as dead, even if its socket is open: the link is cut. Time
that it waits for a CPU does not count, and what it sent while this process waited for one is read first.
"""

import contextlib
import os
import select
import selectors
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from gpuenergyd.errors import ProtocolError, UsageError
from gpuenergyd.gpu.link.codec import MAX_DATAGRAM_BYTES, MAX_PIDFDS, decode, encode
from gpuenergyd.gpu.link.messages import Failed, Message, Samples
from gpuenergyd.gpu.link.peer_credentials import peer_pid, peer_uid
from gpuenergyd.log_lines import write_log_line
from gpuenergyd.service_manager import inherited_socket
from gpuenergyd.silence import Silence

_MAX_WAITING_DATAGRAMS = 2_000


class DaemonConnection:
    """Listens for the daemon. `send` may be called on any thread, everything else on the thread that calls `serve`."""

    def __init__(
        self,
        path: Path,
        daemon_uids: Collection[int],
        *,
        on_message: Callable[[int | None, Message, Sequence[int]], None],
        on_lost: Callable[[], None],
        silence_limit_s: float,
        predecessor_limit_s: float = 0.0,
    ) -> None:
        """Start listening; `on_message` gets request id, message and file descriptors, and owns the descriptors.

        Another worker that still listens gets `predecessor_limit_s` to end.

        Raises:
            UsageError: the socket cannot be created at the path.
        """
        self.num_dropped = 0
        self._path = path
        self._daemon_uids = daemon_uids
        self._on_message = on_message
        self._on_lost = on_lost
        self._daemon: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        self._guard = threading.Lock()
        self._silence_limit_s = silence_limit_s
        self._silence = Silence(None)
        inherited = inherited_socket(None, socket.SOCK_SEQPACKET)
        self._is_socket_ours = inherited is None
        self._listener = inherited or _listen(path, predecessor_limit_s)
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakeups)

    @property
    def is_connected(self) -> bool:
        return self._daemon is not None

    @property
    def wakeup_fd(self) -> int:
        """File descriptor for signal.set_wakeup_fd: a byte written to it ends `serve` early."""
        return self._wake_in.fileno()

    def serve(self, timeout_s: float) -> None:
        """Handle datagrams that arrive within `timeout_s`, and send queued ones."""
        for key, events in self._selector.select(timeout_s):
            key.data(events)
        self._flush()
        if self._daemon is not None and self._silence.left_s(self._silence_limit_s) <= 0:
            log(f"no heartbeat from the daemon for {self._silence_limit_s:g} s; assuming it died")
            self._lose()

    def send(self, message: Message, request_id: int | None = None) -> None:
        """Queue a message; without a daemon it is dropped, and so are samples when the queue is full."""
        if self._daemon is None:
            return
        with self._guard:
            if len(self._waiting) >= _MAX_WAITING_DATAGRAMS and isinstance(message, Samples):
                self.num_dropped += len(message.samples)
                return
            self._waiting.append(encode(message, request_id))
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"\0")

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call back during `serve` when a file descriptor is readable, until `unwatch`."""
        self._selector.register(fd, selectors.EVENT_READ, lambda _events: on_readable())

    def unwatch(self, fd: int) -> None:
        """Stop watching a file descriptor."""
        self._selector.unregister(fd)

    def close(self) -> None:
        """Send as many queued datagrams as the socket accepts, and stop listening."""
        self._flush()
        if self._is_socket_ours:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def _drain_wakeups(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _accept(self, _events: int) -> None:
        connection, _ = self._listener.accept()
        uid = peer_uid(connection)
        refusal = None
        if uid not in self._daemon_uids:
            refusal = f"uid {uid} is not allowed to control this worker; allowed uids: {sorted(self._daemon_uids)}"
        elif self._daemon is not None:
            refusal = "another daemon is connected"
        connection.setblocking(False)
        if refusal is not None:
            log(f"refused a connection: {refusal}")
            with contextlib.suppress(OSError):
                connection.send(encode(Failed(refusal)))
            connection.close()
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._daemon, self._silence = connection, Silence(peer_pid(connection))
        self._selector.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self, events: int) -> None:
        while self._daemon is not None and events & selectors.EVENT_READ:
            fds: list[int] = []
            try:
                datagram, fds, _, _ = socket.recv_fds(
                    self._daemon, MAX_DATAGRAM_BYTES, MAX_PIDFDS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                datagram = b""
            if not datagram:
                self._lose()
                return
            self._silence.begin()
            try:
                request_id, message = decode(datagram)
            except ProtocolError as error:
                log(f"ignored an invalid message: {error}")
                close_all(fds)
                continue
            self._on_message(request_id, message, fds)

    def _flush(self) -> None:
        while self._daemon is not None:
            with self._guard:
                if not self._waiting:
                    break
                datagram = self._waiting.popleft()
            try:
                self._daemon.send(datagram)
            except BlockingIOError:
                with self._guard:
                    self._waiting.appendleft(datagram)
                self._selector.modify(self._daemon, selectors.EVENT_READ | selectors.EVENT_WRITE, self._receive)
                return
            except OSError:
                self._lose()
                return
        if self._daemon is not None:
            self._selector.modify(self._daemon, selectors.EVENT_READ, self._receive)

    def _lose(self) -> None:
        if self._daemon is None:
            return
        self._selector.unregister(self._daemon)
        self._daemon.close()
        self._daemon = None
        with self._guard:
            self._waiting.clear()
        self._on_lost()


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors."""
    for fd in fds:
        os.close(fd)


def log(line: str) -> None:
    """Write a line to standard error: one per change of state, none per sample."""
    write_log_line("gpuenergyd-worker", line)


def _listen(path: Path, predecessor_limit_s: float) -> socket.socket:
    """Return the listening socket; a stale socket file is replaced, any other file is left alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    give_up_mono_s = time.monotonic() + predecessor_limit_s
    while (pid := _listening_pid(path)) is not None:
        if not _has_ended(pid, give_up_mono_s - time.monotonic()):
            raise UsageError(f"a worker already listens on {path}")
    mask = os.umask(0o117)
    try:
        listener.bind(str(path))
    except OSError as error:
        raise UsageError(f"cannot listen on {path}: {error.strerror}") from None
    finally:
        os.umask(mask)
    listener.listen(4)
    return listener


def _listening_pid(path: Path) -> int | None:
    """Return the pid of the worker that listens; without one return None, and remove its stale socket file.

    Raises:
        UsageError: another kind of file has this path.
    """
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise UsageError(f"{path} exists and is not a socket; choose another --link path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.connect(str(path))
            return peer_pid(probe)
    except FileNotFoundError:
        return None
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
        return None


def _has_ended(pid: int, timeout_s: float) -> bool:
    """Wait for the end of a process; return whether it ended in time."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], max(timeout_s, 0.0))[0])
    finally:
        os.close(pidfd)
