"""Scheduler of tasks in virtual time: one task runs at a time, and the clock jumps when all of them wait.

Theory of operation. A task takes the place of a thread: a function on a stack of its own (a greenlet). Tasks belong to
virtual processes, which can be killed. A task runs until it waits for a time, a file descriptor or another task. The
kernel then runs the next ready task, in the order in which tasks became ready. When none is ready it polls the file
descriptors that tasks wait for, and when none of these is ready either, it sets the clock to the next time that a task
waits for. Computing therefore takes no virtual time, apart from `READ_COST_NS` for each reading of the clock, and the
order of all events is independent of the host: on a busy host a run takes longer, but its events are the same.
"""

import contextlib
import heapq
import itertools
import os
import select
import sys
import traceback
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import greenlet

_close = os.close

READ_COST_NS = 50
"""Virtual time that a reading of the clock takes, so that a loop which reads it until a given time ends."""
_LOOK_EVERY = 64
"""File descriptors are polled after this many jumps of the clock, even if no task is known to have written to one."""
_OUTSIDE_WAIT_MS = 200
_FIRST_PID = 1_000

TIMED_OUT = object()
"""Result of a wait that reached its time limit."""


class DeadlockError(RuntimeError):
    """Every task waits for another one, without a time limit."""


@dataclass(slots=True, eq=False)
class Wait:
    """One wait of a task; it can end only once."""

    task: "Task"
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Task:
    """A thread of a virtual process."""

    name: str
    process: "Process"
    ident: int
    stack: Any = None
    thread: Any = None
    """The object that represents the task as a `threading.Thread`."""
    is_alive: bool = True
    error: BaseException | None = None
    ended: list[Wait] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Process:
    """A virtual process: its tasks, the descriptors to close when it ends, and its own values of module attributes."""

    name: str
    kernel: "VirtualKernel"
    pid: int
    tasks: list[Task] = field(default_factory=list)
    descriptors: dict[int, int] = field(default_factory=dict)
    """Open file descriptors with the file's inode, which shows whether a number has been reused for another file."""
    sockets: Any = field(default_factory=weakref.WeakSet)
    own_values: list[Any] = field(default_factory=list)
    signal_handlers: dict[int, Any] = field(default_factory=dict)
    wakeup_fd: int = -1
    is_alive: bool = True
    exit_status: int | None = None
    """Status of an orderly end, 1 after an exception, minus the signal's number after `kill`; None while it runs."""
    ended_fd: int = -1
    """Readable once the process has ended, as a pidfd is."""
    _ending_fd: int = -1

    def signal(self, number: int) -> None:
        """Deliver a signal: run its handler and write to the wake-up descriptor, or kill a process without handler."""
        handler = self.signal_handlers.get(number)
        if not callable(handler):
            self.kill(number)
            return
        handler(number, None)
        if self.wakeup_fd >= 0:
            with contextlib.suppress(OSError):
                os.write(self.wakeup_fd, bytes([number]))
        self.kernel.record_write()

    def kill(self, number: int = 9) -> None:
        """End the process at once, as SIGKILL does: its tasks stop without cleanup, and its descriptors are closed."""
        if not self.is_alive:
            return
        for task in self.tasks:
            task.is_alive = False
        self._end(-number)

    def finish(self, status: int) -> None:
        """Record the orderly end of the process's first task; its other tasks end with it."""
        if self.is_alive:
            for task in self.tasks:
                task.is_alive = False
            self._end(status)

    def _end(self, status: int) -> None:
        self.is_alive = False
        self.exit_status = status
        for descriptor, inode in self.descriptors.items():
            with contextlib.suppress(OSError):
                if os.fstat(descriptor).st_ino == inode:
                    _close(descriptor)
        for held in sorted(self.sockets, key=lambda held: held.fileno()):
            held.close()
        _close(self._ending_fd)
        self.kernel.forget(self)
        self.kernel.record_write()


