"""Replaces Python's clocks, threads, locks, selectors, sockets and signals by ones that use virtual time.

Call it before any module that uses them is imported, in a process that does nothing else: the replacements are not
undone. They cover what the daemon, its helpers and a training program use.
"""

import os
import signal
from typing import Any

from gpuenergyd_sim.virtual_time import clocks, descriptors, threads
from gpuenergyd_sim.virtual_time.kernel import VirtualKernel


def install(kernel: VirtualKernel) -> None:
    """Make every module that is imported from now on use the kernel's virtual time."""
    for part in (clocks, threads, descriptors):
        part.install(kernel)
    _install_signals(kernel)
    replaced: Any = os
    replaced.getppid = os.getpid  # virtual processes are children of the process that runs them
    kernel.add_own_attribute(_EventLoops(), "running", lambda: None)


def _install_signals(kernel: VirtualKernel) -> None:
    """Replace the functions of `signal`: each process has its own handlers. `Process.signal` delivers signals."""

    def set_handler(number: int, handler: Any) -> Any:
        handlers = kernel.current.process.signal_handlers
        before = handlers.get(number, signal.SIG_DFL)
        handlers[number] = handler
        return before

    def set_wakeup_fd(fd: int, **_: Any) -> int:
        process = kernel.current.process
        before, process.wakeup_fd = process.wakeup_fd, fd
        return before

    replaced: Any = signal
    replaced.signal = set_handler
    replaced.getsignal = lambda number: kernel.current.process.signal_handlers.get(number, signal.SIG_DFL)
    replaced.set_wakeup_fd = set_wakeup_fd
    replaced.siginterrupt = lambda number, flag: None  # noqa: ARG005  the signature of signal


class _EventLoops:
    """The running event loop; asyncio stores only one for each thread of the operating system."""

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
