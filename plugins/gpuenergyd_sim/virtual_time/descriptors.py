"""Selectors, sockets and file locks that wait in virtual time; their calls to the operating system do not block.

A call that waits in C code, such as reading a pipe, stops all virtual time until it returns.
"""

import errno
import fcntl
import os
import select
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any

from gpuenergyd_sim.virtual_time.kernel import TIMED_OUT, VirtualKernel

_Socket: Any = socket.socket
_select, _fcntl, _flock, _open, _close = select.select, fcntl.fcntl, fcntl.flock, os.open, os.close
_NS_PER_S = 1_000_000_000
_LOCK_POLL_S = 0.001
_LOCK = struct.Struct("hhqq")

_kernel: VirtualKernel
"""The kernel of this process; an operating system process has one virtual time."""


def install(kernel: VirtualKernel) -> None:
    """Replace the functions and classes with which programs wait for descriptors, open them and close them."""
    global _kernel  # noqa: PLW0603  see there
    _kernel = kernel
    for module, name, replacement in (
        (selectors, "DefaultSelector", Selector),
        (select, "select", _virtual_select),
        (socket, "socket", Socket),
        (socket, "SocketType", Socket),
        (fcntl, "fcntl", _virtual_fcntl),
        (fcntl, "flock", _virtual_flock),
        (os, "open", _open_descriptor),
        (os, "close", _close_descriptor),
    ):
        setattr(module, name, replacement)


class Selector(selectors.EpollSelector):
    """A selector that waits in virtual time; asyncio's event loop uses it."""

    def select(self, timeout: float | None = None) -> Any:
        """Return the descriptors that are ready within the timeout."""
        ready = super().select(0)
        if ready:
            return ready
        if timeout is not None and timeout <= 0:
            _kernel.give_way()
            return super().select(0)
        _kernel.wait(until_ns=_kernel.deadline_ns(timeout), fd=self.fileno(), events=select.POLLIN)
        return super().select(0)


def _virtual_select(readers: Any, writers: Any, others: Any, timeout: float | None = None) -> Any:
    """Wait in virtual time as `select.select` does, for one descriptor to become readable, and return its result."""
    ready = _select(readers, writers, others, 0)
    if any(ready) or timeout == 0:
        return ready
    (one,) = readers
    _kernel.wait(
        until_ns=_kernel.deadline_ns(timeout), fd=one if isinstance(one, int) else one.fileno(), events=select.POLLIN
    )
    return _select(readers, writers, others, 0)


def _waiting(name: str, events: int) -> Any:
    """Return a socket's method that waits in virtual time for events of its descriptor."""
    blocking = getattr(_Socket, name)

    def call(own: "Socket", *arguments: Any) -> Any:
        return own._until_done(lambda: blocking(own, *arguments), events)  # noqa: SLF001  a method of that class

    return call


class Socket(_Socket):  # type: ignore[misc]  # the replaced class
    """A socket that waits in virtual time; the operating system's socket does not block."""

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:  # noqa: A002
        super().__init__(family, type, proto, fileno)
        self._limit_s: float | None = None if _Socket.getblocking(self) else 0.0
        _Socket.setblocking(self, False)
        _kernel.current.process.sockets.add(self)

    def settimeout(self, value: float | None) -> None:
        self._limit_s = value

    def setblocking(self, flag: bool) -> None:  # noqa: FBT001  as the socket has it
        self._limit_s = None if flag else 0.0

    def gettimeout(self) -> float | None:
        return self._limit_s

    def getblocking(self) -> bool:
        return self._limit_s != 0.0

    @property
    def timeout(self) -> float | None:
        return self._limit_s

    def close(self) -> None:
        _kernel.record_write()
        super().close()

    def connect(self, address: Any) -> None:
        """Connect; waits while the listener's queue is full."""
        self._until_done(lambda: _Socket.connect(self, address), select.POLLOUT, pause_s=0.001)

    def _accept(self) -> Any:
        return self._until_done(lambda: _Socket._accept(self), select.POLLIN)  # noqa: SLF001  `accept` calls it

    recv, recv_into, recvmsg = (_waiting(name, select.POLLIN) for name in ("recv", "recv_into", "recvmsg"))
    send, sendmsg = (_waiting(name, select.POLLOUT) for name in ("send", "sendmsg"))

    def sendall(self, data: Any, flags: int = 0) -> None:
        left = memoryview(data).cast("B")
        while len(left):
            left = left[self.send(left, flags) :]

    def _until_done(self, call: Callable[[], Any], events: int, *, pause_s: float | None = None) -> Any:
        """Repeat a call until it would not block, within the socket's timeout."""
        _kernel.record_write()
        until_ns = None if self._limit_s is None else _kernel.now_ns + round(self._limit_s * _NS_PER_S)
        while True:
            try:
                return call()
            except BlockingIOError:
                if self._limit_s == 0.0:
                    raise
            if pause_s is not None:
                result = _kernel.wait(until_ns=_kernel.now_ns + round(pause_s * _NS_PER_S))
                is_late = until_ns is not None and _kernel.now_ns >= until_ns
            else:
                result = _kernel.wait(until_ns=until_ns, fd=self.fileno(), events=events)
                is_late = result is TIMED_OUT
            if is_late:
                raise TimeoutError(errno.ETIMEDOUT, "timed out")


def _virtual_fcntl(fd: Any, command: int, argument: Any = 0) -> Any:
    """Lock bytes of files between virtual processes, which the operating system sees as one process."""
    if command not in {fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW}:
        return _fcntl(fd, command, argument)
    kind, _, position, _ = _LOCK.unpack_from(argument)
    if (file := _kernel.files.get(fd)) is None:
        status = os.fstat(fd)
        file = _kernel.files[fd] = status.st_dev, status.st_ino
    key = (*file, position)
    if kind == fcntl.F_UNLCK:
        _kernel.unlock_file(key, fd)
    elif not _kernel.lock_file(key, fd, blocks=command == fcntl.F_OFD_SETLKW):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return argument


def _virtual_flock(fd: Any, operation: int) -> None:
    """Lock a file; while another task holds the lock, try again every millisecond."""
    while True:
        try:
            return _flock(fd, operation | (0 if operation & fcntl.LOCK_UN else fcntl.LOCK_NB))
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
        _kernel.sleep(_LOCK_POLL_S)


def _open_descriptor(*arguments: Any, **named: Any) -> int:
    """Open a file, which is closed if the virtual process is killed."""
    fd = _open(*arguments, **named)
    _kernel.current.process.descriptors[fd] = os.fstat(fd).st_ino
    return fd


def _close_descriptor(fd: int) -> None:
    _kernel.current.process.descriptors.pop(fd, None)
    _kernel.unlock_closed(fd)
    _kernel.record_write()
    _close(fd)