class VirtualKernel:
    """The tasks of all virtual processes, and their clock."""

    def __init__(self, *, mono_ns: int, utc_ns: int) -> None:
        self.now_ns = mono_ns
        self._utc_offset_ns = utc_ns - mono_ns
        self._numbers = itertools.count(1)
        self._ready: deque[tuple[Task, Any]] = deque()
        self._timers: list[tuple[int, int, Wait]] = []
        self._poll = select.poll()
        self._waits_by_fd: dict[int, list[tuple[Wait, int]]] = {}
        self._is_written = False
        self._num_jumps = 0
        self._hub: Any = greenlet.getcurrent()
        self._own_attributes: list[tuple[Any, str, Any]] = []
        self.files: dict[int, tuple[int, int]] = {}
        """Device and inode of the open descriptors on which a lock was taken or released."""
        self._file_locks: dict[tuple[int, int, int], tuple[Process, int]] = {}
        self._lock_waits: dict[tuple[int, int, int], deque[Wait]] = {}
        self._keeps_real_time: Callable[[], int] | None = None
        self.current: Task = Task("hub", Process("hub", self, 0), 0)
        self.on_outside: Callable[[], None] = lambda: None
        """Called whenever no task is ready; it may raise."""

    # The clock

    def read_mono_ns(self) -> int:
        self.now_ns += READ_COST_NS
        return self.now_ns

    def utc_ns(self) -> int:
        """Return the virtual time of day, in nanoseconds since 1970."""
        return self.now_ns + self._utc_offset_ns

    def keep_real_time(self, mono_ns: Callable[[], int]) -> None:
        """From now on, advance the clock at the speed of the host's, for users who interact with the processes."""
        ahead_ns = self.now_ns - mono_ns()
        self._keeps_real_time = lambda: mono_ns() + ahead_ns

    # Processes and tasks

    def add_own_attribute(self, holder: Any, name: str, initial: Any) -> None:
        """Give every process its own value of an attribute of a module or object; `initial()` returns the first one."""
        self._own_attributes.append((holder, name, initial))

    def start_process(self, name: str, main: Callable[[], Any]) -> Process:
        """Start a process whose first task runs `main`; the process ends with it."""
        process = Process(name, self, _FIRST_PID + next(self._numbers))
        process.ended_fd, process._ending_fd = os.pipe()  # noqa: SLF001  closed by the process itself when it ends

        def run() -> None:
            try:
                status = main()
            except SystemExit as error:
                status = error.code
            process.finish(status if isinstance(status, int) else 0 if status is None else 1)

        self.start_task(name, run, process=process)
        return process

    def start_task(self, name: str, run: Callable[[], Any], *, process: Process | None = None) -> Task:
        """Start a task in a process, by default that of the running one."""
        owner = process or self.current.process
        task = Task(name, owner, next(self._numbers))

        def run_and_end() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001  a task that fails must not end the kernel
                task.error = error
                if not isinstance(error, SystemExit):
                    sys.stderr.write(f"{owner.name}: task {name} failed:\n")
                    traceback.print_exception(error)
                if owner.tasks and owner.tasks[0] is task:
                    owner.finish(1)
            task.is_alive = False
            for wait in task.ended:
                self.wake(wait, None)

        task.stack = greenlet.greenlet(run_and_end, parent=self._hub)
        owner.tasks.append(task)
        self._ready.append((task, None))
        return task

    def run_until(self, process: Process) -> None:
        """Run all tasks until a process has ended.

        Raises:
            DeadlockError: every task waits without a time limit.
        """
        while process.is_alive:
            self.on_outside()
            while self._ready and process.is_alive:
                task, result = self._ready.popleft()
                if task.is_alive:
                    self._switch(task, result)
            if process.is_alive:
                self._wait_for_events()

    # Waiting, on a task

    def wait(self, *, until_ns: int | None = None, fd: int | None = None, events: int = 0) -> Any:
        """Wait for an instant, for events of a descriptor, or for `wake`; return the result, or TIMED_OUT."""
        wait = self.new_wait()
        return self.await_wait(wait, until_ns=until_ns, fd=fd, events=events)

    def new_wait(self) -> Wait:
        """Return a new wait of the running task, for the tasks that are to wake it."""
        return Wait(self.current)

    def await_wait(self, wait: Wait, *, until_ns: int | None = None, fd: int | None = None, events: int = 0) -> Any:
        """Wait as `wait` does, with a wait from `new_wait`."""
        if until_ns is not None:
            heapq.heappush(self._timers, (until_ns, next(self._numbers), wait))
        if fd is None:
            return self._hub.switch()
        self._watch(fd, wait, events)
        try:
            return self._hub.switch()
        finally:
            self._unwatch(fd, wait)

    def wake(self, wait: Wait, result: Any) -> bool:
        """End a wait; return False if it had ended already."""
        if wait.is_over or not wait.task.is_alive:
            return False
        wait.is_over = True
        self._ready.append((wait.task, result))
        return True

    def give_way(self) -> None:
        """Let the other ready tasks run first."""
        if self._ready:
            self._ready.append((self.current, None))
            self._hub.switch()

    def sleep(self, time_s: float) -> None:
        self.wait(until_ns=self.now_ns + max(0, round(time_s * 1e9)))

    def record_write(self) -> None:
        """Poll descriptors before the clock jumps, because a task may have written to one."""
        self._is_written = True

    def deadline_ns(self, timeout_s: float | None) -> int | None:
        """Return the time at which a timeout ends; None without a timeout."""
        return None if timeout_s is None else self.now_ns + max(0, round(timeout_s * 1e9))

    # File locks between virtual processes

    def lock_file(self, key: tuple[int, int, int], fd: int, *, blocks: bool) -> bool:
        """Lock a byte of a file; return False if another descriptor holds it and `blocks` is False."""
        while (holder := self._file_locks.get(key)) is not None and holder != (self.current.process, fd):
            if not blocks:
                return False
            wait = self.new_wait()
            self._lock_waits.setdefault(key, deque()).append(wait)
            self.await_wait(wait)
        self._file_locks[key] = (self.current.process, fd)
        return True

    def unlock_file(self, key: tuple[int, int, int], fd: int) -> None:
        """Unlock a byte of a file, if this descriptor has locked it."""
        if self._file_locks.get(key) == (self.current.process, fd):
            self._release_lock(key)

    def unlock_closed(self, fd: int) -> None:
        """Release the locks of a descriptor that is being closed."""
        self.files.pop(fd, None)
        if self._file_locks:
            self._release_locks(lambda holder, held_fd: holder is self.current.process and held_fd == fd)

    def forget(self, process: Process) -> None:
        """Drop the waits of a process that has ended, and release its locks."""
        for fd, waits in list(self._waits_by_fd.items()):
            for wait, _ in waits:
                if wait.task.process is process:
                    self._unwatch(fd, wait)
        self.files.clear()
        self._release_locks(lambda holder, _: holder is process)

    def _release_locks(self, is_meant: Callable[[Process, int], bool]) -> None:
        for key in [key for key, holder in self._file_locks.items() if is_meant(*holder)]:
            self._release_lock(key)

    def _release_lock(self, key: tuple[int, int, int]) -> None:
        del self._file_locks[key]
        waits = self._lock_waits.get(key)
        while waits:
            if self.wake(waits.popleft(), None):
                break

    # The hub

    def _switch(self, task: Task, result: Any) -> None:
        if task.process is not self.current.process:
            self._swap_own_values(self.current.process, task.process)
        self.current = task
        task.stack.switch(result) if task.stack else task.stack.switch()

    def _swap_own_values(self, before: Process, after: Process) -> None:
        before.own_values = [getattr(holder, name) for holder, name, _ in self._own_attributes]
        missing = self._own_attributes[len(after.own_values) :]
        after.own_values += [initial() for _, _, initial in missing]
        for (holder, name, _), value in zip(self._own_attributes, after.own_values, strict=True):
            setattr(holder, name, value)

    def _wait_for_events(self) -> None:
        """Wake the tasks whose descriptors are ready; if there are none, advance the clock to the next timer."""
        self._num_jumps += 1
        if self._is_written or self._keeps_real_time is not None or self._num_jumps % _LOOK_EVERY == 0:
            self._is_written = False
            if self._look_at_descriptors(0):
                return
        while self._timers and (self._timers[0][2].is_over or not self._timers[0][2].task.is_alive):
            heapq.heappop(self._timers)
        if not self._timers:
            if not self._look_at_descriptors(_OUTSIDE_WAIT_MS) and self._keeps_real_time is None:
                waiting = ", ".join(f"fd {fd}" for fd in self._waits_by_fd)
                raise DeadlockError(f"nothing will happen any more; waiting: {waiting}")
            return
        next_ns = self._timers[0][0]
        if self._keeps_real_time is not None:
            real_ns = self._keeps_real_time()
            if real_ns < next_ns:
                self._look_at_descriptors(min(_OUTSIDE_WAIT_MS, -(-(next_ns - real_ns) // 1_000_000)))
                self.now_ns = max(self.now_ns, min(next_ns, self._keeps_real_time()))
                return
        self.now_ns = max(self.now_ns, next_ns)
        while self._timers and self._timers[0][0] <= self.now_ns:
            self.wake(heapq.heappop(self._timers)[2], TIMED_OUT)

    def _look_at_descriptors(self, limit_ms: int) -> bool:
        is_any = False
        for fd, events in self._poll.poll(limit_ms):
            for wait, wanted in list(self._waits_by_fd.get(fd, ())):
                if events & (wanted | select.POLLERR | select.POLLHUP | select.POLLNVAL):
                    is_any = self.wake(wait, fd) or is_any
        return is_any

    def _watch(self, fd: int, wait: Wait, events: int) -> None:
        self._waits_by_fd.setdefault(fd, []).append((wait, events))
        self._register(fd)
        self._is_written = True

    def _unwatch(self, fd: int, wait: Wait) -> None:
        left = [entry for entry in self._waits_by_fd.get(fd, ()) if entry[0] is not wait]
        if left:
            self._waits_by_fd[fd] = left
        else:
            self._waits_by_fd.pop(fd, None)
        self._register(fd)

    def _register(self, fd: int) -> None:
        events = 0
        for wait, wanted in self._waits_by_fd.get(fd, ()):
            if wait.task.is_alive:
                events |= wanted
        if events:
            self._poll.register(fd, events)
        else:
            with contextlib.suppress(KeyError):
                self._poll.unregister(fd)
