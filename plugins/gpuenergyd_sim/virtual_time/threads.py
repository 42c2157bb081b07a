"""Python's threads as tasks in virtual time, and its locks between them."""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

from gpuenergyd_sim.virtual_time.kernel import TIMED_OUT, Task, VirtualKernel, Wait

_kernel: VirtualKernel
"""The kernel of this process; an operating system process has one virtual time."""


def install(kernel: VirtualKernel) -> None:
    """Replace the classes of `threading`; subclasses of the old ones that exist already are not changed."""
    global _kernel  # noqa: PLW0603  see there
    _kernel = kernel
    replaced: Any = threading
    replaced.Lock = replaced._allocate_lock = Lock  # noqa: SLF001  `threading.Condition` uses it
    replaced.RLock = RLock
    replaced.Thread = Thread
    replaced.Timer = _timer_class()
    replaced.get_ident = replaced.get_native_id = lambda: kernel.current.ident
    replaced.current_thread = lambda: Thread.of(kernel.current)
    replaced.main_thread = lambda: Thread.of(kernel.current.process.tasks[0])
    simple: Any = queue
    simple.SimpleQueue = simple._PySimpleQueue  # noqa: SLF001  the C version would block the process
    import _threading_local  # noqa: PLC0415  keeps its values with the new `threading.current_thread`

    replaced.local = _threading_local.local
    replaced._time = simple.time = time.monotonic  # noqa: SLF001  both modules imported the function before it was replaced


class Lock:
    """A lock between tasks."""

    def __init__(self) -> None:
        self._is_locked = False
        self._waits: deque[Wait] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002  as threading has it
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
        """Release the lock; the task that has waited longest gets it."""
        if not self._is_locked:
            raise RuntimeError("release unlocked lock")
        while self._waits:
            if _kernel.wake(self._waits.popleft(), None):
                return
        self._is_locked = False

    def locked(self) -> bool:
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

    def __init__(
        self,
        group: None = None,  # noqa: ARG002  as threading has it
        target: Callable[..., Any] | None = None,
        name: str | None = None,
        args: Any = (),
        kwargs: Any = None,
        *,
        daemon: bool | None = None,
        context: Any = None,  # noqa: ARG002  as threading has it
    ) -> None:
        Thread._num_made += 1
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name = name or f"Thread-{Thread._num_made}"
        self.daemon = bool(daemon)
        self._task: Task | None = None

    def start(self) -> None:
        self._task = _kernel.start_task(self.name, self.run)
        self._task.thread = self

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        """Return whether the task has begun and not ended."""
        return self._task is not None and self._task.is_alive

    def join(self, timeout: float | None = None) -> None:
        if self._task is not None and self._task.is_alive:
            wait = _kernel.new_wait()
            self._task.ended.append(wait)
            _kernel.await_wait(wait, until_ns=_kernel.deadline_ns(timeout))

    @property
    def ident(self) -> int | None:
        return None if self._task is None else self._task.ident

    native_id = ident

    @classmethod
    def of(cls, task: Task) -> Self:
        """Return the thread object of a task; the first call creates it."""
        if task.thread is None:
            task.thread = cls(name=task.name)
            task.thread._task = task  # noqa: SLF001  its own class
        return task.thread  # type: ignore[no-any-return]


def _timer_class() -> Any:
    class Timer(Thread):
        """A thread that calls a function after a time, unless it is cancelled."""

        def __init__(self, interval: float, function: Callable[..., Any], args: Any = None, kwargs: Any = None) -> None:
            super().__init__()
            self.finished = threading.Event()
            self._call = interval, function, args or (), kwargs or {}

        def cancel(self) -> None:
            self.finished.set()

        def run(self) -> None:
            interval, function, args, kwargs = self._call
            if not self.finished.wait(interval):
                function(*args, **kwargs)

    return Timer
