"""Python's clocks, threads, locks, selectors, sockets and signals, replaced by those of a kernel of virtual time.

`install` comes before every import of a module that uses them, in a process that does nothing else: what it replaces is
not put back. The replacements cover what the daemon, its helpers and a training program use; a call that waits in C
code, such as reading a pipe, stops all virtual time until it returns.
"""

import ctypes
import datetime as datetime_module
import errno
import fcntl
import gc
import os
import queue
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from gpuenergyd.virtual_time.kernel import TIMED_OUT, Kernel, Task, Wait

_Socket, _select = socket.socket, select.select
_fcntl, _flock, _open, _close = fcntl.fcntl, fcntl.flock, os.open, os.close

_NS_PER_S = 1_000_000_000
_CPU_CLOCKS = {time.CLOCK_PROCESS_CPUTIME_ID, time.CLOCK_THREAD_CPUTIME_ID}
_UTC_CLOCKS = {time.CLOCK_REALTIME, getattr(time, "CLOCK_REALTIME_COARSE", 5)}
_POLL_EVENTS = {selectors.EVENT_READ: select.POLLIN, selectors.EVENT_WRITE: select.POLLOUT}

_kernel: Kernel
"""The kernel of this process; every replacement uses it."""


def install(kernel: Kernel) -> None:
    """Have everything that is imported from now on live in the kernel's virtual time."""
    global _kernel  # noqa: PLW0603  one operating system process has one virtual time
    _kernel = kernel
    _install_clocks()
    _install_threads()
    _install_descriptors()
    _install_signals()
    # Whoever asks for unguessable values gets the same ones in every run: jobs are named by them.
    random = _Numbers()
    os.urandom = random.bytes
    os.getppid = os.getpid
    kernel.add_own_attribute(_EventLoops(), "running", lambda: None)


class _EventLoops:
    """The running event loop, of which asyncio knows one in each thread of the operating system."""

    def __init__(self) -> None:
        import asyncio  # noqa: PLC0415  after the replacements

        self._events = asyncio.events

    @property
    def running(self) -> Any:
        """The running loop of the present virtual process."""
        return self._events._get_running_loop()  # noqa: SLF001  documented for event loops

    @running.setter
    def running(self, loop: Any) -> None:
        self._events._set_running_loop(loop)  # noqa: SLF001  as above


# Clocks


def _install_clocks() -> None:
    def clock_ns(clock: int) -> int:
        if clock in _CPU_CLOCKS:
            return 0
        return _kernel.utc_ns() if clock in _UTC_CLOCKS else _kernel.read_mono_ns()

    time.monotonic_ns = time.perf_counter_ns = lambda: _kernel.read_mono_ns()  # noqa: PLW0108  `_kernel` is looked up
    time.monotonic = time.perf_counter = lambda: _kernel.read_mono_ns() / _NS_PER_S
    time.time_ns = lambda: _kernel.utc_ns()  # noqa: PLW0108  as above
    time.time = lambda: _kernel.utc_ns() / _NS_PER_S
    time.thread_time_ns = time.process_time_ns = lambda: 0
    time.thread_time = time.process_time = lambda: 0.0
    time.clock_gettime_ns = clock_ns
    time.clock_gettime = lambda clock: clock_ns(clock) / _NS_PER_S
    time.sleep = lambda time_s: _kernel.sleep(time_s)  # noqa: PLW0108  as above
    _replace_method(datetime_module.datetime, "now", classmethod(_now))


def _now(kind: Any, tz: Any = None) -> Any:
    """Return `datetime.now` of virtual time."""
    return kind.fromtimestamp(_kernel.utc_ns() / _NS_PER_S, tz)


def _replace_method(kind: type, name: str, method: Any) -> None:
    """Replace a method of a class written in C, which has no other way to another clock."""
    (attributes,) = gc.get_referents(kind.__dict__)
    attributes[name] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


class _Numbers:
    """Bytes of a generator with a fixed seed."""

    def __init__(self) -> None:
        self._state = 1

    def bytes(self, size: int) -> bytes:
        """Return the next bytes."""
        drawn = bytearray()
        while len(drawn) < size:
            self._state = (self._state * 6364136223846793005 + 1442695040888963407) & (2**64 - 1)
            drawn += struct.pack("<I", self._state >> 32)
        return bytes(drawn[:size])


# Threads and locks


class Lock:
    """A lock between tasks."""

    def __init__(self) -> None:
        self._is_locked = False
        self._waits: deque[Wait] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002  as threading has it
        """Acquire the lock; return whether that succeeded."""
        if not self._is_locked:
            self._is_locked = True
            return True
        if not blocking:
            return False
        wait = _kernel.new_wait()
        self._waits.append(wait)
        until_ns = None if timeout < 0 else _kernel.deadline_ns(timeout)
        return _kernel.await_wait(wait, until_ns=until_ns) is not TIMED_OUT

    def release(self) -> None:
        """Release the lock, to the task that waits longest."""
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        while self._waits:
            if _kernel.wake(self._waits.popleft(), None):
                return
        self._is_locked = False

    def locked(self) -> bool:
        """Return whether the lock is held."""
        return self._is_locked

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _at_fork_reinit(self) -> None:
        self.__init__()  # type: ignore[misc]  # as threading has it


