"""The worker's end of the link: one core at a time, nothing blocks, what cannot be sent now is kept or counted.

A core that says nothing for longer than it may is as good as gone, whatever its socket says: the link is cut.
"""

import contextlib
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from gpuenergyd.errors import ProtocolError, UsageError
from gpuenergyd.gpu.link.messages import MAX_DATAGRAM_BYTES, MAX_PIDFDS, PEERCRED, decode, encode
from gpuenergyd.service_manager import inherited_socket

_MAX_WAITING_DATAGRAMS = 2_000


class CoreConnection:
    """Listens for the core; `send` may be called on any thread, everything else on the thread that calls `serve`."""

    def __init__(
        self,
        path: Path,
        core_uids: Collection[int],
        *,
        on_message: Callable[[dict[str, Any], Sequence[int]], None],
        on_lost: Callable[[], None],
        silence_limit_s: float,
    ) -> None:
        """Begin to listen; `on_message` gets each message and the file descriptors beside it, which are then its own.

        Raises:
            UsageError: the path cannot be listened on.
        """
        self.num_dropped = 0
        self._path = path
        self._core_uids = core_uids
        self._on_message = on_message
        self._on_lost = on_lost
        self._core: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        self._guard = threading.Lock()
        self._silence_limit_s = silence_limit_s
        self._heard_mono_s = 0.0
        inherited = inherited_socket(None, socket.SOCK_SEQPACKET)
        self._is_socket_ours = inherited is None
        self._listener = inherited or _listen(path)
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain_wakeups)

    @property
    def is_connected(self) -> bool:
        """Whether a core is there."""
        return self._core is not None

    @property
    def wakeup_fd(self) -> int:
        """Writing to it ends `serve` early; for signals."""
        return self._wake_in.fileno()

    def serve(self, timeout_s: float) -> None:
        """Handle what arrives within the time, and send what waits."""
        for key, events in self._selector.select(timeout_s):
            key.data(events)
        self._flush()
        if self._core is not None and time.monotonic() - self._heard_mono_s > self._silence_limit_s:
            log(f"the core has said nothing for {self._silence_limit_s:g} s; it is taken for dead")
            self._lose()

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message; without a core, or when samples pile up, it is dropped."""
        if self._core is None:
            return
        with self._guard:
            if len(self._waiting) >= _MAX_WAITING_DATAGRAMS and message["type"] == "samples":
                self.num_dropped += len(message["rows"])
                return
            self._waiting.append(encode(message))
        with contextlib.suppress(BlockingIOError):
            self._wake_in.send(b"\0")

    def watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        """Call back during `serve` when a file descriptor can be read, until `unwatch`."""
        self._selector.register(fd, selectors.EVENT_READ, lambda _events: on_readable())

    def unwatch(self, fd: int) -> None:
        """Stop to watch a file descriptor."""
        self._selector.unregister(fd)

    def close(self) -> None:
        """Send what can be sent at once and stop listening."""
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
        _, uid, _ = PEERCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size))
        refusal = None
        if uid not in self._core_uids:
            refusal = f"uid {uid} may not command this worker; uids {sorted(self._core_uids)} may"
        elif self._core is not None:
            refusal = "another core is connected"
        connection.setblocking(False)
        if refusal is not None:
            log(f"refused a connection: {refusal}")
            with contextlib.suppress(OSError):
                connection.send(encode({"type": "refused", "error": refusal}))
            connection.close()
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._core = connection
        self._heard_mono_s = time.monotonic()
        self._selector.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self, events: int) -> None:
        while self._core is not None and events & selectors.EVENT_READ:
            fds: list[int] = []
            try:
                datagram, fds, _, _ = socket.recv_fds(
                    self._core, MAX_DATAGRAM_BYTES, MAX_PIDFDS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                datagram = b""
            if not datagram:
                self._lose()
                return
            self._heard_mono_s = time.monotonic()
            try:
                message = decode(datagram)
            except ProtocolError as error:
                log(f"ignored a malformed message: {error!r}")
                for fd in fds:
                    os.close(fd)
                continue
            try:
                self._on_message(message, fds)
            except (ProtocolError, KeyError, TypeError, ValueError, OverflowError) as error:
                log(f"ignored a malformed message: {error!r}")

    def _flush(self) -> None:
        while self._core is not None:
            with self._guard:
                if not self._waiting:
                    break
                datagram = self._waiting.popleft()
            try:
                self._core.send(datagram)
            except BlockingIOError:
                with self._guard:
                    self._waiting.appendleft(datagram)
                self._selector.modify(self._core, selectors.EVENT_READ | selectors.EVENT_WRITE, self._receive)
                return
            except OSError:
                self._lose()
                return
        if self._core is not None:
            self._selector.modify(self._core, selectors.EVENT_READ, self._receive)

    def _lose(self) -> None:
        if self._core is None:
            return
        self._selector.unregister(self._core)
        self._core.close()
        self._core = None
        with self._guard:
            self._waiting.clear()
        self._on_lost()


def log(line: str) -> None:
    """Write one line for people; one per change of state, none per sample."""
    sys.stderr.write(f"gpuenergyd-worker: {line}\n")
    sys.stderr.flush()


def _listen(path: Path) -> socket.socket:
    """Return the listening socket; a socket file nobody answers on is removed, anything else is left alone."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    if os.path.lexists(path):
        if path.is_symlink() or not path.is_socket():
            raise UsageError(f"{path} exists and is no socket; choose another --link path")
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
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