class RLock:
    """A lock that its task may acquire again."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Task | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002  as threading has it
        """Acquire the lock; return whether that succeeded."""
        if self._owner is _kernel.current:
            self._count += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._count = _kernel.current, 1
        return True

    def release(self) -> None:
        """Release the lock once."""
        if self._owner is not _kernel.current:
            raise RuntimeError("cannot release un-acquired lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    # `threading.Condition` uses these.

    def _is_owned(self) -> bool:
        return self._owner is _kernel.current

    def _release_save(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def _acquire_restore(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = _kernel.current, count


class Thread:
    """A `threading.Thread` that is a task."""

    _num_made = 0

    def __init__(  # noqa: PLR0913, PLR0917  as threading has it
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
        context: Any = None,
    ) -> None:
        Thread._num_made += 1
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name = name or f"Thread-{Thread._num_made}"
        self.daemon = bool(daemon)
        self._task: Task | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = _kernel.start_task(self.name, self.run)
        self._task.thread = self

    def run(self) -> None:
        """Run the target."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        """Return whether the task has begun and not ended."""
        return self._task is not None and self._task.is_alive

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the task."""
        if self._task is not None and self._task.is_alive:
            wait = _kernel.new_wait()
            self._task.ended.append(wait)
            _kernel.await_wait(wait, until_ns=_kernel.deadline_ns(timeout))

    @property
    def ident(self) -> int | None:
        """The number of the task."""
        return None if self._task is None else self._task.ident

    native_id = ident

    @classmethod
    def of(cls, task: Task) -> Self:
        """Return the thread of a task, made when somebody asks for it."""
        if task.thread is None:
            task.thread = cls(name=task.name)
            task.thread._task = task
        return task.thread  # type: ignore[no-any-return]


def _install_threads() -> None:
    threading.Lock = threading._allocate_lock = Lock  # type: ignore[attr-defined]
    threading.RLock = RLock  # type: ignore[misc, assignment]
    threading.Thread = Thread  # type: ignore[misc, assignment]
    threading.get_ident = threading.get_native_id = lambda: _kernel.current.ident
    threading.current_thread = lambda: Thread.of(_kernel.current)
    threading.main_thread = lambda: Thread.of(_kernel.current.process.tasks[0])
    threading.Timer = _timer_class()  # type: ignore[misc]
    queue.SimpleQueue = queue._PySimpleQueue  # type: ignore[attr-defined, misc]
    import _threading_local  # noqa: PLC0415  keeps its values with `threading.current_thread`

    threading.local = _threading_local.local  # type: ignore[misc]


def _timer_class() -> Any:
    class Timer(Thread):
        """A thread that calls a function after a time, unless it is cancelled."""

        def __init__(self, interval: float, function: Callable[..., Any], args: Any = None, kwargs: Any = None) -> None:
            super().__init__()
            self.finished = threading.Event()
            self._call = interval, function, args or (), kwargs or {}

        def cancel(self) -> None:
            """Do not call."""
            self.finished.set()

        def run(self) -> None:
            """Wait, then call."""
            interval, function, args, kwargs = self._call
            if not self.finished.wait(interval):
                function(*args, **kwargs)

    return Timer


# Descriptors: selectors, sockets, files that are locked


class Selector(selectors.EpollSelector):
    """A selector that waits in virtual time; asyncio's event loop uses it."""

    def select(self, timeout: float | None = None) -> Any:
        """Return what is ready within the timeout."""
        ready = super().select(0)
        if ready:
            return ready
        if timeout is not None and timeout <= 0:
            _kernel.give_way()
            return super().select(0)
        _kernel.wait(until_ns=_kernel.deadline_ns(timeout), fd=self.fileno(), events=select.POLLIN)
        return super().select(0)


def _virtual_select(readers: Any, writers: Any, others: Any, timeout: float | None = None) -> Any:
    """Return what `select.select` returns, for one descriptor to be read, after a wait in virtual time."""
    ready = _select(readers, writers, others, 0)
    if any(ready) or timeout == 0:
        return ready
    (one,) = readers
    _kernel.wait(
        until_ns=_kernel.deadline_ns(timeout), fd=one if isinstance(one, int) else one.fileno(), events=select.POLLIN
    )
    return _select(readers, writers, others, 0)


class Socket(_Socket):
    """A socket that waits in virtual time: the operating system's never waits."""

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:  # noqa: A002
        super().__init__(family, type, proto, fileno)
        self._limit_s: float | None = None if _Socket.getblocking(self) else 0.0
        _Socket.setblocking(self, False)  # noqa: FBT003  as the socket has it
        _kernel.current.process.sockets.add(self)

    def settimeout(self, value: float | None) -> None:
        """Set for how long calls wait."""
        self._limit_s = value

    def setblocking(self, flag: bool) -> None:  # noqa: FBT001  as the socket has it
        """Set whether calls wait."""
        self._limit_s = None if flag else 0.0

    def gettimeout(self) -> float | None:
        """Return for how long calls wait."""
        return self._limit_s

    def getblocking(self) -> bool:
        """Return whether calls wait."""
        return self._limit_s != 0.0

    @property
    def timeout(self) -> float | None:
        """For how long calls wait."""
        return self._limit_s

    def close(self) -> None:
        """Close the socket."""
        _kernel.note_written()
        super().close()

    def connect(self, address: Any) -> None:
        """Connect; a full queue of a listener is waited for."""
        self._until_done(lambda: _Socket.connect(self, address), select.POLLOUT, pause_s=0.001)

    def _accept(self) -> Any:
        return self._until_done(lambda: _Socket._accept(self), select.POLLIN)  # type: ignore[attr-defined]

    def recv(self, *arguments: Any) -> bytes:
        """Receive."""
        return self._until_done(lambda: _Socket.recv(self, *arguments), select.POLLIN)  # type: ignore[no-any-return]

    def recv_into(self, *arguments: Any) -> int:
        """Receive into a buffer."""
        return self._until_done(lambda: _Socket.recv_into(self, *arguments), select.POLLIN)  # type: ignore[no-any-return]

    def recvmsg(self, *arguments: Any) -> Any:
        """Receive a message."""
        return self._until_done(lambda: _Socket.recvmsg(self, *arguments), select.POLLIN)

    def send(self, *arguments: Any) -> int:
        """Send."""
        return self._until_done(lambda: _Socket.send(self, *arguments), select.POLLOUT)  # type: ignore[no-any-return]

    def sendmsg(self, *arguments: Any) -> int:
        """Send a message."""
        return self._until_done(lambda: _Socket.sendmsg(self, *arguments), select.POLLOUT)  # type: ignore[no-any-return]

    def sendall(self, data: Any, flags: int = 0) -> None:
        """Send all data."""
        left = memoryview(data).cast("B")
        while len(left):
            left = left[self.send(left, flags) :]

    def _until_done(self, call: Callable[[], Any], events: int, *, pause_s: float | None = None) -> Any:
        """Call until the call need not wait; the time limit is that of the socket."""
        _kernel.note_written()
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
    """Lock bytes of files between virtual processes, which are one process for the operating system."""
    if command not in {fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW}:
        return _fcntl(fd, command, argument)
    kind, _, position, _ = struct.unpack("hhqq", argument[: struct.calcsize("hhqq")])
    status = os.fstat(fd)
    key = (status.st_dev, status.st_ino, position)
    if kind == fcntl.F_UNLCK:
        _kernel.unlock_file(key, fd)
    elif not _kernel.lock_file(key, fd, blocks=command == fcntl.F_OFD_SETLKW):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return argument


def _virtual_flock(fd: Any, operation: int) -> None:
    """Lock a file; who waits for a lock of another task looks again every millisecond."""
    while True:
        try:
            return _flock(fd, operation | (0 if operation & fcntl.LOCK_UN else fcntl.LOCK_NB))
        except BlockingIOError:
            if operation & fcntl.LOCK_NB:
                raise
        _kernel.sleep(0.001)


def _install_descriptors() -> None:
    selectors.DefaultSelector = Selector  # type: ignore[misc]
    select.select = _virtual_select
    socket.socket = socket.SocketType = Socket  # type: ignore[misc]
    fcntl.fcntl, fcntl.flock = _virtual_fcntl, _virtual_flock

    def open_descriptor(*arguments: Any, **named: Any) -> int:
        fd = _open(*arguments, **named)
        _kernel.current.process.descriptors[fd] = os.fstat(fd).st_ino
        return fd

    def close_descriptor(fd: int) -> None:
        _kernel.current.process.descriptors.pop(fd, None)
        _kernel.unlock_closed(fd)
        _kernel.note_written()
        _close(fd)

    os.open, os.close = open_descriptor, close_descriptor


# Signals


def _install_signals() -> None:
    def set_handler(number: int, handler: Any) -> Any:
        handlers = _kernel.current.process.signal_handlers
        before = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return before

    def set_wakeup_fd(fd: int, **_: Any) -> int:
        process = _kernel.current.process
        before, process.wakeup_fd = process.wakeup_fd, fd
        return before

    signal.signal = set_handler
    signal.getsignal = lambda number: _kernel.current.process.signal_handlers.get(number, signal.SIG_DFL)
    signal.set_wakeup_fd = set_wakeup_fd
    signal.siginterrupt = lambda number, flag: None  # noqa: ARG005  as signal has it
